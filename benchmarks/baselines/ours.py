"""Tilewright. Without effort no candidate is measured, and the analytical model decides."""

from __future__ import annotations

from typing import Any

from .job import Job, Run, torch_model, untuned


def load(job: Job) -> Run:
    return _loaded(job, "fast")


def load_relaxed(job: Job) -> Run:
    """With algorithms that have no bound for each element: Strassen, paired products without a certificate."""
    return _loaded(job, "relaxed")


def _loaded(job: Job, numerics: str) -> Run:
    import tilewright

    model, inputs = torch_model(job)
    compiled: Any = tilewright.compile(
        model,
        inputs,
        target="cpu",
        effort=job.effort,
        budget=job.budget,
        threads=job.threads,
        numerics=numerics,
        db=untuned(job.folder, job.effort),
    )

    def run() -> Any:
        return compiled(*inputs)

    return run

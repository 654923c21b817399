"""torch.compile with its own backend, tuned as far as it goes: `max_autotune` and frozen weights."""

from __future__ import annotations

import os
import shutil
from typing import Any

from .job import Job, NotAvailable, Run, torch_model


def load(job: Job) -> Run:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise NotAvailable(f"Inductor needs a C++ compiler, and there is no {compiler} here (set CXX)")
    # A cache of its own, so that the seconds of set-up are those of a first compilation, unless the user names one.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(job.folder / "inductor-cache"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(job.threads))
    import torch

    model, inputs = torch_model(job)
    compiled = torch.compile(model, options={"max_autotune": True, "freezing": True})

    # Freezing is refused where gradients could still be requested. `no_grad`, not `inference_mode`: a change of mode
    # between calls would compile again.
    @torch.no_grad()
    def run() -> Any:
        return compiled(*inputs)

    return run

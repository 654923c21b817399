"""Piece -> GpuKernel: the default program of a task, or what a template makes of a config."""

from __future__ import annotations

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda.build import GpuKernel, GpuSource, build, source_of
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.errors import SpaceError
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.gpu.default import default_program
from tilewright.space.sketches.cuda import SKETCHES
from tilewright.space.templates.cuda import TEMPLATES
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.pieces import Piece, Way
from tilewright.support.fingerprint import fingerprint


def piece_source(piece: Piece, machine: GpuMachine, numerics: str) -> GpuSource:
    """SpaceError where there is no such kernel."""
    work = GpuWork(piece.task, machine, numerics)
    if piece.config is not None:
        for template in (*TEMPLATES, *SKETCHES):
            if template.name == piece.config.template and (applied := template.apply(work)) is not None:
                return tensor_source(applied.kernel(piece.config))
        raise SpaceError(f"no template called {piece.config.template!r} computes {piece.task.label}")
    if work.formula is None:
        raise SpaceError(f"{piece.task.label} has no default program")
    return source_of(default_program(work.formula, machine))


def build_piece(piece: Piece, machine: GpuMachine, numerics: str, cache: ObjectCache | None) -> GpuKernel:
    return build(piece_source(piece, machine, numerics), machine, numerics, cache)


def code_of(way: Way, machine: GpuMachine, numerics: str) -> str:
    """The fingerprint of all that runs: what a measured time holds for."""
    return fingerprint(
        [
            repr(piece.call) if piece.call is not None else piece_source(piece, machine, numerics).text
            for piece in way.pieces
        ]
    )

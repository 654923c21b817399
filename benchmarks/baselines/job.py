"""What a system is asked to compute, and what every system's process needs for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Arrays = list[np.ndarray]
Run = Callable[[], Any]


class NotAvailable(Exception):
    """This system cannot take part here, or with this model; the message says why. Not a failure."""


class Files:
    """What the processes of one job leave for each other in its folder."""

    folder: Path

    @property
    def reference_file(self) -> Path:
        """The outputs of torch in eager mode."""
        return self.folder / "reference.npz"

    @property
    def onnx_file(self) -> Path:
        return self.folder / "model.onnx"

    @property
    def onnx_error_file(self) -> Path:
        """Why there is no `onnx_file`."""
        return self.folder / "model.onnx.error"

    def outputs_file(self, system: str) -> Path:
        return self.folder / f"outputs-{system}.npz"


def untuned(folder: Path, effort: str = "none") -> Path | None:
    """With effort "none" an empty tuning database, so that nothing which was tuned on this machine takes part."""
    from tilewright.db.database import Database

    if effort != "none":
        return None
    path = folder / "untuned.sqlite"
    with Database.open(path):
        return path


@dataclass(frozen=True)
class Job(Files):
    model: str
    small: bool
    batch: int
    threads: int
    folder: Path  # holds inputs.npz, reference.npz and, where somebody needs it, model.onnx
    effort: str = "none"  # of Tilewright
    budget: float | None = None  # seconds of tuning

    @property
    def inputs_file(self) -> Path:
        return self.folder / "inputs.npz"


def arrays_of(outputs: Any) -> Arrays:
    """The outputs of a model, whatever holds them, as a flat list of arrays."""
    if isinstance(outputs, np.ndarray):
        return [outputs]
    if hasattr(outputs, "detach"):  # a torch tensor, in a process where torch may be absent
        tensor = outputs.detach().cpu()
        return [(tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()]
    if isinstance(outputs, Mapping):
        return [array for value in outputs.values() for array in arrays_of(value)]
    if isinstance(outputs, Sequence):
        return [array for value in outputs for array in arrays_of(value)]
    raise TypeError(f"an output of type {type(outputs).__name__} is no tensor")


def save_arrays(path: Path, arrays: Arrays) -> None:
    np.savez(path, *arrays)


def load_arrays(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as stored:
        return [stored[f"arr_{position}"] for position in range(len(stored.files))]


def torch_model(job: Job) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs, with torch set to the job's number of threads."""
    import torch

    from tilewright import zoo

    torch.set_num_threads(job.threads)
    model = zoo.build(job.model, seed=0, small=job.small).eval()
    return model, tuple(torch.from_numpy(array) for array in load_arrays(job.inputs_file))


def onnx_model(job: Files) -> Path:
    if not job.onnx_file.exists():
        reason = job.onnx_error_file.read_text() if job.onnx_error_file.exists() else "not exported"
        raise NotAvailable(f"no ONNX file of it: {reason}")
    return job.onnx_file

"""The registry of learned cost models, including user-defined ones.

To add one, write a class with the methods of a `CostModel` (see `model.py`), constructed from (candidates, threads,
seed, experience). Register it here or as an entry point of the group `tilewright.cost_models`, and select it with
`compile(cost_model=...)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewright import knobs
from tilewright.cost.analytical import Analytical
from tilewright.cost.attention import Attention
from tilewright.cost.boosted import Boosted, Experience
from tilewright.cost.model import CostModel
from tilewright.cost.weights import SHIPPED
from tilewright.errors import CostModelWarning, OptionError
from tilewright.hw import Machine
from tilewright.measure import calibration, gpu_calibration
from tilewright.space.candidates import Configs
from tilewright.support.plugins import named

ENTRY_POINTS = "tilewright.cost_models"

# Arguments: the candidates of one task, the threads of a call, a seed, and outcomes of other tasks.
Factory = Callable[[Configs, int, int, Sequence[Experience]], CostModel]


def _boosted(candidates: Configs, threads: int, seed: int, experience: Sequence[Experience]) -> CostModel:
    return Boosted(candidates, threads, seed=seed, warm=experience)


def _analytical(candidates: Configs, threads: int, seed: int, experience: Sequence[Experience]) -> CostModel:
    return Analytical(candidates, threads)


def _attention(candidates: Configs, threads: int, seed: int, experience: Sequence[Experience]) -> CostModel:
    _note_assumed_rates(candidates.machine)
    chosen = knobs.get("cost_weights")
    path = Path(chosen) if chosen else SHIPPED
    return Attention(candidates, threads, seed=seed, warm=experience, path=path)


_noted: set[str] = set()  # machines, by their descriptions


def _note_assumed_rates(machine: Machine) -> None:
    """Warn once that a machine's rates are those of a data sheet: the network was trained at measured ones."""
    is_stored = _CALIBRATIONS.get(machine.kind)
    name = machine.describe()
    if is_stored is None or name in _noted or is_stored(machine):
        return
    _noted.add(name)
    warnings.warn(
        f"the attention model predicts at assumed rates, because {name} is not calibrated; "
        "to measure them, run `tilewright doctor` on it",
        CostModelWarning,
        stacklevel=4,
    )


_CALIBRATIONS: dict[str, Callable[[Any], object | None]] = {
    "cpu": calibration.stored,
    "cuda": gpu_calibration.stored,
}

COST_MODELS: dict[str, Factory] = {"boosted": _boosted, "analytical": _analytical, "attention": _attention}


def register(name: str, factory: Factory) -> None:
    """Register a cost model under a name for `compile(cost_model=...)`."""
    if not name or not callable(factory):
        raise OptionError(
            f"{factory!r} is not a cost model",
            remedy="give a class, or a function, of (candidates, threads, seed, experience) that returns a CostModel",
        )
    if name in COST_MODELS:
        raise OptionError(f"there is a cost model {name!r} already", remedy="choose another name")
    COST_MODELS[name] = factory


def unregister(name: str) -> None:
    COST_MODELS.pop(name, None)


def cost_model_named(name: str) -> Factory:
    """Return the cost model of this name, or raise OptionError."""
    return named("cost_model", name, COST_MODELS, ENTRY_POINTS)

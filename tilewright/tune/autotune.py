"""`@tilewright.autotune`: a tile kernel whose knobs the tuner sets, for each value of its key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import AutotuneError
from tilewright.tile.ir import TileProgram
from tilewright.tile.kernel import Grid, Kernel
from tilewright.tune.effort import resolve_tuning
from tilewright.tune.kernel_space import SpaceLike, Where
from tilewright.tune.launches import LaunchedTile
from tilewright.tune.tuned_kernel import TunedKernel


def autotune(
    space: SpaceLike,
    key: Sequence[str] = (),
    *,
    where: Where | Sequence[Where] = (),
    reference: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    effort: str = "none",
    budget: float | str | None = None,
    trials: int | None = None,
    seed: int = 0,
    search: str = "guided",
    cost_model: str = "boosted",
    lock: str | Path | None = None,
    db: str | Path | None = None,
) -> Callable[[Kernel], Autotuned]:
    """Let the tuner set the knobs of a tile kernel, for each value of its key; goes above `@tilewright.kernel`.

        @tilewright.autotune({"BLOCK": (256, 1024, 4096)}, key=["n"], where=lambda BLOCK, n: BLOCK <= 4 * n)
        @tilewright.kernel
        def scale(x, out, n, factor, BLOCK: tl.constexpr):
            ...

        scale[lambda meta: (tl.cdiv(meta["n"], meta["BLOCK"]),)](x, out, n, 2.0)     # measures nothing
        scale.tune(lambda meta: (tl.cdiv(meta["n"], meta["BLOCK"]),), x, out, n, 2.0)  # measures, keeps the winner
        print(scale.explain())

    - `space`: choices by knob, the first of each its default; or a list of configs, each a dict. A knob is a constexpr
      parameter of the kernel, or an option of the launch: `threads` on CPUs, `warps` and `stages` on GPUs.
    - `key`: parameters whose values decide which config is best: sizes, or tensors, whose shape counts. Types of
      arguments, other constexprs and the machine always count.
    - `where`: a function (or several) of knobs and arguments by name: whether a config is legal for a launch.
    - `reference`: a function of the kernel's arguments by name that returns what the tensors which the kernel stores to
      hold afterwards: one array, a tuple in the order of parameters, or a dict by name. Without one, a config must
      agree with the interpreter on some program instances of the default config.
    - `tolerance`: relative, against the reference; None: by the type of the elements.
    - `effort`: "none": a launch measures nothing. It takes what was measured before, what measurements at other values
      of the key suggest, or what the analytical model predicts. "quick" and "full": the first launch with new values of
      the key tunes. `budget`: seconds that it may take. `trials`: configs at most.
    - `seed`, `search`, `cost_model`, `db`: as in `tilewright.compile`.
    - `lock`: a file of configs. Where it exists, launches take what it says; otherwise it is written.
    """
    options = resolve_tuning(effort, budget, seed, search, db, cost_model, trials=trials)

    def decorate(kernel: Kernel) -> Autotuned:
        if not isinstance(kernel, Kernel):
            raise AutotuneError(
                f"autotune needs a tile kernel, got {kernel!r}",
                remedy="write @tilewright.autotune(...) above @tilewright.kernel",
            )
        return Autotuned(kernel, LaunchedTile(kernel), space, key, where, reference, tolerance, options, lock)

    return decorate


class Autotuned(TunedKernel):
    """A tile kernel whose knobs are set: launched as the kernel itself, without them."""

    launch_options = ("debug", "unwritten", "options")

    def __init__(self, kernel: Kernel, *rest: Any) -> None:
        super().__init__(*rest)
        functools.update_wrapper(self, kernel.function)
        self.kernel = kernel

    def program(self, grid: Grid, *args: Any, **kwargs: Any) -> TileProgram:
        """The tile program that a launch with these arguments runs."""
        bound = self._bound(args, kwargs)
        knobs, _ = self._config_for(grid, bound)
        return self.kernel.program(**bound, **knobs)

"""Tilings that an exploration has chosen: of which layer each is, and their form in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewright.errors import DesignFileError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_system import GemminiSystem
from tilewright.loops.gemmini.layer import Buffers, Layer, Tiling, needed_rows
from tilewright.loops.gemmini.tiling import default_tiling


def shape_of(layer: Layer) -> str:
    """The loops of a layer: what its bias, its padding and its scale do not change."""
    kernel = "x".join(map(str, layer.kernel))
    return f"{layer.rows}x{layer.cols}x{layer.in_channels} to {layer.out_channels}, {kernel}, {layer.stride}"


def fields_of(tiling: Tiling) -> dict[str, Any]:
    """The form in a file."""
    return {
        "rows": tiling.rows,
        "cols": tiling.cols,
        "in_blocks": tiling.in_blocks,
        "out_blocks": tiling.out_blocks,
        "taps": tiling.taps,
        "inner": tiling.inner,
        "buffers": tiling.buffers,
    }


def tiling_of(fields: Mapping[str, Any]) -> Tiling:
    """Raise KeyError, TypeError or ValueError if it is no tiling."""
    taps, inner = fields["taps"], fields["inner"]
    rows, cols, in_blocks, out_blocks = (fields[name] for name in ("rows", "cols", "in_blocks", "out_blocks"))
    buffers = Buffers(*fields["buffers"])
    if inner not in ("pixels", "channels"):
        raise ValueError(f"inner must be 'pixels' or 'channels', got {inner!r}")
    if taps is not None and len(taps) != 2:
        raise ValueError(f"taps must be two numbers or null, got {taps!r}")
    for each in (rows, cols, in_blocks, out_blocks, *(taps or ()), *buffers):
        if type(each) is not int or each < 1:
            raise ValueError(f"a tiling has positive integers, got {each!r}")
    if max(buffers) > 2:
        raise ValueError(f"an operand has one or two buffers, got {list(buffers)}")
    return Tiling(
        rows, cols, in_blocks, out_blocks, None if taps is None else (taps[0], taps[1]), inner, buffers
    )


def read_design(path: Path) -> tuple[GemminiMachine, tuple[tuple[str, Tiling], ...]]:
    """The machine of a file that `tilewright codesign` wrote, and the tilings of its layers."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        programs = [layer["program"] for layer in data["layers"] if layer["program"] is not None]
        tilings = tuple((str(each["shape"]), tiling_of(each["tiling"])) for each in programs)
        return GemminiMachine(**data["machine"]), tilings
    except OSError as error:
        raise DesignFileError(f"cannot read the design {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError) as error:
        raise DesignFileError(f"{path} holds no design of an accelerator: {error!r}") from None


@lru_cache(maxsize=1024)
def tiling_for(layer: Layer, system: GemminiSystem) -> Tiling:
    """The tiling that the system's design has for such a layer, or else the default one. Raise LayerFitError if no
    tile fits."""
    found = dict(system.tilings).get(shape_of(layer))
    if isinstance(found, Tiling) and layer.pooling is None and fits(layer, found, system.accelerator):
        return found
    return default_tiling(layer, system.accelerator)


def fits(layer: Layer, tiling: Tiling, machine: GemminiMachine) -> bool:
    scratchpad, accumulator = needed_rows(layer, tiling, machine.dim).held(tiling.buffers)
    return scratchpad <= machine.scratchpad_rows and accumulator <= machine.accumulator_rows

"""Calibrations that travel: a node sends what it measured of its machine, and the driver predicts that machine with it.

They are kept by the machine's description, so machines of one label that differ are calibrated apart.
"""

from __future__ import annotations

import msgspec

from tilewright.hw.cpu import CpuMachine
from tilewright.hw.gpu import GpuMachine
from tilewright.hw.machine import from_text
from tilewright.measure import calibration, gpu_calibration


def stored(described: str) -> str:
    """The calibration of this machine as JSON; "" if it was not calibrated."""
    machine = from_text(described)
    found: msgspec.Struct | None = None
    if isinstance(machine, CpuMachine):
        found = calibration.stored(machine)
    elif isinstance(machine, GpuMachine):
        found = gpu_calibration.stored(machine)
    return "" if found is None else msgspec.json.encode(found).decode()


def keep(described: str, record: str) -> None:
    """Keep a node's calibration for the machine of this description, unless there is one already. One that is of
    another machine or version, or implausible, is dropped."""
    machine = from_text(described)
    try:
        if isinstance(machine, CpuMachine) and calibration.stored(machine) is None:
            found = msgspec.json.decode(record, type=calibration.Calibration)
            if calibration.is_of(found, machine):
                calibration.keep(machine, found)
        elif isinstance(machine, GpuMachine) and gpu_calibration.stored(machine) is None:
            card = msgspec.json.decode(record, type=gpu_calibration.GpuCalibration)
            if gpu_calibration.is_of(card, machine):
                gpu_calibration.keep(machine, card)
    except msgspec.MsgspecError:
        return

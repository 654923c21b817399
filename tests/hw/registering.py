"""What a process that builds candidates imports: it registers the intrinsics of `declared.py`."""

from __future__ import annotations

from tests.hw.declared import ABSENT, FMA, MUL, NONSENSE, WRONG
from tilewright.hw.intrinsics import find_intrinsic, register_intrinsic

for intrinsic in (FMA, MUL, WRONG, NONSENSE, ABSENT):
    if find_intrinsic(intrinsic.name) is None:
        register_intrinsic(intrinsic)

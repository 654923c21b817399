"""What came out of one case."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cpu_models import Absence, Timing
from operators import MACHINE, OURS, OURS_FP32
from operators.cases import Case, Section


@dataclass
class OperatorResult:
    case: Case
    section: Section
    timings: dict[str, Timing] = field(default_factory=dict)
    absences: dict[str, Absence] = field(default_factory=dict)
    moved: int = 0  # bytes of operands and result
    limit: float | None = None  # operations or bytes a second of the machine, in the same turns

    def seconds(self, system: str) -> float | None:
        timing = self.timings.get(system)
        return None if timing is None else timing.median_ms / 1000

    def rate(self, system: str) -> float | None:
        """Operations or bytes a second, after what bounds the section."""
        seconds = self.seconds(system)
        done = self.case.flops if self.section.bound == "flops" else self.moved
        return None if seconds is None else done / seconds

    @property
    def efficiency(self) -> float | None:
        """The share of the machine's limit that Tilewright reaches."""
        rate = self.rate(OURS)
        return None if rate is None or not self.limit else rate / self.limit

    @property
    def best_baseline(self) -> str | None:
        baselines = [name for name in self.section.baselines if name in self.timings]
        return min(baselines, key=lambda name: self.timings[name].median_ms, default=None)

    @property
    def speedup(self) -> float | None:
        """How many times faster Tilewright is than the best baseline."""
        return self._over(self.best_baseline)

    @property
    def room(self) -> float | None:
        """How many times faster than the best baseline the machine's limit lets anyone be."""
        rate = self.rate(self.best_baseline) if self.best_baseline else None
        return None if rate is None or not self.limit else self.limit / rate

    @property
    def over_fp32(self) -> float | None:
        return self._over(OURS_FP32)

    def _over(self, other: str | None) -> float | None:
        if other not in self.timings or OURS not in self.timings:
            return None
        return self.timings[other].median_ms / self.timings[OURS].median_ms

    def as_json(self) -> dict[str, Any]:
        return {
            "section": self.section.name,
            "case": self.case.name,
            "groups": sorted(self.case.groups),
            "flops": self.case.flops,
            "bytes": self.moved,
            "limit": self.limit,
            "efficiency": self.efficiency,
            "best_baseline": self.best_baseline,
            "ours_over_best_baseline": self.speedup,
            "limit_over_best_baseline": self.room,
            "ours_over_fp32": self.over_fp32,
            "systems": {name: asdict(t) for name, t in self.timings.items() if name != MACHINE},
            "absent": {name: asdict(absence) for name, absence in self.absences.items()},
        }

"""The goals of each section, with the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from operators.cases import PLAIN_3X3
from operators.results import OperatorResult

Results = Sequence[OperatorResult]


@dataclass(frozen=True)
class Criterion:
    asked: str
    wanted: float
    reached: float | None  # None: nothing to judge by
    share: bool = False  # of a limit, in percent; otherwise a ratio of times
    most: float | None = (
        None  # at the machine's limit with the operations of the definition, at the case with the least
    )

    @property
    def met(self) -> bool | None:
        return None if self.reached is None else self.reached >= self.wanted

    def __str__(self) -> str:
        state = {None: "no figure", True: "met", False: "MISSED"}[self.met]
        reached = "-" if self.reached is None else self._figure(self.reached)
        room = (
            ""
            if self.most is None
            else f" (the FMA peak, without fewer operations: {self._figure(self.most)})"
        )
        return f"{self.asked}: wanted {self._figure(self.wanted)}, reached {reached}: {state}{room}"

    def _figure(self, value: float) -> str:
        return f"{value:.0%}" if self.share else f"{value:.2f}x"


def criteria_of(section: str, results: Results) -> list[Criterion]:
    return CRITERIA[section](results)


def _in(results: Results, group: str) -> list[OperatorResult]:
    return [result for result in results if group in result.case.groups]


def _speedups(results: Results) -> list[float]:
    return [value for result in results if (value := result.speedup) is not None]


def _efficiencies(results: Results) -> list[float]:
    return [value for result in results if (value := result.efficiency) is not None]


def _least(values: Sequence[float]) -> float | None:
    return min(values, default=None)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def _least_speed(asked: str, wanted: float, results: Results) -> Criterion:
    """If all other systems do the FMAs of the definition, and at best as fast as the peak."""
    room = [value for result in results if (value := result.room) is not None]
    return Criterion(asked, wanted, _least(_speedups(results)), most=_least(room))


def _gemm(results: Results) -> list[Criterion]:
    named, drawn = (_mean(_efficiencies(_in(results, group))) for group in ("named", "random"))
    kept = drawn / named if named and drawn else None
    square = _least(_efficiencies(_in(results, "square")))
    return [
        Criterion("1024^3 and 2048^3, least share of the FMA peak", 0.90, square, True),
        _least_speed("named sizes, least speed over the best baseline", 1.05, _in(results, "named")),
        Criterion("random sizes, efficiency against that of the named ones", 0.90, kept, True),
    ]


def _reads(results: Results) -> list[Criterion]:
    return [Criterion("least share of the bandwidth of reads", 0.90, _least(_efficiencies(results)), True)]


def _conv(results: Results) -> list[Criterion]:
    return [
        Criterion("mean speed over the best baseline", 1.15, _mean(_speedups(results))),
        Criterion(
            "3x3 of stride 1, mean speed over the best baseline",
            1.5,
            _mean(_speedups(_in(results, PLAIN_3X3))),
        ),
        Criterion("least speed over the best baseline", 0.95, _least(_speedups(results))),
    ]


def _attention(results: Results) -> list[Criterion]:
    return [_least_speed("least speed over the best baseline", 1.3, results)]


def _bandwidth(results: Results) -> list[Criterion]:
    return [Criterion("least share of the bandwidth of a copy", 0.90, _least(_efficiencies(results)), True)]


def _int8(results: Results) -> list[Criterion]:
    return [
        Criterion(
            f"int8 {title}, mean speed over Tilewright's fp32", 1.5, _mean(_over_fp32(_in(results, group)))
        )
        for group, title in (("matmul", "products"), ("conv", "convolutions"))
    ]


def _over_fp32(results: Results) -> list[float]:
    return [value for result in results if (value := result.over_fp32) is not None]


CRITERIA: dict[str, Callable[[Results], list[Criterion]]] = {
    "gemm": _gemm,
    "gemv": _reads,
    "conv": _conv,
    "attention": _attention,
    "bandwidth": _bandwidth,
    "reading": _reads,
    "int8": _int8,
}

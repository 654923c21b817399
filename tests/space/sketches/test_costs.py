"""What sketches say that they cost."""

from __future__ import annotations

from tests.space.sketches.tasks import conv, linear
from tilewright.dtypes import DType
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.space.sketches import derive
from tilewright.space.template import Terms, Work


def counted(task: Task) -> list[Terms]:
    found = [applied.terms(applied.space.default()) for applied in derive(Work(task, host()))]
    return [terms for terms in found if terms is not None]


def test_where_each_row_has_its_own_data_each_multiply_add_loads_it() -> None:
    """As in a depthwise convolution: there is no panel that rows share, and none that comes again for each."""
    channels = 4 * host().lanes(DType.F32)
    several = counted(conv((12, 12), (channels, channels), groups=channels))
    assert several
    for terms in several:
        fmas = 12 * 12 * 9 * 4
        assert terms.loads >= fmas
        assert terms.from_l2 + terms.from_l3 < 40 * 12 * 12 * channels * 4


def test_what_the_second_cache_keeps_comes_from_there() -> None:
    small, large = (counted(linear(rows, 64, 64)) for rows in (64, 1 << 17))
    assert small and all(terms.from_l3 == 0 for terms in small)
    assert large and all(terms.from_l3 > 0 for terms in large)

"""A few random networks, and the fuzzer itself: it must see a wrong pass, a crash, and what was never taken.

`python -m tests.fuzz.networks` is the same at length.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from tests.fuzz import coverage, networks, workers
from tests.fuzz.judge import Judge, with_dice
from tests.machines import ICE_LAKE, ZEN_4, here_as
from tests.rewrites.helpers import graph_of, inputs_for, x_input
from tilewright.errors import TilewrightWarning
from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.measure.bisect import check_model
from tilewright.rewrites import pipeline
from tilewright.rewrites.base import Pass


def test_random_networks() -> None:
    taken = networks.run([0, 1, 2, 17, 27], host())  # 17 is of bfloat16, 27 of float16
    assert any(name.startswith("order conv, ") and name.endswith(", compiled") for name in taken)
    assert taken["pass widen-half, compiled"]


@pytest.mark.skipif(here_as("znver4") is None, reason="this processor does not run code for Zen 4")
def test_paired_products_in_a_random_network() -> None:
    machine = here_as("znver4")
    assert networks.run([33], machine)["template paired"] == 1


def test_rewrites_of_random_networks() -> None:
    taken = networks.run(range(100, 125), None)
    passes = ("fold-constants", "simplify", "fold-batch-norm", "decompose", "layout", "common-subexpressions")
    for name in passes:
        assert taken[f"pass {name}, priced"], coverage.table(taken)
    orders = {name.split(", ")[1] for name in taken if name.startswith("order conv, ")}
    assert {"channels_first", "channels_last"} < orders and any(
        each.startswith("channels_by") for each in orders
    )


class Joined(nn.Module):
    """Two images of 24 channels, in one block each, which are then wanted in blocks of 16."""

    def __init__(self, resized: bool) -> None:
        super().__init__()
        self.conv, self.resized = nn.Conv2d(3, 24, 3, padding=1, bias=False), resized

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = torch.cat([x, 0.5 * x], 1)
        x = F.interpolate(x, scale_factor=2) if self.resized else x
        return F.avg_pool2d(x, 3, 1, 1)


@pytest.mark.parametrize(("size", "resized"), [((5, 15), False), ((8, 8), True)])
def test_blocks_of_channels_that_do_not_divide_each_other(size: tuple[int, int], resized: bool) -> None:
    model, x = Joined(resized).eval(), torch.randn(1, 3, *size)
    assert check_model(tilewright.compile(model, (x,)), model, (x,)).ok


@dataclass(frozen=True)
class Broken(Pass):
    """Takes every rectified value for its negative."""

    name = "broken"

    def run(self, graph: Graph) -> Graph:
        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            return apply("relu", apply("neg", operands[0])) if node.op == "relu" else None

        return rebuild(graph, rule)


@dataclass(frozen=True)
class Failing(Pass):
    name = "failing"

    def run(self, graph: Graph) -> Graph:
        raise ZeroDivisionError(self.name)


def test_a_wrong_pass_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pipeline.passes
    monkeypatch.setattr(pipeline, "passes", lambda *options: (Broken(), *right(*options)))
    with pytest.raises(
        AssertionError, match=r"WRONG after pass 1 of \d+, broken: .*(?s:.*)network \d+, float32"
    ):
        networks.run(range(60), None)


def test_a_pass_that_fails_and_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_STRICT_PASSES", "off")
    monkeypatch.setattr(pipeline, "passes", lambda *options: (Failing(),))
    graph = graph_of(apply("relu", x_input(2, 3)))
    with pytest.warns(TilewrightWarning, match="failing"):
        found = with_dice(Judge(graph, inputs_for(graph), 1e-4), "fast", 0)
    assert found.startswith("rewrites.failing failed: ZeroDivisionError")


def test_a_failure_is_shrunk_to_the_layers_that_it_needs() -> None:
    drawn = next(d for d in map(networks.Drawn, range(99)) if len(d.functions()) > 4)
    needed = drawn.functions()[2]
    small = networks.shrunk(
        drawn, lambda each: needed in [f for at, f in enumerate(each.functions()) if at not in each.left_out]
    )
    assert len(drawn.functions()) - len(small.left_out) == 1


def test_a_network_is_the_same_every_time() -> None:
    for number in (0, 17, 39):
        assert str(networks.Drawn(number)) == str(networks.Drawn(number))


def test_what_was_never_taken_is_named() -> None:
    names = list(coverage.expected(ICE_LAKE))
    assert len(set(names)) == len(names) and coverage.missing(Counter(), ICE_LAKE) == names
    assert {"template separable", "template row_block_chain"} < set(names)
    assert set(coverage.expected(ZEN_4)) - set(names) == {"template paired"}
    assert "simplify: concat_slices" in names and "pass merge-matmuls, priced" in names
    blocks = Counter({"order concat, blocks of 12, priced": 1, "order conv, channels_by_24, compiled": 2})
    left = coverage.missing(blocks, ICE_LAKE)
    assert "order concat, blocks, priced" not in left and "order conv, all in one block, compiled" not in left


def test_parts_of_a_campaign_are_counted_together(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    assert coverage.added({"kernel: chain": 2}, counts) == {"kernel: chain": 2}
    together = coverage.added({"kernel: chain": 1, "kernel: attention": 1}, counts)
    assert together == {"kernel: chain": 3, "kernel: attention": 1}
    left = coverage.missing(together, None)
    assert "kernel: attention" not in left and "kernel: reduction" in left


def test_crashes_are_failures_and_time_ends_a_run(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os\n"
        "from collections import Counter\n"
        "from tests.fuzz import workers\n"
        "def check(number):\n"
        "    if number == 3: os.abort()\n"
        "    return ('off by 1' if number == 5 else ''), Counter(layout=number)\n"
        "workers.serve(check)\n"
    )
    command = [sys.executable, str(script)]
    done = workers.spread(range(8), command, 2, math.inf)
    assert (done.count, done.next, sorted(done.failures)) == (8, 8, [3, 5])
    assert done.taken["layout"] == 0 + 1 + 2 + 4 + 5 + 6 + 7
    assert "ended with -6" in done.failures[3]
    ended = workers.spread(range(10, 20), command, 1, 0.0)
    assert (ended.count, ended.next) == (0, 10)


def test_a_worker_that_cannot_start_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="before its first network"):
        workers.spread(range(8), [sys.executable, "-c", "import no_such_module"], 2, math.inf)

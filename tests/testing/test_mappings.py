"""What running a mapping's loops costs: against the model, and against sets of the words that each memory holds."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from tilewright.codesign.mapping import ACCUMULATOR, DRAM, SCRATCHPAD, Hardware, Mappings
from tilewright.codesign.model import Model
from tilewright.codesign.network import Evaluator, Network
from tilewright.codesign.problem import LOOPS, RELEVANT, C, K, Layer, N, Nests, P, Q, R, S
from tilewright.hw.gemmini import GemminiMachine
from tilewright.testing.mappings import cost, fetched, fetched_inputs, judged

LAYERS = [
    Layer.matmul(12, 20, 18),
    Layer((3, 3, 8, 6, 5, 7, 1)),
    Layer((3, 2, 7, 9, 4, 6, 2), stride=(2, 1), dilation=(1, 2)),
    Layer((2, 5, 6, 4, 3, 4, 1), stride=(4, 3)),  # windows that skip words
]
TINY = [
    Layer.matmul(4, 3, 4),
    Layer((3, 2, 4, 3, 2, 2, 1)),
    Layer((2, 2, 3, 2, 2, 3, 2), stride=(2, 1), dilation=(1, 3)),
    Layer((2, 1, 4, 2, 1, 2, 1), stride=(3, 2)),
]


def random_mappings(layer: Layer, count: int, dim: int, rng: np.random.Generator) -> Mappings:
    """Any factors that cover the layer, in any order at each level."""
    factors, spatial = np.ones((count, 4, 7)), np.ones((count, 2))
    for loop, extent in enumerate(layer.extents):
        left = np.full(count, float(extent))
        if loop in (C, K):
            spatial[:, loop - C] = rng.integers(1, min(dim, extent) + 1, count)
            left = np.ceil(left / spatial[:, loop - C])
        for level in rng.permutation([1, 2] if loop in (R, S, C, K) else [0, 1, 2]):
            factors[:, level, loop] = np.floor(left ** rng.uniform(0.0, 1.0, count))
            left = np.ceil(left / factors[:, level, loop])
        factors[:, 3, loop] = left
    order = rng.permuted(np.broadcast_to(np.arange(7, dtype=np.int8), (count, 4, 7)), axis=2)
    return Mappings(factors, spatial[:, 0], spatial[:, 1], order)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_running_the_loops_costs_what_the_model_says(layer: Layer) -> None:
    rng = np.random.default_rng(sum(layer.extents))
    machine = GemminiMachine(dim=8, scratchpad=4096, accumulator=2048, dram_bytes_per_cycle=3.0)
    mappings = random_mappings(layer, 120, machine.dim, rng)
    rows = np.zeros(len(mappings), int)
    found = Model.of(machine).estimate(
        Nests.of([layer]).take(rows), mappings, Hardware.of([machine]).take(rows)
    )
    again = [cost(layer, mappings, row, machine) for row in range(len(mappings))]
    assert [each.cycles for each in again] == found.cycles.value.tolist()
    assert [each.microjoules for each in again] == pytest.approx(found.microjoules.value.tolist(), rel=1e-12)
    assert len(set(found.bound_by.tolist())) > 1  # not one part alone was compared


def test_a_design_costs_the_sum_of_its_layers_as_often_as_they_run() -> None:
    machine = GemminiMachine(dim=8, scratchpad=4096, accumulator=2048)
    network = Network((Layer.matmul(12, 20, 18, count=3), Layer((3, 3, 8, 6, 5, 7, 1), count=2)))
    design = Evaluator(network, machine).mapped(machine)
    again = judged(design)
    alone = [cost(layer, design.mappings, row, machine) for row, layer in enumerate(network.layers)]
    assert again.cycles == 3 * alone[0].cycles + 2 * alone[1].cycles == design.cycles
    assert again.microjoules == pytest.approx(design.microjoules, rel=1e-12)


# -- words, one at a time ---------------------------------------------------------------------------------------------


class Words:
    """The words that a mapping's loops hold in each memory, iteration by iteration."""

    def __init__(self, layer: Layer, mappings: Mappings, row: int) -> None:
        self.layer = layer
        self.nest = [  # from the outermost loop to the innermost: (level, loop, factor)
            (level, int(loop), int(mappings.factors[row, level, loop]))
            for level in (3, 2, 1, 0)
            for loop in mappings.order[row, level]
        ]
        self.array = {C: int(mappings.rows[row]), K: int(mappings.columns[row])}

    def first(self, indices: tuple[int, ...], outer: int) -> list[int]:
        """Where each loop of the layer is, by the indices of the `outer` outermost loops."""
        at = [0] * len(LOOPS)
        for place, (_, loop, _) in enumerate(self.nest[:outer]):
            inside = [f for _, each, f in self.nest[place + 1 :] if each == loop]
            at[loop] += indices[place] * int(np.prod(inside)) * self.array.get(loop, 1)
        return at

    def size(self, outer: int, loop: int) -> int:
        inside = int(np.prod([factor for _, each, factor in self.nest[outer:] if each == loop]))
        return inside * self.array.get(loop, 1)

    def tiles(self, tensor: str, level: int) -> list[tuple[tuple[int, ...], frozenset]]:
        """(indices, words) of the tile below a level, at each iteration of the loops of this level and above."""
        outer = sum(where >= level for where, *_ in self.nest)
        found = []
        for indices in product(*(range(factor) for *_, factor in self.nest[:outer])):
            at = self.first(indices, outer)
            spans = {loop: range(at[loop], at[loop] + self.size(outer, loop)) for loop in range(len(LOOPS))}
            if tensor == "inputs":
                axes = [
                    range(
                        spans[out][0] * stride + spans[tap][0] * dilation,
                        spans[out][-1] * stride + spans[tap][-1] * dilation + 1,
                    )
                    for out, tap, stride, dilation in zip(
                        (P, Q), (R, S), self.layer.stride, self.layer.dilation, strict=True
                    )
                ]
                axes += [spans[C], spans[N]]
            else:
                axes = [spans[loop] for loop in RELEVANT[tensor]]
            found.append((indices, frozenset(product(*axes))))
        return found

    def whole(self, tensor: str, level: int) -> int:
        """Tiles that come in, where each that differs from the one before it is moved as a whole."""
        tiles = [words for _, words in self.tiles(tensor, level)]
        return 1 + sum(left != right for left, right in pairwise(tiles))

    def sliding(self) -> int:
        """Words of inputs that come in: of a window that only the innermost loop has moved, those that are new."""
        tiles = self.tiles("inputs", DRAM)
        running = [place for place in range(len(LOOPS)) if self.nest[place][2] > 1]
        total = len(tiles[0][1])
        for (before, old), (after, new) in pairwise(tiles):
            moved = [place for place in running if before[place] != after[place]]
            total += len(new - old) if moved == running[-1:] else len(new)
        return total


@pytest.mark.parametrize("layer", TINY, ids=str)
def test_running_the_loops_moves_the_words_that_differ(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.testing.mappings._AT_ONCE", 7)  # so that outer loops run one by one
    rng = np.random.default_rng(sum(layer.extents))
    mappings = random_mappings(layer, 12, 2, rng)
    for row in range(len(mappings)):
        words = Words(layer, mappings, row)
        said = mappings.text(row)
        for tensor, level in (("weights", ACCUMULATOR), ("weights", DRAM), ("outputs", SCRATCHPAD)):
            assert fetched(mappings, row, tensor, level) == words.whole(tensor, level), (said, tensor, level)
        assert fetched_inputs(layer, mappings, row) == words.sliding(), said

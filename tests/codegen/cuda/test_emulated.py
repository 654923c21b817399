"""The hand-written CUDA pipelines mean what their task means: their very text, on an emulated GPU, without a card.

What the emulator would not let pass is shown on mutants: a wait, a barrier or an edge that is not there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.codegen.cuda.judge import asked
from tests.codegen.cuda.tensor_kernels import KERNELS, RELATED, Kernel
from tilewright.measure.validation import WrongResult
from tilewright.testing.emulator.run import COMPILER, Complaint, check

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(k, marks=pytest.mark.slow if k.name in RELATED else (), id=k.name) for k in KERNELS],
)
def test_the_text_computes_the_task(kernel: Kernel, tmp_path: Path) -> None:
    check(*asked(kernel), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_any_config_computes_the_task(kernel: Kernel, seed: int, tmp_path: Path) -> None:
    check(*asked(kernel, seed), tmp_path)


# -- mutants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A kernel's text with `old`, from its `position` behind `after` on, replaced by `new`."""

    name: str
    kernel: str
    old: str
    new: str = ""
    after: str = ""
    position: int = 0

    def of(self, text: str) -> str:
        begin = text.index(self.after) + len(self.after)
        positions = [found.start() for found in re.finditer(re.escape(self.old), text[begin:])]
        at = begin + positions[self.position]
        return text[:at] + self.new + text[at + len(self.old) :]


LOOP = "for (int tile = 0; tile < tiles; ++tile)"
BARRIER = "__syncthreads();"
WAIT = "await_copies<STAGES - 2>();"
FINISH = "__device__ static void accumulate"

MUTANTS = [
    # Waits and barriers of the pipeline.
    Mutant("no wait for the first tile", "product-aligned", WAIT, after=FINISH),
    Mutant("no wait in the loop", "product-aligned", WAIT, after=LOOP),
    Mutant("a wait for one tile too few", "product-aligned", WAIT, "await_copies<STAGES - 1>();", after=LOOP),
    Mutant("no wait at the end", "product-aligned", "await_copies<0>();", after=LOOP),
    Mutant("copies that are never committed", "product-aligned", "commit_copies();", after=LOOP),
    Mutant("no barrier before the first tile", "product-aligned", BARRIER, after=FINISH),
    Mutant("no barrier in the loop", "product-aligned", BARRIER, after=LOOP),
    # Of two tiles and three stages: zeros are still on their way to where the sums go.
    Mutant("no barrier before the sums", "product-tt-bf16", BARRIER, after="await_copies<0>();"),
    Mutant("no barrier before the results", "product-aligned", BARRIER, after="P::finish(shared"),
    Mutant("no barrier in the loop, persistent", "product-persistent", BARRIER, after=LOOP),
    Mutant("no barrier before the results, persistent", "product-persistent", BARRIER, after="P::finish(shared"),
    Mutant("no barrier in the loop, through registers", "product-single-elements", BARRIER, after=LOOP),
    Mutant("no barrier behind the table", "conv-3x3", BARRIER, after="__device__ Gathered"),
    Mutant("no barrier between partial sums", "sums-rows", BARRIER, after="const int part = m0"),
    # Clusters.
    Mutant("no barrier before the parts", "product-split", "meet_cluster();", after="inline void add_parts"),
    Mutant("a block ends too early", "product-split", "meet_cluster();", after="inline void add_parts", position=1),
    Mutant("the part of another block", "product-split", "part * SHARE", "(PARTS - 1 - part) * SHARE"),
    # Edges.
    Mutant("an edge along k", "product-nn", "&& k < k_count", "&& k <= k_count"),
    Mutant("an edge along m and n", "product-nn", "outer < outers)", "outer <= outers)"),
    Mutant("an edge of the results", "product-nn", "place_m < 40", "place_m <= 40"),
    Mutant("an edge of single elements", "product-single-elements-nt", "inside(row, column + e)",
           "inside(row, column)"),
    Mutant("an edge of computed elements", "computed-gated", "at_k < k_count", "at_k <= k_count"),
    Mutant("an edge of windows", "conv-3x3", "(at.seen & needed) == needed", "true"),
    # Which element meets which.
    Mutant("fragments that are not transposed", "product-nn", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
           "ldmatrix.sync.aligned.m8n8.x4.shared.b16"),
    Mutant("the wrong half of a fragment", "product-nn", "columns[now][c][0]", "columns[now][c][2]"),
    Mutant("a step of k twice", "product-aligned", "(step + 1) % STEPS", "step % STEPS"),
    # Chains.
    Mutant("no barrier before the left operand", "chain-shared", BARRIER, after="share_left<32"),
    Mutant("a weight that is never committed", "chain-registers", "weight0.fetch(at_weight0, 0, 1);"),
    Mutant("an intermediate column too many", "chain-conv", "column + e < 24", "column + e < 25"),
    Mutant("an intermediate row beyond the end", "chain-of-three", "min(row, 49)", "row", position=1),
    Mutant("the wrong half of an intermediate fragment", "chain-registers", "2 * step + part / 2",
           "2 * step + part % 2"),
    Mutant("an intermediate result without its activation", "chain-conv", "both[e + v] = value[v]",
           "both[e + v] = sum[v]"),
    # Results that are stored by columns.
    Mutant("a run of a column too many", "columns-conv", "place_n < 24", "place_n <= 24"),
    Mutant("the column beside it", "columns-conv", "i / 4 % 32", "i / 8 % 32"),
    # Norms.
    Mutant("no barrier behind the statistics", "norm-before", BARRIER, after="of_row1[sum_row] ="),
    Mutant("the statistics of another row", "norm-before", "outer + (m0 * -1)", "outer + (m0 * 0)"),
    Mutant("a row that some threads do not sum", "norm-before", "at_k += 4", "at_k += 8"),
    Mutant("a row beyond the end", "norm-before", "min(m0 + sum_row, 39)", "m0 + sum_row"),
    Mutant("no barrier before a norm of results", "norm-after", BARRIER, after="P::finish(shared"),
    Mutant("a norm of rows beyond the end", "norm-after", "if (place_m < 40)", "if (place_m <= 40)", position=3),
    # Attention.
    Mutant("no wait for keys", "attention-plain", WAIT, after=LOOP),
    Mutant("no barrier for keys", "attention-plain", BARRIER, after=LOOP),
    Mutant("a key too many", "attention-plain", "key >= keys", "key > keys"),
    Mutant("a query that does not see itself", "attention-causal", "key > query", "key >= query"),
    Mutant("a total that is not faded", "attention-plain", "total[i][half] *= fade[i][half];"),
    Mutant("weights in the wrong order", "attention-plain", '"f"(high), "f"(low)', '"f"(low), "f"(high)'),
]  # fmt: skip
OFTEN = {  # one of each kind is in every run
    *("no wait in the loop", "no barrier in the loop", "no barrier before the results", "no wait at the end"),
    *("a block that ends too early", "an edge along k", "an edge of the results", "no barrier for keys"),
    *("a key too many", "fragments that are not transposed", "no barrier before the left operand"),
    *("the wrong half of an intermediate fragment", "an intermediate row beyond the end"),
    *("no barrier behind the statistics", "the statistics of another row"),
}
NAMED = {kernel.name: kernel for kernel in KERNELS}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=() if m.name in OFTEN else pytest.mark.slow, id=m.name) for m in MUTANTS],
)
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    source, cases = asked(NAMED[mutant.kernel])
    with pytest.raises((WrongResult, Complaint)) as caught:
        check(source, cases, tmp_path, mutant.of(source.text))
    assert "does not compile" not in str(caught.value)


def test_an_instruction_that_is_not_known_is_no_success(tmp_path: Path) -> None:
    source, cases = asked(NAMED["product-short-k"])
    text = source.text.replace("cp.async.commit_group;", "cp.async.bulk.commit_group;")
    with pytest.raises(Complaint, match="cp_async_bulk_commit_group"):
        check(source, cases, tmp_path, text)

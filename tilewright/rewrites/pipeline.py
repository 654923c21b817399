"""The rewrites in order: all passes between the frontend and the tuner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tilewright import knobs
from tilewright.graph.attention import fits_one_kernel
from tilewright.graph.ir import Graph, Node
from tilewright.graph.task import Partition, Task
from tilewright.rewrites.base import Observer, Pass, run_passes
from tilewright.rewrites.common_subexpressions import CommonSubexpressions
from tilewright.rewrites.decompose import Decompose
from tilewright.rewrites.fold_batch_norm import FoldBatchNorm
from tilewright.rewrites.fold_constants import FoldConstants
from tilewright.rewrites.fold_permute import FoldPermute
from tilewright.rewrites.fuse import Group
from tilewright.rewrites.layout import Layout
from tilewright.rewrites.local import Judge
from tilewright.rewrites.merge_branches import MergeBranches
from tilewright.rewrites.merge_matmuls import MergeMatmuls
from tilewright.rewrites.oracle import CostOracle, FewestBytes, GroupCosts
from tilewright.rewrites.pad_channels import PadChannels
from tilewright.rewrites.partition import kind_of, make_task, partition
from tilewright.rewrites.recognise_attention import RecogniseAttention
from tilewright.rewrites.simplify import Simplify
from tilewright.rewrites.split_reduction import SplitReduction
from tilewright.rewrites.widen_half import FEW_ROWS, WidenHalf
from tilewright.support.trace import Trace


@dataclass(frozen=True)
class Abilities:
    """The operations that the machine's kernels can compute."""

    # Whether a kernel computes an attention, alone or with movement around it; None: wherever `fits_one_kernel`.
    computes_attention: Callable[[Task], bool] | None = None
    chains: bool = True  # a depthwise convolution with the pointwise ones around it
    libraries: bool = False  # matmuls and convolutions use libraries, which support few epilogues
    half: bool = False  # 16-bit float arithmetic; otherwise 16-bit floats are computed in f32
    prologues: bool = False  # a matmul or convolution with the producer of its first operand
    tile_kernels: bool = True  # run them; otherwise compute their references
    joins_reductions: bool = (
        False  # a contraction is joined with the reduction of its results after measuring both
    )
    pads: bool = True  # unaligned channels, where that is faster
    splits_reductions: bool = True  # long sums are split here; otherwise candidates may split them

    @property
    def slices(self) -> bool:
        """Whether kernels read at any offset. GPU kernels, which have 16-bit arithmetic, copy aligned vectors."""
        return not self.half


_ALL = Abilities()


def passes(
    numerics: str = "fast", oracle: CostOracle | None = None, abilities: Abilities = _ALL
) -> Sequence[Pass]:
    """The passes; a comment gives the reason for each position. There is no dead-code elimination, because a graph is
    what its outputs reach. `oracle`: kernel times on the machine; None: bytes are counted."""
    simplify = Simplify(fast=numerics != "strict")
    attention = None if numerics == "strict" else _attention_kernels(abilities)
    return (
        # First, so that weights are folded in f32, and no other pass meets 16-bit arithmetic.
        *(() if abilities.half else (WidenHalf(rounds=numerics == "strict"),)),
        # The frontend's leftovers of the framework's generality go first: they hide patterns that the next passes
        # look for (a dropout between convolution and batch norm, weights computed from parameters).
        FoldConstants(),
        simplify,
        # While batch norms are still next to whole convolutions and linear layers.
        FoldBatchNorm(),
        # When the batch norms of branches are in their weights.
        *(() if numerics == "strict" else (MergeBranches(),)),
        # Before decompose, which keeps an attention whole: hand-written attention should become one too. After
        # simplify, which has turned transposed keys into a plain permute and division by a number into a product.
        *((RecogniseAttention(attention),) if attention else ()),
        # From here on, only operators that have a lowering.
        Decompose(
            keeps_attention=attention,
            few_queries=0 if abilities.half else FEW_ROWS,
            keeps_tile_kernels=abilities.tile_kernels,
        ),
        # Reshapes and attention's scaling move next to the matmuls before permutes are placed, so that no permute
        # comes between a matmul and its epilogue.
        simplify,
        # After decompose, which adds padding and permutes, and before weights are folded into the order that this
        # pass chooses: they are copied once.
        Layout(oracle or FewestBytes()),
        # Permutes that the layout pass left before a dense layer, while its weight is still to be folded: it is
        # copied once.
        FoldPermute(),
        FoldConstants(),
        # The layout pass leaves reshapes where it found nothing to permute; equal pads and permutes are merged here.
        simplify,
        CommonSubexpressions(),
        # Merging equal nodes can leave a select of one value, or a concat of neighbours.
        simplify,
        # When shapes are final, and before weights are folded: they are split together with the data.
        *((SplitReduction(oracle or FewestBytes()),) if abilities.splits_reductions else ()),
        FoldConstants(),
        # Last, when weights are constants in the order in which their products read them. Merged first: channels of
        # the merged product may need no padding.
        *_priced(oracle, abilities, strict=numerics == "strict"),
    )


def _attention_kernels(abilities: Abilities) -> Callable[[Node], bool]:
    computes = abilities.computes_attention
    if computes is None:
        return fits_one_kernel
    return lambda node: fits_one_kernel(node) and computes(make_task(Group(node, node, [node]))[0])


def _priced(oracle: CostOracle | None, abilities: Abilities, *, strict: bool) -> Sequence[Pass]:
    """The passes that compare the times of kernels before and after, as far as these are known."""
    if oracle is None:
        return (MergeMatmuls(),) if abilities.libraries and not strict else ()
    judge = Judge(oracle, lambda graph: cut(graph, abilities))
    multiple = getattr(oracle, "channel_multiple", None)
    # The products of padded channels, +0, make a sum of -0 +0, which `strict` does not allow.
    if multiple is None or strict or not abilities.pads or not knobs.get("padding"):
        return (MergeMatmuls(judge),)
    pads = (PadChannels(judge, lambda node: int(multiple(node.dtype))),)
    return (MergeMatmuls(judge), *pads)


def cut(graph: Graph, abilities: Abilities, costs: GroupCosts | None = None) -> Partition:
    """The tasks of a graph on which all passes have run."""
    return partition(
        graph,
        chains=abilities.chains,
        defers=abilities.libraries,
        prologues=abilities.prologues,
        slices=abilities.slices,
        joins=abilities.joins_reductions,
        computes_attention=abilities.computes_attention,
        costs=costs,
    )


def rewrite(
    graph: Graph,
    trace: Trace | None = None,
    *,
    numerics: str = "fast",
    oracle: CostOracle | None = None,
    abilities: Abilities = _ALL,
    observe: Observer | None = None,
) -> Graph:
    """The graph after all passes, before it is cut into tasks."""
    return run_passes(graph, passes(numerics, oracle, abilities), trace or Trace.off(), observe=observe)


def run_pipeline(
    graph: Graph,
    trace: Trace | None = None,
    *,
    numerics: str = "fast",
    oracle: CostOracle | None = None,
    abilities: Abilities = _ALL,
    observe: Observer | None = None,
    costs: GroupCosts | None = None,
) -> Partition:
    """The tasks of a graph after all passes. `costs`: choose groups by dynamic programming; None: greedily."""
    trace = trace or Trace.off()
    with trace.span("rewrites", nodes=len(graph.nodes())) as span:
        graph = rewrite(graph, trace, numerics=numerics, oracle=oracle, abilities=abilities, observe=observe)
        with trace.span("rewrites.partition") as noted:
            result = cut(graph, abilities, costs)
            noted.note(groups=dict(Counter(map(kind_of, result.calls))), parts=len(result.offsets))
            if result.fusion is not None:
                noted.note(fusion=msgspec.to_builtins(result.fusion))
        span.note(calls=len(result.calls), tasks=len(result.tasks()), views=len(result.views))
    return result

"""Words that do not appear in the project, each with the field's word for it.

`tests/test_words.py` looks for them in identifiers (as a component of a name; a word with `_` is a whole name), file
names, messages (string literals), prose (docstrings and comments, also those of CUDA, JavaScript, templates, benchmarks
and examples) and documents. A new entry needs the word to say instead; an exception needs a reason.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("identifiers", "files")
TEXTS = ("messages", "prose", "documents")
ALL = NAMES + TEXTS


@dataclass(frozen=True)
class Word:
    """`word` is never written, `say` is. `where`: some of ALL. `inside`: the paths that are searched; `allowed`: of
    these, the ones where the word means something else."""

    word: str
    say: str
    where: tuple[str, ...] = ALL
    allowed: tuple[str, ...] = ()
    inside: tuple[str, ...] = ("*",)


_WINDOWS = (  # where taps are those of a window
    "tilewright/graph/ops/resize.py",
    "tilewright/graph/separable.py",
    "tilewright/frontend/onnx/op_*.py",
    "tilewright/loops/*pool*.py",
    "tilewright/loops/gpu/*.py",
    "tilewright/runtime/winograd.py",
    "tilewright/measure/bounds.py",
    "tilewright/space/templates/cpu/gemm.py",
    "tilewright/space/templates/cpu/contraction*.py",
    "tilewright/space/templates/cpu/*depthwise*.py",
    "tilewright/space/templates/cpu/separable.py",
    "tilewright/space/templates/cpu/win*.py",
    "tilewright/codesign/*.py",
    "tilewright/codegen/gemmini/*.py",
    "tilewright/runtime/gemmini/*.py",
    "tilewright/loops/gemmini/*.py",
    "tilewright/testing/gemmini.py",
    "tilewright/zoo/*",
    "tests/*",
    "benchmarks/*",
)
_PLANS = (
    "tilewright/runtime/*",
    "tilewright/link.py",
    "tilewright/measure/single.py",
    "tilewright/report/flow.py",
    "tests/*",
)  # a Plan has Places

WORDS = (
    # validation and measurement
    Word("exam", "validation"),
    Word("exams", "validations"),
    Word("sit", "load_task", NAMES),
    Word("glance", "quick timing"),
    Word("heats", "successive halving"),
    Word("watched", "guarded, monitored", NAMES, ("tests/*",)),
    Word("watched memory", "guarded memory", TEXTS),
    Word("pace", "reference kernel, drift", NAMES),
    Word("astray", "corrupted, unaligned", NAMES),
    Word("spreading", "nan_spreads", NAMES),
    # tuning
    Word("rehearse", "confirm_in_model"),
    Word("rehearsal", "confirmation in the model"),
    Word("contender", "system, alternative"),
    Word("contenders", "systems, alternatives"),
    Word("subject", "task_state", NAMES, ("tests/*", "benchmarks/*")),
    Word("verdict", "confirmed choice", NAMES, ("benchmarks/*", "tests/*", "tilewright/cli/*")),
    Word("peer", "baseline"),
    Word("peers", "baselines"),
    Word("by turns", "interleaved", TEXTS),
    Word("promising", "nondominated, pruned", NAMES),
    Word(
        "quickly",
        "upper_bound",
        NAMES,
        (
            "tests/support/test_frozen.py",
            "tilewright/loops/ir.py",
            "tilewright/loops/tiling.py",
            "tilewright/space/space.py",
            "tilewright/space/templates/cpu/contraction_terms.py",
            "tilewright/space/templates/cpu/fast_algebra/paired_nest.py",
            "tilewright/space/terms.py",
            "tilewright/support/frozen.py",
            "tilewright/te/expr.py",
        ),
    ),  # the decorator `quickly_made`
    Word("telling", "informative", NAMES),
    # GEMMs, loops, memory
    Word("matrix product", "matmul, GEMM", TEXTS),
    Word("matrix products", "matmuls, GEMMs", TEXTS),
    Word("convolution of one pixel", "1x1 convolution", TEXTS),
    Word("products in pairs", "Winograd's inner-product trick", TEXTS),
    Word("multiply-add", "FMA", TEXTS),
    Word("multiply-adds", "FMAs", TEXTS),
    Word("tap", "k", NAMES, _WINDOWS),
    Word("taps", "k", NAMES, _WINDOWS),
    Word("turned", "transposed, channels_first", NAMES, ("tests/*",)),
    Word(
        "rolled", "transpose_unaligned", NAMES, ("tilewright/frontend/torch/aten_movement.py",)
    ),  # torch.roll
    Word("lined", "rowwise_streamed", NAMES),
    Word("enlarged", "upsampled"),
    Word("piece", "block, chunk, subtask", NAMES, ("tests/*", "benchmarks/*")),
    Word("pieces", "blocks, chunks, subtasks", NAMES, ("tests/*", "benchmarks/*")),
    Word("place", "position, index, offset, location", NAMES, _PLANS),
    Word("places", "positions, indices, offsets, locations", NAMES, _PLANS),
    Word("way", "implementation, layout choice", NAMES, ("tests/*", "benchmarks/*")),
    Word("ways", "implementations, layout choices", NAMES, ("tests/*", "benchmarks/*")),
    Word("beside", "other, alternative, interleaved", NAMES, ("tests/*",)),
    Word("apart", "separate, distance", NAMES, ("tests/*",)),
    Word("behind", "after, trailing", NAMES, ("tests/*",)),
    Word("first cache", "L1", TEXTS),
    Word("second cache", "L2", TEXTS),
    Word("third cache", "L3", TEXTS),
    Word("past the caches", "with non-temporal stores", TEXTS),
    Word("beyond the caches", "larger than the last-level cache", TEXTS),
    Word("asked for ahead", "prefetched"),
    Word("look-ahead", "hardware prefetcher"),
    Word("as it lies", "in place, in memory order", TEXTS, ("tilewright/codegen/*",)),
    Word("as they lie", "in place, in memory order", TEXTS),
    Word("where it lies", "in place", TEXTS),
    Word("goes round", "cycles, wraps around", TEXTS),
    Word("told apart", "distinguished", TEXTS),
    Word("by themselves", "separately", TEXTS),
    Word("most", "MAX", ("constants",)),
    Word("fewest", "MIN", ("constants",)),
    Word("least", "MIN", ("constants",)),
    Word("what memory bounds", "memory-bound kernels", TEXTS),
    Word("products of quarters", "seven block products (Strassen)", TEXTS),
    Word("two products by one multiplication", "Winograd's inner-product trick", TEXTS),
    Word("sums and maxima of rows", "row reductions", TEXTS),
    Word("peak of FMAs", "peak FLOP/s", TEXTS),
    Word("in turns", "interleaved", TEXTS),
    Word("for ever", "endlessly, never freed", TEXTS),
    Word("piece", "block, item, fragment", TEXTS, ("benchmarks/results/*",)),  # results name knobs of before
    Word(
        "pieces",
        "blocks, items, fragments",
        TEXTS,
        ("tilewright/loops/elementwise.py", "benchmarks/results/*"),
    ),
    Word(
        "asked for",  # by a search's `ask`, or by a user
        "prefetched, requested, priced",
        TEXTS,
        ("tilewright/search/*", "docs/06-tuning.md"),
    ),
    Word(
        "figures",
        "numbers, results, rates",
        ALL,
        ("tilewright/report/*", "tests/report/*"),  # charts
    ),
    Word("is not possible", "must be one of ..., got ...", TEXTS),
    Word("nobody measured it", "not calibrated", TEXTS),
    Word("nobody", "no process, no user, none", TEXTS),
    Word("nothing is said", "by default", TEXTS),
    Word("adds_beside", "independent_adds", NAMES),
    Word("follows_pages", 'prefetcher="page"', NAMES),
    Word("asks_data", "prefetch_a", NAMES),
    Word("expensive", "recompute", ("files",)),
    Word("tall", "two_pass_reduction", ("files",)),
    Word("summed", "fused_reduction", ("files",)),
    Word("vendor", "libraries, decompositions", ("files",), inside=("tilewright/space/*",)),
    Word("weights", "softmax_exp", ("files",), inside=("tilewright/loops/*",)),
    Word(
        "depth",
        "k",
        NAMES,
        inside=("tilewright/codegen/cuda/tensor_*.py", "tilewright/space/templates/cuda/*"),
    ),
    Word("draw", "maker, random_values", NAMES, inside=("tilewright/measure/*",)),
    Word("draws", "check_inputs", NAMES, inside=("tilewright/measure/*",)),
    Word("drawn", "random_values", NAMES, inside=("tilewright/measure/*",)),
    Word("stored", "expected", NAMES, inside=("tilewright/measure/jobs.py", "tilewright/measure/runner.py")),
    Word("cast", "assignment", NAMES, inside=("tilewright/tune/*",)),
    Word("stage", "confirmation", NAMES, inside=("tilewright/tune/*",)),
    Word(
        "lowest",  # the least value of a type, or of a tensor
        "optimistic",
        NAMES,
        (
            "tests/codegen/llvm/test_emit.py",
            "tilewright/codegen/llvm/scalars.py",
            "tilewright/frontend/onnx/*",
            "tilewright/graph/ops/windows.py",
            "tilewright/space/templates/cpu/attention_nest.py",
            "tilewright/te/expr.py",
        ),
    ),
    Word(
        "moving",  # tensors, loops or windows whose position changes
        "permute_seconds",
        NAMES,
        (
            "benchmarks/fusion_blocks.py",
            "tests/*",
            "tilewright/codesign/model.py",
            "tilewright/loops/*",
            "tilewright/space/sketches/analysis.py",
            "tilewright/space/templates/cpu/*",
        ),
    ),
    # how the project speaks of itself
    Word("a kernel of ours", "one of Tilewright's kernels"),
    Word("kernels of ours", "Tilewright's kernels", TEXTS),
    Word("a bug of ours", "an internal error", TEXTS),
    Word("ours", "Tilewright's", TEXTS, ("benchmarks/cpu_models.py",)),
    Word("our own", "Tilewright's own", TEXTS),
    Word("the road", "the pipeline", TEXTS),
    Word("rooms", "packages", TEXTS),
)

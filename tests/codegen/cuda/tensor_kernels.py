"""Kernels of the hand-written CUDA pipelines, small enough to read and to emulate: one for each thing they can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from tests.loops.gpu.products import Product
from tests.programs import GPU, GPU_TEMPLATES, gpu_kernel
from tests.space.chains import After
from tests.space.chains import Case as Chain
from tests.space.chains import NormCase as Norm
from tests.space.checked import Inputs
from tests.space.sketches.cuda.tasks import product_task
from tests.space.templates.cuda.test_attention import Case as Attention
from tests.space.templates.cuda.test_convolution import Case as Convolution
from tests.space.templates.cuda.test_matmul_reduction import of_windows, over_columns, over_rows, pooled
from tests.space.templates.cuda.test_prologue import converted, convolved, gated, transposed
from tests.space.templates.cuda.test_stored_by_columns import convolved as stored_by_columns
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.loops.gpu.attention import TensorAttention
from tilewright.loops.gpu.chain import TensorChain
from tilewright.loops.gpu.tensor import TensorGemm

F16, BF16, F32, I8 = DType.F16, DType.BF16, DType.F32, DType.I8


@dataclass(frozen=True)
class Kernel:
    name: str
    template: str  # of `GPU_TEMPLATES`
    task: Callable[[], Task]
    values: dict[str, object] = field(
        default_factory=dict
    )  # of the config; of the rest, the first that is legal
    numerics: str = "fast"
    sms: int = GPU.sms  # multiprocessors of the card: persistent blocks need more tiles than it has
    golden: bool = False

    def made(self, seed: int | None = None) -> TensorGemm | TensorAttention | TensorChain:
        """With a seed: any config instead of the one that is described."""
        machine = replace(GPU, sms=self.sms)
        template = GPU_TEMPLATES[self.template]
        wanted = self.values if seed is None else Random(seed)
        _, kernel = gpu_kernel(template, self.task(), wanted, self.numerics, machine)
        assert isinstance(kernel, TensorGemm | TensorAttention | TensorChain)
        return kernel


def tile(
    bm: int, bn: int, bk: int, warps_m: int, warps_n: int, stages: int, **more: object
) -> dict[str, object]:
    """The knobs of a product, in the order of `MatrixTiles`."""
    plain = {"split": 1, "persistent": False}
    names = {"bm": bm, "bn": bn, "bk": bk, "warps_m": warps_m, "warps_n": warps_n, "stages": stages}
    return {**names, **plain, **more}


def queries(warps: int, rows: int, keys: int, stages: int) -> dict[str, object]:
    """The knobs of attention."""
    return {"warps": warps, "rows": rows, "keys": keys, "stages": stages}


def rows(
    bm: int, bk: int, warps_m: int, warps_n: int, stages: int, resident: str, persistent: bool = False
) -> dict[str, object]:
    """The knobs of a chain, in the order of `ChainTiles`."""
    names = {"bm": bm, "bk": bk, "warps_m": warps_m, "warps_n": warps_n, "stages": stages}
    return {**names, "persistent": persistent, "resident": resident}


def product(*sizes: int, **more: object) -> Callable[[], Task]:
    return lambda: product_task(Product(*sizes, **more))  # type: ignore[arg-type]


def int8_product(m: int, n: int, k: int) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(m, k, dtype=I8), x(k, n, constant=True, dtype=I8)))


SMALL = tile(32, 32, 32, 1, 2, 3)
FOUR_WARPS = tile(32, 64, 32, 2, 2, 2)  # elements that go through registers want 128 threads

PRODUCTS = [
    # Every transposition; tiles that cover the matrices, and edges along m, n and k.
    Kernel("product-aligned", "product", product(64, 64, 128, transposed_b=False), SMALL, golden=True),
    Kernel("product-nn", "product", product(40, 48, 72), tile(32, 32, 64, 2, 1, 2)),
    Kernel("product-tn-edges", "product", product(40, 72, 88, transposed_a=True), tile(64, 32, 32, 2, 2, 4)),
    Kernel("product-tt-bf16", "product", product(24, 40, 56, transposed_a=True, transposed_b=False, dtype=BF16), SMALL),
    Kernel("product-pairs", "product", product(34, 50, 70), tile(32, 64, 32, 1, 4, 3)),
    Kernel("product-single-elements", "product", product(33, 35, 69), FOUR_WARPS, golden=True),
    Kernel("product-single-elements-nt", "product", product(33, 35, 69, transposed_b=False), FOUR_WARPS),
    Kernel("product-one-row", "product", product(1, 64, 256, transposed_b=False), tile(16, 32, 64, 1, 2, 4)),
    Kernel("product-batch", "product", product(24, 40, 48, batch=3, epilogue=False), SMALL),
    # The K axis shorter than the stages that are under way.
    Kernel("product-short-k", "product", product(32, 32, 24), tile(32, 32, 32, 1, 2, 2)),
    Kernel(
        "product-split", "product", product(40, 48, 200, transposed_b=False),
        tile(32, 32, 32, 1, 2, 2, split=4), golden=True,
    ),
    Kernel(
        "product-persistent", "product", product(72, 104, 72), tile(32, 32, 32, 1, 2, 3, persistent=True),
        sms=2, golden=True,
    ),
    Kernel(
        "product-persistent-batch", "product", product(40, 40, 40, batch=3, transposed_a=True),
        tile(32, 32, 32, 1, 2, 2, persistent=True), sms=2,
    ),
    Kernel(
        "product-tf32", "product", product(40, 44, 52, transposed_b=False, dtype=F32),
        tile(32, 32, 16, 1, 2, 3), "tf32",
    ),
    Kernel(
        "product-tf32-nn", "product", product(40, 44, 52, dtype=F32), tile(32, 32, 32, 1, 2, 2), "tf32",
    ),
    Kernel(
        "product-tf32-tn", "product", product(33, 50, 66, transposed_a=True, dtype=F32), tile(32, 64, 16, 2, 2, 3),
        "tf32",
    ),
    Kernel("product-int8", "product", lambda: int8_product(40, 48, 160), tile(32, 32, 64, 1, 2, 3)),
]  # fmt: skip

CONVOLUTIONS = [
    Kernel("conv-3x3", "product", Convolution((6, 7), (16, 24)).task, SMALL, golden=True),
    Kernel("conv-stride-2", "product", Convolution((9, 7), (12, 20), stride=2).task, SMALL),
    Kernel(
        "conv-3-channels", "product", Convolution((7, 7), (3, 32), window=(5, 5), edge=2, residual=False).task,
        tile(32, 32, 32, 2, 2, 2),
    ),
    Kernel("conv-dilated", "product", Convolution((7, 8), (8, 32), dilation=2, edge=2, dtype=BF16).task, SMALL),
    Kernel("conv-pointwise-stride", "product", Convolution((8, 8), (32, 40), window=(1, 1), stride=2, edge=0).task,
           SMALL),
    Kernel("conv-split", "product", Convolution((5, 5), (32, 32)).task, tile(32, 32, 32, 1, 2, 2, split=2)),
    Kernel(
        "conv-persistent", "product", Convolution((8, 8), (16, 64)).task,
        tile(32, 32, 32, 1, 2, 2, persistent=True), sms=2,
    ),
]  # fmt: skip

COMPUTED = [
    Kernel("computed-gated", "product", lambda: gated(40, 24, 72), SMALL, golden=True),
    Kernel("computed-gated-single", "product", lambda: gated(33, 17, 35), tile(32, 32, 32, 2, 2, 2)),
    Kernel("computed-both", "product", lambda: converted(17, 24, 72), SMALL),
    Kernel("computed-turned", "product", lambda: transposed(16, 24, 40), tile(16, 32, 32, 1, 2, 3)),
    Kernel("computed-conv", "product", lambda: convolved(5, 8, 12, 3), SMALL),
    Kernel(
        "computed-split", "product", lambda: gated(40, 24, 200), tile(32, 32, 32, 1, 2, 2, split=2),
    ),
]  # fmt: skip

SUMS = [
    Kernel("sums-rows", "sums", lambda: over_rows(70, 50, 64, "sum"), golden=True),
    Kernel("sums-rows-in-parts", "sums", lambda: over_rows(96, 72, 32, "amax", parts=4)),
    Kernel("sums-columns", "sums", lambda: over_columns(40, 72, 48, "sum"), golden=True),
    Kernel("sums-columns-odd", "sums", lambda: over_columns(40, 33, 24, "mean", BF16)),
    Kernel("sums-pooled", "sums", lambda: pooled(4, 8, 24)),
    Kernel("sums-windows", "sums", lambda: of_windows(5, 8, 24)),
]

ATTENTION = [
    Kernel("attention-plain", "attention", Attention(40, 72, 32).task, queries(2, 1, 32, 2), golden=True),
    Kernel("attention-causal", "attention", Attention(70, 70, 32, causal=True).task, queries(2, 1, 32, 3)),
    Kernel(
        "attention-masked", "attention", Attention(33, 47, 40, mask="added").task, queries(2, 1, 32, 2), golden=True,
    ),
    Kernel(
        "attention-bool", "attention", Attention(30, 45, 32, mask="bool", heads_inside=True).task,
        queries(2, 1, 32, 2),
    ),
    Kernel("attention-row-bf16", "attention", Attention(33, 70, 32, mask="row", dtype=BF16).task,
           queries(2, 1, 64, 2)),
    Kernel("attention-odd-width", "attention", Attention(17, 33, 37).task, queries(2, 1, 32, 2)),
    Kernel("attention-one-query", "attention", Attention(1, 100, 64).task, queries(2, 1, 32, 3)),
    # Queries are read again for every tile of keys.
    Kernel("attention-wide-causal", "attention", Attention(64, 96, 128, causal=True, heads_inside=True).task,
           queries(2, 2, 32, 2)),
]  # fmt: skip

PLAIN, END = After(bias=False), After(activation="silu", residual=True)

CHAINS = [
    # In registers and in shared memory; weights either way round; edges along every axis.
    Kernel("chain-registers", "chain", Chain(64, (64, 32, 48), (PLAIN, PLAIN)).task,
           rows(32, 32, 2, 1, 3, "registers"), golden=True),
    Kernel("chain-shared", "chain", Chain(40, (72, 48, 64), (After(), END), "matmul").task,
           rows(32, 32, 1, 2, 2, "shared"), golden=True),
    Kernel("chain-of-three", "chain", Chain(50, (40, 24, 56, 16), (After(), END, PLAIN)).task,
           rows(32, 32, 2, 1, 2, "registers")),
    Kernel("chain-of-three-shared", "chain", Chain(50, (40, 24, 56, 16), (END, After(), PLAIN), "matmul").task,
           rows(32, 32, 1, 2, 2, "shared")),
    Kernel("chain-single-elements", "chain", Chain(33, (27, 19, 17), (END, END)).task,
           rows(64, 32, 4, 1, 2, "registers")),
    Kernel("chain-persistent", "chain", Chain(150, (96, 32, 40), (After(), END)).task,
           rows(32, 32, 2, 1, 3, "registers", True), sms=2, golden=True),
    Kernel("chain-persistent-shared", "chain", Chain(150, (48, 72, 24), (END, After()), dtype=BF16).task,
           rows(32, 32, 1, 2, 2, "shared", True), sms=2),
    Kernel("chain-conv", "chain", Chain(0, (16, 24, 40), image=(6, 7)).task, rows(32, 32, 2, 1, 3, "registers"),
           golden=True),
    Kernel("chain-conv-stride-2", "chain", Chain(0, (3, 40, 32), (After(), END), image=(15, 14), stride=2).task,
           rows(64, 32, 4, 1, 2, "registers", True), sms=1),
]  # fmt: skip

NORMS = [
    Kernel("norm-before", "norm", Norm(40, 72, 48).task, tile(32, 32, 32, 1, 2, 3), golden=True),
    Kernel("norm-before-single", "norm", Norm(33, 35, 17, "rms_norm", kind="matmul").task, tile(32, 32, 32, 2, 2, 2)),
    Kernel("norm-before-split", "norm", Norm(40, 200, 48, more=True).task, tile(32, 32, 32, 1, 2, 2, split=2)),
    Kernel("norm-softmax", "norm", Norm(40, 96, 24, "softmax", dtype=BF16).task, SMALL),
    Kernel("norm-after", "norm", Norm(40, 64, 72, "", "layer_norm", After(activation="none", residual=True)).task,
           tile(32, 128, 32, 2, 4, 2), golden=True),
    Kernel("norm-after-odd", "norm", Norm(35, 40, 33, "", "softmax").task, tile(16, 64, 32, 1, 2, 2)),
    Kernel("norm-both", "norm", Norm(70, 64, 64, "rms_norm", "rms_norm", END).task, tile(64, 64, 64, 4, 1, 2)),
]  # fmt: skip

COLUMNS = [
    Kernel("columns-conv", "product", lambda: stored_by_columns((2, 6, 8), 16, 24), SMALL, golden=True),
    Kernel("columns-persistent", "product", lambda: stored_by_columns((3, 7, 5), 8, 34, more=True),
           tile(32, 32, 32, 1, 2, 2, persistent=True), sms=2),
]  # fmt: skip

KERNELS = [*COLUMNS, *NORMS, *CHAINS, *PRODUCTS, *CONVOLUTIONS, *COMPUTED, *SUMS, *ATTENTION]
# What has a near relative among the others; all are quick, but each is compiled.
RELATED = {
    "norm-before-single",
    "norm-softmax",
    "norm-after-odd",
    "chain-of-three-shared",
    "chain-persistent-shared",
    "chain-single-elements",
    "product-tt-bf16",
    "product-persistent-batch",
    "product-tf32-nn",
    "conv-dilated",
    "conv-pointwise-stride",
    "conv-split",
    "computed-gated-single",
    "computed-split",
    "sums-columns-odd",
    "sums-pooled",
    "attention-odd-width",
    "attention-row-bf16",
    "attention-wide-causal",
    "attention-one-query",
}

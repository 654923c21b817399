"""The ten tile kernels as benchmark cases, as data: shapes, spaces of configs, arguments, and the same in PyTorch.

`SHAPES` were fixed before the first timing. `SPACES` are the knobs of a search: the blocks are constexprs of the
kernel, `num_warps` and `num_stages` are options of a GPU; each space has 48 to 96 configs. `CPU_SPACES` are blocks for
processors, and `CPU` the config of each kernel that `tile_kernels.py` takes without a search.

    case = CASES[0]
    grid, arguments, constants = case.launch(case.tensors("cpu", torch.float32), CPU[case.kernel])
    KERNELS[case.kernel][grid](*arguments, **constants)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tile.kernels import KERNELS, blocks

Config = Mapping[str, int]
Tensors = dict[str, Tensor]
Launch = tuple[tuple[int, ...], list[Any], dict[str, Any]]

MEMORY_BOUND = ("add_row", "softmax", "layer_norm", "cross_entropy")
MATMULS = ("matmul_gelu", "batched_matmul", "dequant_matmul", "grouped_matmul")

SHAPES: dict[str, tuple[dict[str, Any], ...]] = {
    "add_row": ({"rows": 512, "columns": 768}, {"rows": 4096, "columns": 1024}, {"rows": 16384, "columns": 2048}),
    "softmax": ({"rows": 1536, "columns": 128}, {"rows": 4096, "columns": 1000}, {"rows": 512, "columns": 8192}),
    "layer_norm": ({"rows": 512, "columns": 768}, {"rows": 4096, "columns": 1024}, {"rows": 4096, "columns": 4096}),
    "matmul_gelu": (
        {"M": 1024, "N": 1024, "K": 1024}, {"M": 128, "N": 3072, "K": 768}, {"M": 512, "N": 768, "K": 3072},
    ),
    "batched_matmul": (
        {"batch": 12, "M": 512, "N": 512, "K": 64}, {"batch": 12, "M": 512, "N": 64, "K": 512},
        {"batch": 16, "M": 256, "N": 256, "K": 256},
    ),
    "attention": (
        {"heads": 12, "length": 128, "D": 64, "CAUSAL": False}, {"heads": 12, "length": 512, "D": 64, "CAUSAL": False},
        {"heads": 8, "length": 2048, "D": 64, "CAUSAL": True},
    ),
    "conv2d": (
        {"C": 64, "H": 58, "W": 58, "F": 64, "R": 3, "S": 3}, {"C": 128, "H": 30, "W": 30, "F": 128, "R": 3, "S": 3},
        {"C": 256, "H": 56, "W": 56, "F": 64, "R": 1, "S": 1},
    ),
    "dequant_matmul": (
        {"M": 128, "N": 768, "K": 768}, {"M": 512, "N": 3072, "K": 768}, {"M": 32, "N": 4096, "K": 4096},
    ),
    "grouped_matmul": (
        {"sizes": (100, 28, 200, 184), "N": 3072, "K": 768},
        {"sizes": (130, 0, 250, 132, 64, 192, 1, 255), "N": 768, "K": 768},
        {"sizes": (128,) * 16, "N": 512, "K": 512},
    ),
    "cross_entropy": (
        {"rows": 128, "classes": 50000}, {"rows": 512, "classes": 50257}, {"rows": 1024, "classes": 32000},
    ),
}  # fmt: skip
# The other layers of BERT-base, for the comparison with the plain contraction template.
BERT: tuple[dict[str, Any], ...] = (
    {"M": 128, "N": 768, "K": 768}, {"M": 128, "N": 768, "K": 3072}, {"M": 512, "N": 768, "K": 768},
    {"M": 512, "N": 3072, "K": 768},
)  # fmt: skip

_GEMM: dict[str, tuple[int, ...]] = {
    "BM": (32, 64, 128),
    "BN": (64, 128, 256),
    "BK": (32, 64),
    "num_warps": (4, 8),
    "num_stages": (3, 4),
}
_CPU_GEMM: dict[str, tuple[int, ...]] = {
    "BM": (16, 32, 64, 128),
    "BN": (32, 64, 128, 256),
    "BK": (32, 64, 128, 256),
}
SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    "add_row": {"BM": (1, 4, 16, 32), "BN": (128, 256, 512, 1024), "num_warps": (2, 4, 8)},
    "softmax": {"BLOCK": (0, 1), "num_warps": (1, 2, 4, 8, 16, 32), "num_stages": (1, 2, 3, 4)},
    "layer_norm": {"BLOCK": (128, 256, 512, 1024, 2048, 4096), "num_warps": (1, 2, 4, 8), "num_stages": (1, 2)},
    "matmul_gelu": _GEMM,
    "batched_matmul": _GEMM,
    "attention": {"BM": (32, 64, 128), "BN": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
    "conv2d": {"BP": (32, 64, 128), "BO": (32, 64, 128), "BC": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3)},
    "dequant_matmul": _GEMM,
    "grouped_matmul": _GEMM,
    "cross_entropy": {
        "BLOCK": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16), "num_stages": (1, 2, 3),
    },
}  # fmt: skip
CPU_SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    "add_row": {"BM": (1, 2, 4, 8, 16, 32, 64), "BN": (64, 128, 256, 512, 1024, 2048, 4096)},
    "softmax": {"BLOCK": (0,)},
    "layer_norm": {"BLOCK": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)},
    "matmul_gelu": _CPU_GEMM,
    "batched_matmul": _CPU_GEMM,
    "attention": {"BM": (8, 16, 32, 64, 128, 256), "BN": (16, 32, 64, 128, 256, 512)},
    "conv2d": {"BP": (16, 32, 64, 128), "BO": (16, 32, 64, 128), "BC": (16, 32, 64, 128)},
    "dequant_matmul": _CPU_GEMM,
    "grouped_matmul": _CPU_GEMM,
    "cross_entropy": {"BLOCK": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)},
}
# What was good on cores with AVX-512; `tile_kernels.py --search` times the whole space.
CPU: dict[str, Config] = {
    "add_row": {"BM": 4, "BN": 4096},
    "softmax": {"BLOCK": 0},
    "layer_norm": {"BLOCK": 128},
    "matmul_gelu": {"BM": 128, "BN": 64, "BK": 256},
    "batched_matmul": {"BM": 128, "BN": 64, "BK": 64},
    "attention": {"BM": 128, "BN": 64},
    "conv2d": {"BP": 64, "BO": 64, "BC": 32},
    "dequant_matmul": {"BM": 64, "BN": 128, "BK": 128},
    "grouped_matmul": {"BM": 64, "BN": 128, "BK": 128},
    "cross_entropy": {"BLOCK": 128},
}


def configs(space: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """All configs of a space."""
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values, strict=True))


def _random(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return made.to(dtype).to(device)


@dataclass(frozen=True)
class TileCase:
    """One kernel at one shape. `tensors` are its operands by name, with the result in "out"."""

    kernel: str
    shape: tuple[tuple[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        return dict(self.shape)[name]

    @property
    def name(self) -> str:
        if self.kernel == "grouped_matmul":
            sizes = self["sizes"]
            return f"{self.kernel} {sum(sizes)} rows in {len(sizes)} x {self['N']} x {self['K']}"
        numbers = [str(value) for _, value in self.shape if not isinstance(value, bool)]
        return " ".join([self.kernel, " x ".join(numbers), *(["causal"] if self.causal else [])])

    @property
    def causal(self) -> bool:
        return bool(dict(self.shape).get("CAUSAL", False))

    @property
    def flops(self) -> float:
        """Of the multiplications and additions in matmuls; 0 for kernels without."""
        s = dict(self.shape)
        if self.kernel == "attention":
            return 4.0 * s["heads"] * s["length"] ** 2 * s["D"] / (2 if self.causal else 1)
        if self.kernel == "conv2d":
            return 2.0 * self._pixels * s["C"] * s["F"] * s["R"] * s["S"]
        if self.kernel == "grouped_matmul":
            return 2.0 * sum(s["sizes"]) * s["N"] * s["K"]
        return 2.0 * s.get("batch", 1) * s["M"] * s["N"] * s["K"] if self.kernel in MATMULS else 0.0

    def bytes(self, tensors: Tensors) -> int:
        """What must be read and written at least once."""
        return sum(each.numel() * each.element_size() for each in tensors.values())

    @property
    def _pixels(self) -> int:
        return int((self["H"] - self["R"] + 1) * (self["W"] - self["S"] + 1))

    def tensors(self, device: str, dtype: torch.dtype) -> Tensors:
        """Operands and result; sums and losses are float32 whatever the type."""
        s = dict(self.shape)

        def random(*shape: int, seed: int = 0) -> Tensor:
            return _random(device, dtype, *shape, seed=seed)

        def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=of, device=device)

        if self.kernel == "add_row":
            x = random(s["rows"], s["columns"])
            return {"x": x, "row": random(s["columns"], seed=1), "out": torch.empty_like(x)}
        if self.kernel == "softmax":
            x = random(s["rows"], s["columns"])
            return {"x": x, "out": torch.empty_like(x)}
        if self.kernel == "layer_norm":
            x, residual = (random(s["rows"], s["columns"], seed=seed) for seed in range(2))
            weight, bias = (random(s["columns"], seed=seed) for seed in (2, 3))
            return {"x": x, "residual": residual, "weight": weight, "bias": bias, "out": torch.empty_like(x)}
        if self.kernel == "matmul_gelu":
            a, b = random(s["M"], s["K"]), random(s["K"], s["N"], seed=1)
            return {"a": a, "b": b, "bias": random(s["N"], seed=2), "out": empty(s["M"], s["N"])}
        if self.kernel == "batched_matmul":
            a, b = random(s["batch"], s["M"], s["K"]), random(s["batch"], s["K"], s["N"], seed=1)
            return {"a": a, "b": b, "out": empty(s["batch"], s["M"], s["N"])}
        if self.kernel == "attention":
            q, k, v = (random(s["heads"], s["length"], s["D"], seed=seed) for seed in range(3))
            return {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
        if self.kernel == "conv2d":
            x, w = random(s["H"], s["W"], s["C"]), random(s["R"], s["S"], s["C"], s["F"], seed=1)
            return {"x": x, "w": w, "out": empty(s["H"] - s["R"] + 1, s["W"] - s["S"] + 1, s["F"])}
        if self.kernel == "dequant_matmul":
            generator = torch.Generator().manual_seed(1)
            w = torch.randint(-128, 128, (s["K"], s["N"]), generator=generator, dtype=torch.int8).to(device)
            scales = random(s["N"], seed=2).float() / 128
            return {"a": random(s["M"], s["K"]), "w": w, "scales": scales, "out": empty(s["M"], s["N"])}
        if self.kernel == "grouped_matmul":
            rows = sum(s["sizes"])
            ends = torch.tensor(list(itertools.accumulate(s["sizes"])), dtype=torch.int32, device=device)
            b = random(len(s["sizes"]), s["K"], s["N"], seed=1)
            return {"a": random(rows, s["K"]), "b": b, "out": empty(rows, s["N"]), "ends": ends}
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(0, s["classes"], (s["rows"],), generator=generator).to(device)
        logits = random(s["rows"], s["classes"])
        return {"logits": logits, "labels": labels, "out": empty(s["rows"], of=torch.float32)}

    def launch(self, tensors: Tensors, config: Config) -> Launch:
        """Grid, arguments and constexprs for a config; its `num_warps` and `num_stages` are left to the caller."""
        s = dict(self.shape)
        c = {name: value for name, value in config.items() if not name.startswith("num_")}
        given: list[Any] = list(tensors.values())
        if self.kernel == "add_row":  # no block is wider than the power of two that holds a row
            c["BN"] = min(c["BN"], 1 << max(s["columns"] - 1, 0).bit_length())
            grid: tuple[int, ...] = blocks(s["rows"], c["BM"]), blocks(s["columns"], c["BN"])
            return grid, [*given, s["rows"], s["columns"]], c
        if self.kernel == "softmax":  # its block is the power of two that holds a row, shifted by the knob
            least = 1 << max(s["columns"] - 1, 0).bit_length()
            return (s["rows"],), [*given, s["columns"], s["columns"]], {"BLOCK": least << c["BLOCK"]}
        if self.kernel == "layer_norm":
            return (s["rows"],), [*given, s["columns"], 1e-5], c
        if self.kernel in ("matmul_gelu", "dequant_matmul"):
            return (blocks(s["M"], c["BM"]), blocks(s["N"], c["BN"])), [*given, s["M"], s["N"], s["K"]], c
        if self.kernel == "batched_matmul":
            grid = blocks(s["M"], c["BM"]), blocks(s["N"], c["BN"]), s["batch"]
            return grid, [*given, s["M"], s["N"], s["K"]], c
        if self.kernel == "attention":
            constants = {"D": s["D"], "CAUSAL": s["CAUSAL"], **c}
            return (
                (blocks(s["length"], c["BM"]), s["heads"]),
                [*given, s["length"], s["D"] ** -0.5],
                constants,
            )
        if self.kernel == "conv2d":
            grid = blocks(self._pixels, c["BP"]), blocks(s["F"], c["BO"])
            return grid, [*given, s["C"], s["H"], s["W"], s["F"]], {"R": s["R"], "S": s["S"], **c}
        if self.kernel == "grouped_matmul":
            tiles = sum(blocks(size, c["BM"]) for size in s["sizes"])
            grid = tiles, blocks(s["N"], c["BN"])
            return grid, [*given, len(s["sizes"]), s["N"], s["K"]], c
        return (s["rows"],), [*given, s["classes"]], c

    def reference(self) -> Callable[..., Tensor]:
        """PyTorch's composition of operators, of the tensors without the result."""
        if self.kernel == "conv2d":
            return lambda x, w: F.conv2d(x.permute(2, 0, 1)[None], w)[0].permute(1, 2, 0)
        if self.kernel == "attention":
            causal = self.causal
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if self.kernel == "grouped_matmul":
            sizes = self["sizes"]
            ends = list(itertools.accumulate(sizes))

            def grouped(a: Tensor, b: Tensor) -> Tensor:
                parts = [
                    a[end - size : end] @ b[g] for g, (end, size) in enumerate(zip(ends, sizes, strict=True))
                ]
                return torch.cat([part for part, size in zip(parts, sizes, strict=True) if size])

            return grouped
        return _REFERENCES[self.kernel]

    def operands(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """What `reference` takes: the same memory, but for weights of convolutions, which PyTorch wants transposed."""
        if self.kernel == "conv2d":
            weights = tensors["w"].permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
            return tensors["x"], weights
        return tuple(each for name, each in tensors.items() if name not in ("out", "ends"))


_REFERENCES: dict[str, Callable[..., Tensor]] = {
    "add_row": lambda x, row: torch.relu(x + row),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x, residual, weight, bias: F.layer_norm(x + residual, weight.shape, weight, bias),
    "matmul_gelu": lambda a, b, bias: F.gelu(a @ b + bias),
    "batched_matmul": torch.bmm,
    "dequant_matmul": lambda a, w, scales: a @ (w.to(a.dtype) * scales.to(a.dtype)),
    "cross_entropy": lambda logits, labels: F.cross_entropy(logits.float(), labels, reduction="none"),
}

CASES: tuple[TileCase, ...] = tuple(
    TileCase(kernel, tuple(shape.items())) for kernel, shapes in SHAPES.items() for shape in shapes
)
BERT_CASES: tuple[TileCase, ...] = tuple(TileCase("matmul_gelu", tuple(shape.items())) for shape in BERT)


def sizes() -> dict[str, int]:
    """How many configs each space has."""
    return {kernel: math.prod(len(values) for values in space.values()) for kernel, space in SPACES.items()}


__all__ = ["BERT_CASES", "CASES", "CPU", "CPU_SPACES", "KERNELS", "MATMULS", "MEMORY_BOUND", "SHAPES", "SPACES",
           "Config", "TileCase", "configs", "sizes"]  # fmt: skip

"""Matmuls, einsum and convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontend.checking import check, floats, functions, integers, ops_of

MATMULS = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((4, 5), (5, 3)),
    ((2, 4, 5), (5, 3)),
    ((2, 4, 5), (5,)),
    ((5,), (2, 5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 6)),
]


def test_matmul_ranks() -> None:
    operands = [floats(*shape, seed=i) for i, pair in enumerate(MATMULS) for shape in pair]
    check(lambda *t: [a @ b for a, b in zip(t[::2], t[1::2], strict=True)], *operands)


PRODUCTS: dict[str, Any] = {
    "linear": lambda a, b, v: [
        F.linear(a, b.t()),
        F.linear(a, b.t(), v[:3]),
        F.linear(a, v),
        F.linear(v, b.t()),
    ],
    "mm": lambda a, b, v: [
        torch.mm(a, b),
        torch.mv(a, v),
        torch.dot(v, v),
        torch.outer(v, v),
        torch.inner(a, a),
    ],
    "bmm": lambda a, b, v: torch.bmm(a[None], b[None]),
    "addmm": lambda a, b, v: [torch.addmm(v[:3], a, b), torch.addmm(v[:3], a, b, beta=0.5, alpha=2)],
    "addmm_no_input": lambda a, b, v: torch.addmm(v[:3] / 0, a, b, beta=0),
    "baddbmm": lambda a, b, v: torch.baddbmm(v[:3], a[None], b[None], alpha=0.3),
    "others": lambda a, b, v: [
        torch.addmv(v[:4], a, v),
        torch.addr(a, v[:4], v),
        torch.addbmm(v[:3], a[None], b[None]),
    ],
    "tensordot": lambda a, b, v: torch.tensordot(a, b, dims=([1], [0])),
    "kron": lambda a, b, v: torch.kron(a, b),
    "bilinear": lambda a, b, v: F.bilinear(a, a, torch.stack([a.T @ a, a.T @ a + 1]), v[:2]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products(dtype: torch.dtype) -> None:
    check(functions(PRODUCTS), floats(4, 5, dtype=dtype), floats(5, 3, dtype=dtype), floats(5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_integer_products(dtype: torch.dtype) -> None:
    check(lambda a, b: [a @ b, torch.mm(a, b)], integers(4, 5, dtype=dtype), integers(5, 3, dtype=dtype))


EINSUMS = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("bij,bkj->bik", (2, 3, 4), (2, 5, 4)),
    ("bhqd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 3, 5)),
    ("...ij,jk->...ik", (2, 7, 3, 4), (4, 5)),
    ("...i,...i->...", (2, 3, 4), (2, 3, 4)),
    ("...i,...i->...", (1, 3, 4), (2, 3, 4)),
    ("i,j->ij", (3,), (4,)),
    ("i,j->ji", (3,), (4,)),
    ("ij,ij->", (3, 4), (3, 4)),
    ("ij,kl->i", (3, 4), (5, 6)),
    ("ijk->ki", (3, 4, 5)),
    ("ba,cb", (3, 4), (5, 3)),
    ("ab,bc,cd->ad", (3, 4), (4, 5), (5, 6)),
    ("bi,bj,bk->bijk", (2, 3), (2, 4), (2, 5)),
    ("ii->i", (4, 4)),
]


@pytest.mark.parametrize("equation, shapes", [(case[0], case[1:]) for case in EINSUMS])
def test_einsum(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    operands = [floats(*shape, seed=i) for i, shape in enumerate(shapes)]
    check(lambda *t: torch.einsum(equation, *t), *operands)


def convolutions(rank: int) -> nn.Module:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    conv, back = kinds[rank - 1], transposed[rank - 1]
    return nn.ModuleDict(
        {
            "plain": conv(4, 6, 3),
            "no_bias": conv(4, 6, 3, stride=2, padding=1, bias=False),
            "same": conv(4, 6, 3, padding="same"),
            "same_even": conv(4, 6, 2, padding="same", dilation=3),
            "valid": conv(4, 6, 3, padding="valid"),
            "depthwise": conv(4, 8, 3, padding=1, groups=4),
            "dilated": conv(4, 2, 2, dilation=2, groups=2),
            "reflected": conv(4, 2, 3, padding=1, padding_mode="reflect"),
            "transposed": back(4, 6, 3, stride=2, padding=1, output_padding=1),
            "transposed_groups": back(4, 6, 2, stride=2, groups=2, bias=False),
        }
    )


class Each(nn.Module):
    """Every module of a dict on one input."""

    def __init__(self, modules: nn.Module) -> None:
        super().__init__()
        self.inner = modules
        self.eval()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {name: module(x) for name, module in self.inner.items()}


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions(rank: int) -> None:
    torch.manual_seed(0)
    check(Each(convolutions(rank)), floats(2, 4, *(7, 8, 6)[:rank]))


def test_convolution_without_batch() -> None:
    torch.manual_seed(0)
    modules = nn.ModuleDict({"conv": nn.Conv2d(4, 6, 3), "back": nn.ConvTranspose2d(4, 6, 3)})
    check(Each(modules), floats(4, 7, 6))


def test_the_general_convolution() -> None:
    table = {
        "forward": lambda x, w: torch.convolution(x, w, None, [2, 1], [1, 0], [1, 1], False, [0, 0], 1),
        "transposed": lambda x, w: torch.convolution(x, w, None, [2, 2], [1, 1], [1, 1], True, [1, 0], 1),
    }
    check(functions(table), floats(2, 4, 6, 5), floats(4, 4, 3, 3, seed=1))


def test_composites_stay_whole() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    ).eval()
    ops = ops_of(check(model, floats(1, 3, 4, 4)))
    assert [op for op in ops if op != "constant"] == [
        "input",
        "conv",
        "batch_norm",
        "relu",
        "reshape",
        "linear",
    ]

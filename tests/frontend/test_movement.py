"""Views, slices, joins, padding; tensors made from nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.checking import check, floats, functions, integers, ops_of

VIEWS: dict[str, Any] = {
    "view": lambda x: [x.view(6, 20), x.reshape(-1, 4), x.flatten(1, 2), x.ravel(), x.unflatten(3, (2, -1))],
    "squeeze": lambda x: [x[:1].squeeze(0), x[:1, :1].squeeze(), x.unsqueeze(-1).squeeze(-1), x.unsqueeze(2)],
    "squeeze_dims": lambda x: x[:1, :1].squeeze((0, 1)),
    "as": lambda x: [x.view_as(x), x.reshape_as(x), x[:1].expand_as(x)],
    "permute": lambda x: [
        x.permute(3, 0, -2, 1),
        x.transpose(1, -1),
        x[0, 0].t(),
        x[0, 0].T,
        x.mT,
        x.swapaxes(0, 1),
    ],
    "movedim": lambda x: [x.movedim(0, 2), x.movedim((0, 1), (-1, -2))],
    "expand": lambda x: [x[:1].expand(7, -1, -1, -1), x[0, 0].broadcast_to(2, 3, 5, 4)],
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1, :1]),
    "flip": lambda x: [x.flip(0), x.flip(-1, 1), x.fliplr(), x.flipud()],
    "roll": lambda x: [x.roll(1, 0), x.roll((2, -1), (3, 2)), x.roll(7)],
    "rot90": lambda x: [torch.rot90(x, k, (2, 3)) for k in range(-1, 4)],
    "column_stack": lambda x: [
        torch.column_stack([x[0, 0, 0]] * 2),
        torch.dstack([x[0, 0], x[0, 0]]),
        torch.vstack([x[0, 0, 0]] * 2),
    ],
    "slice": lambda x: [x[1:], x[:, ::2], x[..., 1:-1], x[:, -2:], x[:, 5:], x[:, 1:3, None], x[1]],
    "select": lambda x: [x.select(1, -1), x[:, 2], x.narrow(2, 1, 3), x.narrow(2, -3, 2)],
    "split": lambda x: [x.split(2, 1), x.split([1, 4], 2), x.chunk(3, 3), x.tensor_split(3, 2), x.unbind(1)],
    "tensor_split": lambda x: x.tensor_split((1, 3), 2),
    "join": lambda x: [torch.cat([x, x], -1), torch.stack([x, x], 1), torch.cat([x, torch.empty(0), x])],
    "joins": lambda x: [
        torch.hstack([x, x]),
        torch.vstack([x, x]),
        torch.dstack([x, x]),
        torch.hstack([x[0, 0, 0]] * 2),
    ],
    "repeat": lambda x: [
        x.repeat(2, 1, 1, 3),
        x.repeat(2, 1, 1, 1, 1),
        x.tile(2, 3),
        x[:1].repeat(4, 1, 1, 1),
    ],
    "repeat_interleave": lambda x: [x.repeat_interleave(3, 1), x[0, 0].repeat_interleave(2)],
    "diagonal": lambda x: [x.diagonal(), x.diagonal(1, 2, 3), x[0, 0].diagonal(-2), x.diagonal(9, 2, 3)],
    "diag": lambda x: [x[0, 0].diag(), x[0, 0, 0].diag(1)],
    "diag_embed": lambda x: [x.diag_embed(), x[0].diag_embed(-1, 0, 2), x[0].diag_embed(2)],
    "unfold": lambda x: [x.unfold(2, 3, 1), x.unfold(3, 2, 2)],
    "shuffles": lambda x: [F.pixel_unshuffle(x[:, :, :4], 2), F.channel_shuffle(x, 3)],
    "meshgrid": lambda x: [
        *torch.meshgrid(x[0, 0, 0], x[0, 0, :, 0], indexing="ij"),
        *torch.meshgrid(x[0, 0, 0], x[0, 0, :, 0], indexing="xy"),
    ],
    "block_diag": lambda x: torch.block_diag(x[0, 0], x[0, 0, 0], x[1, 1, :2]),
    "triangles": lambda x: [x.tril(), x.triu(1), x.tril(-1), x.triu(-2)],
    "atleast": lambda x: [torch.atleast_1d(x), torch.atleast_2d(x[0, 0, 0])],
}


def test_views() -> None:
    check(functions(VIEWS), floats(2, 3, 5, 4))


def test_views_of_integers() -> None:
    named = ("view", "permute", "slice", "split", "join", "repeat", "roll", "triangles", "diag_embed")
    check(functions({name: VIEWS[name] for name in named}), integers(2, 3, 5, 4, dtype=torch.int32))


def test_pixel_shuffle() -> None:
    check(lambda x: F.pixel_shuffle(x, 2), floats(2, 8, 3, 5))


PADDINGS: dict[str, Any] = {
    "constant": lambda x: [F.pad(x, (1, 2)), F.pad(x, (0, 1, 2, 0), value=-1.5), F.pad(x, (-1, 1, -2, 0))],
    "reflect": lambda x: [F.pad(x, (2, 1, 1, 3), mode="reflect"), F.pad(x[0], (3, 3), mode="reflect")],
    "replicate": lambda x: F.pad(x, (2, 1, 7, 3), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1, 0, 3), mode="circular"),
}


def test_padding() -> None:
    check(functions(PADDINGS), floats(2, 3, 5, 4))
    check(
        lambda x, m: [F.pad(x, (1, 1), value=7), F.pad(m, (1, 0), value=True)],
        integers(3, 4),
        floats(3, 4) > 0,
    )


def test_im2col() -> None:
    table = {
        "plain": lambda x: F.unfold(x, 3),
        "all": lambda x: F.unfold(x, (2, 3), dilation=(1, 2), padding=(1, 0), stride=2),
    }
    check(functions(table), floats(2, 3, 7, 6))


CREATION: dict[str, Any] = {
    "full": lambda x: [
        torch.full((2, 3), 7),
        torch.full((2,), 0.5),
        torch.full((2,), True),
        torch.full_like(x, 2),
    ],
    "zeros": lambda x: [
        torch.zeros(2, 3),
        torch.zeros_like(x),
        x.new_zeros(4),
        torch.zeros(2, dtype=torch.int32),
    ],
    "ones": lambda x: [
        torch.ones(2),
        torch.ones_like(x, dtype=torch.bool),
        x.new_ones(2, 2),
        x.new_full((3,), -1),
    ],
    "arange": lambda x: [torch.arange(5), torch.arange(2, 11, 3), torch.arange(5, -5, -2), torch.arange(4.0)],
    "arange_float": lambda x: [torch.arange(0, 1, 0.3), torch.arange(3, dtype=torch.float16) * 2],
    "linspace": lambda x: [torch.linspace(0, 1, 7), torch.logspace(0, 1, 4), torch.hann_window(6)],
    "eye": lambda x: [torch.eye(3), torch.eye(2, 4, dtype=torch.int64)],
    "tensor": lambda x: torch.tensor([1.0, 2.0]) * x[0, :2],
    "masks": lambda x: [torch.ones(4, 4).tril(), torch.triu(torch.full((3, 3), float("-inf")), 1)],
    "indices": lambda x: torch.tril_indices(3, 3),
    "scalar": lambda x: torch.scalar_tensor(2.5) * x,
    "one_hot": lambda x: F.one_hot(torch.arange(4) % 3, 5),
}


def test_creation() -> None:
    check(functions(CREATION), floats(2, 3))


def test_position_masks_are_computed_not_stored() -> None:
    result = check(lambda x: torch.ones(64, 64).tril() * x, floats(64, 64))
    assert "constant" not in ops_of(result)


WRITES: dict[str, Any] = {
    "slice": lambda x: torch.slice_scatter(x, x[:, 1:3] * 0, 1, 0, 2),
    "strided": lambda x: torch.slice_scatter(x, x[:, ::2] + 1, 1, 0, None, 2),
    "select": lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, -1),
}


@pytest.mark.parametrize("pad", [(2, 1), (2, -1), (-1, 2), (-1, -1), (-2, 1, 1, -1)])
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_that_cuts_off(pad: tuple[int, ...], mode: str) -> None:
    shape = (1, 2, 5) if len(pad) == 2 else (1, 2, 4, 5)
    check(lambda x: torch.nn.functional.pad(x, pad, mode=mode), floats(*shape))


@pytest.mark.parametrize("name", WRITES)
def test_scatter_into_slices(name: str) -> None:
    check(WRITES[name], floats(3, 5, 2))

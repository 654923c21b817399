"""Every mistake has its error, with the place in the user's model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.frontend.checking import Function, floats, import_torch, integers
from tilewright.errors import (
    ExportError,
    InputError,
    InternalError,
    TrainingModeError,
    UnsupportedModelError,
    UnsupportedOpsError,
)
from tilewright.frontend import import_model
from tilewright.frontend.torch import registry


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, start=1) if line.strip().startswith(text))


# -- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, 3, lambda x: x, nn.Linear, torch.zeros(3)])
def test_what_is_not_a_model(thing: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot import a"):
        import_model(thing, (floats(3),))


def test_missing_example_inputs() -> None:
    with pytest.raises(UnsupportedModelError, match="needs example inputs"):
        import_torch(nn.Linear(3, 3).eval())


def test_example_inputs_of_a_wrong_kind() -> None:
    with pytest.raises(UnsupportedModelError, match="example inputs of type list"):
        import_torch(nn.Linear(3, 3).eval(), [floats(3)])


def test_training_mode() -> None:
    with pytest.raises(TrainingModeError, match="Linear is in training mode"):
        import_torch(nn.Linear(3, 3), floats(3))
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(), nn.ReLU())).eval()
    model[1][0].train()
    with pytest.raises(TrainingModeError, match=re.escape("1.0 (Dropout)")):
        import_torch(model, floats(3))
    model.eval()
    model[1][1].train()  # harmless
    import_torch(model, floats(3))


def test_a_result_that_is_no_tensor_tree() -> None:
    class Box:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

    torch.utils._pytree.register_pytree_node(
        Box, lambda box: ([box.inner], None), lambda items, _: Box(*items), serialized_type_name="test.Box"
    )
    with pytest.raises(UnsupportedModelError, match="Box"):
        import_torch(Function(lambda x: Box(x)), floats(3))


# -- the export -----------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_data_dependent_control_flow() -> None:
    with pytest.raises(ExportError) as caught:
        import_torch(Branching().eval(), floats(3))
    message = str(caught.value)
    assert "could not trace Branching" in message and "data-dependent" in message
    assert f"test_errors.py:{line_of('if x.sum() > 0:')}: if x.sum() > 0:" in message


def test_an_error_in_the_model() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.zeros(7, 7)  # wrong shape

    with pytest.raises(
        InputError, match=rf"test_errors.py:{line_of('return x @ torch.zeros(7, 7)')}"
    ) as caught:
        import_torch(Function(model), floats(3, 3))
    assert "float32[3, 3]" in str(caught.value) and "torch.export" not in str(caught.value)


# -- operators ------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, _ = x.mode(dim=-1)  # the first
        return values * 2


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Counting())
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        z = torch.fft.rfft(y).abs()  # the second
        return z.sum() + torch.rand(1) + torch.linalg.det(x)  # the third


def test_all_unsupported_operators_at_once() -> None:
    with pytest.raises(UnsupportedOpsError) as caught:
        import_torch(Unsupported(), floats(4, 4))
    locations = dict(caught.value.uses)
    operators = [name.split(" ")[0] for name in locations]
    assert [name.split(".")[1] for name in operators][:2] == ["mode", "fft_rfft"]
    assert {"aten.rand.default", "aten.linalg_det.default"} <= set(operators)
    mode = next(name for name in locations if "mode" in name)
    assert "counting equal elements is not supported" in mode
    first = line_of("values, _ = x.mode(dim=-1)")
    assert (
        f"in module inner.0, at {__file__}:{first}: values, _ = x.mode(dim=-1)  # the first"
        in locations[mode]
    )
    fft = next(name for name in locations if "fft" in name)
    assert f"{__file__}:{line_of('z = torch.fft.rfft(y)')}" in locations[fft]


def test_each_use_is_listed() -> None:
    with pytest.raises(UnsupportedOpsError) as caught:
        import_torch(Function(lambda x: (x.mode()[0], x.mode(0, True)[1])), floats(4))
    assert len(caught.value.uses) == 2
    assert "1 unsupported operator(s), 2 use(s)" in str(caught.value)


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda x: torch.index_put(x, (x > 0,), x), "depends on data"),
        (lambda x: torch.mode(x, 0)[0], "counting equal elements"),
        (lambda x: torch.sort(x[:1].expand(1 << 15))[0], "steps as a formula"),
        (lambda x: x + torch.randn(4), "random numbers"),
        (lambda x: torch.nn.functional.dropout(x, 0.5, True), "random numbers"),
        (lambda x: x.to(torch.complex64).real, "complex64"),
        (lambda x: x.view(torch.int32), "reads the bits"),
        (lambda x: x.as_strided((2, 2), (1, 2)), "by strides"),
        (lambda x: x[x > 0], "depends on data"),
        (lambda x: x.nonzero(), "depends on data"),
        (lambda x: torch.linalg.inv(x.diag()), "linalg_inv"),
    ],
)
def test_reasons(function: Any, reason: str) -> None:
    with pytest.raises(UnsupportedOpsError, match=reason):
        import_torch(Function(function), floats(4))


class Writing(nn.Module):
    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x * 2
        row = y[0]
        y[i > 0] = x  # a write
        return y + row


def test_writes_at_indices_keep_their_location() -> None:
    with pytest.raises(UnsupportedOpsError) as caught:
        import_torch(Writing().eval(), (floats(4), integers(4, low=1, high=4)))
    ((operator, location),) = caught.value.uses
    assert operator.startswith("aten.index_put.default (writing a value for each place of a mask")
    assert f"test_errors.py:{line_of('y[i > 0] = x')}" in location


def test_dynamic_shapes() -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(nn.Linear(3, 3).eval(), (floats(4, 3),), dynamic_shapes=({0: batch},))
    with pytest.raises(UnsupportedOpsError, match=r"input input.*symbolic shape.*only static shapes"):
        import_torch(program)


def test_a_wrong_converter_is_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.table(), "aten.relu.default", lambda ctx, x: ctx.reshape(x, (2, 2)))
    with pytest.raises(InternalError, match=re.escape("relu (aten.relu.default) was imported as f32[2,2]")):
        import_torch(Function(torch.relu), floats(4))

"""What goes in and out: arguments, nested results, parameters and constants."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from tests.frontend.checking import Function, check, compare, floats, imported, integers
from tilewright.dtypes import DType
from tilewright.frontend import import_model, import_torch
from tilewright.runtime import tree

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Features:
    mean: torch.Tensor
    count: int
    parts: list[torch.Tensor]


torch.export.register_dataclass(Features)


def test_nested_arguments_and_results() -> None:
    def model(pair: Pair, options: dict[str, Any], *, scale: float, bias: torch.Tensor | None = None) -> Any:
        total = pair.left + pair.right * options["weights"][0]
        return Pair(
            total * scale, {"parts": [total, (options["weights"][1], 3)], "none": bias, "text": "done"}
        )

    args = (Pair(floats(2, 3), floats(3)), {"weights": [floats(2, 1), integers(4)], "mode": "sum", "n": 5})
    result = check(model, *args, scale=2.5)
    assert result.graph.inputs[1].type.shape == (3,)
    assert len(result.input_names) == len(result.graph.inputs) == 4
    rebuilt = tree.unflatten(result.output_tree, list("abc"))
    assert isinstance(rebuilt, Pair)
    assert rebuilt == Pair("a", {"parts": ["b", ("c", 3)], "none": None, "text": "done"})


def test_dataclasses() -> None:
    def model(features: Features) -> Features:
        return Features(features.mean * features.count, 7, [features.mean, *features.parts])

    result = check(model, Features(floats(3), 4, [floats(2), floats(1)]))
    rebuilt = tree.unflatten(result.output_tree, [1, 2, 3, 4])
    assert rebuilt == Features(1, 7, [2, 3, 4])


def test_hugging_face_model_output() -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    def model(x: torch.Tensor) -> Any:
        return BaseModelOutputWithPooling(
            last_hidden_state=x * 2, pooler_output=x[:, 0], hidden_states=(x, x + 1)
        )

    result = check(model, floats(2, 3, 4))
    rebuilt = tree.unflatten(result.output_tree, list("abcd"))
    assert type(rebuilt) is BaseModelOutputWithPooling
    assert (rebuilt.last_hidden_state, rebuilt.hidden_states, rebuilt.attentions) == ("a", ("c", "d"), None)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eval()

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None, power: int = 2) -> Any:
        return first**power if second is None else first - second


def test_kinds_of_example_inputs() -> None:
    model, x, y = Named(), floats(3), floats(3, seed=1)
    for example in ((x, y), {"first": x, "second": y}):
        result = import_torch(model, example)
        assert result.input_names == ("first", "second")
        assert result.argument_names == ("first", "second", "power")
    compare(import_torch(model, x), model, (x,), {})
    compare(import_torch(model, (x,), {"power": 3}), model, (x,), {"power": 3})
    compare(import_model(model, {"second": y, "first": x}), model, (), {"first": x, "second": y})
    compare(import_torch(model, (x, None, 3)), model, (x, None, 3), {})


def test_exported_programs() -> None:
    model, x = Named(), floats(3)
    program = torch.export.export(model, (x,), {"power": 3})
    result = import_torch(program)
    compare(result, model, (x,), {"power": 3})
    assert result.input_names == ("x",) or result.input_names == ("first",)
    assert result.argument_names[0] == "first"


def test_a_model_without_inputs() -> None:
    result = import_torch(Function(lambda: torch.arange(4) * 2), ())
    compare(result, Function(lambda: torch.arange(4) * 2), (), {})


def test_results_that_are_inputs_or_constants() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(floats(2, 2))
            self.eval()

        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> Any:
            return x, x, self.weight, x.detach()

    result = check(Model(), floats(2), floats(5))
    assert [node.op for node in result.graph.outputs] == ["input", "input", "constant", "input"]
    assert len(result.graph.inputs) == 2


@pytest.mark.parametrize(
    "dtype, expected",
    [
        (torch.float64, DType.F64),
        (torch.float16, DType.F16),
        (torch.bfloat16, DType.BF16),
        (torch.int32, DType.I32),
        (torch.uint8, DType.U8),
        (torch.bool, DType.BOOL),
    ],
)
def test_types_of_inputs(dtype: torch.dtype, expected: DType) -> None:
    result = check(lambda x: [x, torch.cat([x, x])], integers(4, low=0, high=3).to(dtype))
    assert result.graph.inputs[0].dtype is expected


# -- parameters, buffers, constants -----------------------------------------------------------------------------------


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(floats(4, 4))
        self.tied = self.weight
        self.register_buffer("kept", floats(4, seed=1))
        self.register_buffer("passing", floats(4, seed=2), persistent=False)
        self.register_buffer("unused", floats(1000))
        self.plain = floats(4, seed=3)
        self.short = nn.Parameter(floats(4, dtype=torch.bfloat16))
        self.strided = nn.Parameter(floats(4, 4, seed=4).t())
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight + self.kept * self.passing + self.plain + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x @ self.tied.t() + self.short + x @ self.strided


def test_constants() -> None:
    model = Constants()
    result = check(model, floats(3, 4))
    nodes = {node.name: node for node in result.graph.nodes() if node.is_constant}
    assert {"kept", "passing", "short", "strided"} <= nodes.keys()
    assert "unused" not in nodes
    (weight,) = (node for name, node in nodes.items() if name in ("weight", "tied"))
    assert np.shares_memory(weight.data, model.weight.detach().numpy())
    assert nodes["short"].data is not None and nodes["short"].data.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(
        nodes["short"].data.view(np.int16), model.short.detach().view(torch.int16).numpy()
    )
    assert nodes["strided"].data is not None and nodes["strided"].data.flags.c_contiguous


def test_shared_layers_have_one_weight() -> None:
    layer = nn.Linear(4, 4)
    result = check(nn.Sequential(layer, nn.ReLU(), layer).eval(), floats(2, 4))
    assert sum(node.is_constant for node in result.graph.nodes()) == 2


def test_a_region_without_gradients() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", enabled=False):
            return y.relu() + x

    check(model, floats(3))


def test_a_region_with_autocast() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.linear(x)
            return y.float() + x

    torch.manual_seed(0)
    result = imported(Model(), floats(3, 4))
    assert result.graph.outputs[0].dtype is DType.F32
    assert [n.dtype for n in result.graph.nodes() if n.op == "linear"] == [DType.BF16]


def test_programs_from_a_file(tmp_path: Path) -> None:
    """Values that a file brings back do not remember which of them share memory."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x * 2
            row = y[1]
            row.add_(1)
            y.relu_()
            return y, row

    model = Model().eval()
    torch.export.save(torch.export.export(model, (floats(3, 4),)), tmp_path / "model.pt2")
    result = import_torch(torch.export.load(tmp_path / "model.pt2"))
    compare(result, model, (floats(3, 4),), {})


def test_assertions_and_dead_code_vanish() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch.mode(x)
        torch._assert(x.shape[0] == 3, "three")
        return x + 1

    assert len(imported(model, floats(3)).graph.nodes()) == 3


def test_importing_the_frontend_does_not_import_torch() -> None:
    code = "import sys, tilewright.frontend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_arrays_and_tensors_there_and_back(dtype: torch.dtype) -> None:
    from tilewright.frontend.torch.types import to_numpy, to_torch

    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    again = to_torch(to_numpy(tensor))
    assert again.dtype is dtype and torch.equal(again, tensor)
    assert to_torch(to_numpy(tensor)[0, 0]).shape == ()
    assert to_torch("no array") == "no array"
    fixed = np.ones(3)
    fixed.flags.writeable = False
    to_torch(fixed).zero_()
    assert fixed.sum() == 3

"""Models on the simulated accelerator: the same answers as the host's integers, and which part of them it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewright
from tilewright.codegen.gemmini import generator
from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import Placement, layer_program, matmul
from tilewright.dtypes import DType
from tilewright.errors import CodegenError, HardwareRangeError, OptionError
from tilewright.frontend import ImportedModel
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.op import apply
from tilewright.hw.gemmini import GemminiMachine
from tilewright.loops.gemmini.tiling import default_tiling
from tilewright.runtime.gemmini.executor import GemminiModel
from tilewright.runtime.gemmini.kernel import AcceleratorKernel
from tilewright.runtime.model import CompiledModel
from tilewright.testing.quantised import quantised
from tilewright.zoo.bert import Bert, BertConfig
from tilewright.zoo.resnet import ResNet, ResNetConfig

SMALL = "gemmini:dim=4,scratchpad=8192,accumulator=4096"


def imported(*outputs: Node) -> ImportedModel:
    graph = Graph(tuple(node for node in Graph((), outputs).nodes() if node.is_input), outputs)
    names = tuple(f"x{number}" for number in range(len(graph.inputs)))
    leaves = [{"kind": "leaf", "index": number} for number in range(len(names))]
    empty = {"kind": "dict", "keys": [], "items": []}
    tree = {"kind": "tuple", "items": [{"kind": "tuple", "items": leaves}, empty]}
    return ImportedModel(graph, names, tree, {"kind": "leaf", "index": 0}, names)


def tensor(index: int, *shape: int, dtype: DType = DType.I8) -> Node:
    return input_node(index, TensorType(shape, dtype))


def bytes_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-128, 128, shape).astype(np.int8)


def stored(sums: Node, scale: float, low: float = -128.0) -> Node:
    """Sums as bytes again."""
    scaled = apply("mul", apply("cast", sums, dtype=DType.F32), constant(np.array(scale, np.float32)))
    kept = apply("clamp", apply("round", scaled), min=low, max=127.0)
    return apply("cast", apply("cast", kept, dtype=DType.I32), dtype=DType.I8)


def accelerated(model: CompiledModel) -> list[str]:
    """The labels of what runs on the accelerator."""
    assert isinstance(model, GemminiModel)
    steps = [step for step in model.plan.steps if step.kernel in model.executor.accelerated]
    return [model.plan.tasks[step.task].label for step in steps]


def check(model: ImportedModel, *arrays: np.ndarray, target: str = SMALL) -> CompiledModel:
    """Compiled for the accelerator, after a comparison with the host."""
    found = tilewright.compile(model, target=target)
    np.testing.assert_array_equal(found(*arrays), tilewright.compile(model, target="cpu")(*arrays))
    return found


# -- whole models -----------------------------------------------------------------------------------------------------


def test_a_quantised_resnet(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = ResNet(ResNetConfig((1, 1, 1, 1), bottleneck=False, width=4, classes=10)).eval()
    x = torch.randn(2, 3, 24, 24)
    model = quantised(net, [(x,)])
    found, host = tilewright.compile(model, target="gemmini"), tilewright.compile(model, target="cpu")
    assert torch.equal(found(x), host(x))
    assert (found(x) - net(x)).abs().max() < 0.05 * net(x).abs().max() + 0.02
    labels = accelerated(found)
    assert len(labels) == 1 + 2 * 4 + 3 + 1, (
        "a stem, two convolutions a block, three shortcuts, a dense layer"
    )
    table = str(found.explain((x,), repeats=1))
    assert f"{len(labels)} of {len(found.plan.steps)} kernels" in table and "cycles" in table
    found.save(tmp_path / "model.tw")
    assert torch.equal(tilewright.load(tmp_path / "model.tw")(x), host(x))


def test_a_quantised_bert() -> None:
    torch.manual_seed(0)
    net = Bert(BertConfig(layers=1, width=32, heads=2, vocabulary=50, positions=16)).eval()
    ids = torch.randint(0, 50, (2, 8))
    model = quantised(net, [(ids,)])
    found = tilewright.compile(model, target="gemmini")
    assert torch.equal(found(ids), tilewright.compile(model, target="cpu")(ids))
    assert (found(ids) - net(ids)).abs().max() < 0.1
    assert len(accelerated(found)) == 6, "four products of the attention, two of the feed-forward"


# -- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_convolutions_of_any_kind(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, channels, results, kernel = (int(n) for n in rng.integers((6, 1, 2, 1), (12, 10, 10, 4)))
    stride, padding = int(rng.integers(1, 3)), int(rng.integers(0, kernel))
    x = tensor(0, 2, size, size, channels)
    weight = constant(bytes_of(rng, kernel, kernel, channels, results))
    attrs = {"stride": (stride,) * 2, "dilation": (1, 1), "groups": 1, "layout": "channels_last"}
    sums = apply("conv", x, weight, padding=((padding,) * 2,) * 2, **attrs)
    if seed % 2:
        sums = apply("add", sums, constant(rng.integers(-999, 999, results).astype(np.int32)))
    made = stored(sums, 0.01, low=0.0 if seed % 3 == 0 else -128.0)
    if seed % 4 == 1:
        made = apply("relu", made)
    found = check(imported(made), bytes_of(rng, 2, size, size, channels))
    assert len(accelerated(found)) == 1
    assert len(found.plan.steps) == 1, [info.text for info in found.plan.tasks.values()]


def test_pooling_and_a_residual_go_with_the_layer() -> None:
    rng = np.random.default_rng(0)
    x, other = tensor(0, 1, 8, 8, 8), tensor(1, 1, 8, 8, 8)
    attrs = {"stride": (1, 1), "dilation": (1, 1), "groups": 1, "layout": "channels_last"}
    weight = constant(bytes_of(rng, 3, 3, 8, 8))
    sums = apply("conv", x, weight, padding=((1, 1), (1, 1)), **attrs)
    scaled = apply("mul", apply("cast", other, dtype=DType.F32), constant(np.array(7.3, np.float32)))
    sums = apply("add", sums, apply("cast", apply("round", scaled), dtype=DType.I32))
    window = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1)}
    made = apply("max_pool", stored(sums, 0.01), layout="channels_last", ceil_mode=False, **window)
    found = check(imported(made), bytes_of(rng, 1, 8, 8, 8), bytes_of(rng, 1, 8, 8, 8))
    (label,) = accelerated(found)
    assert len(found.plan.steps) == 1 and "more" in label


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_matmuls_of_two_batches(batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    made = apply("matmul", tensor(0, *batch, 5, 9), tensor(1, *batch, 9, 6))
    found = check(imported(made), bytes_of(rng, *batch, 5, 9), bytes_of(rng, *batch, 9, 6))
    assert accelerated(found) == ["matmul"]


def test_a_scale_for_each_channel_is_the_hosts() -> None:
    """The accelerator has one scale for all: its 32-bit sums are stored, and the host rounds them."""
    rng = np.random.default_rng(2)
    sums = apply("matmul", tensor(0, 4, 8), constant(bytes_of(rng, 8, 6)))
    scales = constant(np.linspace(0.01, 0.2, 6, dtype=np.float32))
    scaled = apply("mul", apply("cast", sums, dtype=DType.F32), scales)
    made = apply("cast", apply("clamp", apply("round", scaled), min=-128.0, max=127.0), dtype=DType.I8)
    found = check(imported(made), bytes_of(rng, 4, 8))
    assert accelerated(found) == ["matmul"] and len(found.plan.steps) == 2


@pytest.mark.parametrize("dtype", [DType.F32, DType.I32])
def test_other_types_are_the_hosts(dtype: DType) -> None:
    made = apply("matmul", tensor(0, 4, 4, dtype=dtype), tensor(1, 4, 4, dtype=dtype))
    arrays = [np.arange(16, dtype=dtype.numpy).reshape(4, 4)] * 2
    assert accelerated(check(imported(made), *arrays)) == []


def test_what_does_not_fit_is_the_hosts() -> None:
    """One pixel and a block of weights do not fit a scratchpad of 16 rows."""
    rng = np.random.default_rng(0)
    attrs = {"stride": (1, 1), "dilation": (1, 1), "groups": 1, "layout": "channels_last"}
    weight = constant(bytes_of(rng, 5, 5, 16, 4))
    made = apply("conv", tensor(0, 1, 9, 9, 16), weight, padding=((0, 0), (0, 0)), **attrs)
    target = "gemmini:dim=16,scratchpad=256,accumulator=1024"
    assert accelerated(check(imported(made), bytes_of(rng, 1, 9, 9, 16), target=target)) == []


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("gemmini:dims=4", "Gemmini has no parameter 'dims'"),
        ("gemmini:dim=four", "dim must be a number, got 'four'"),
        ("gemmini:dim=0", "dim must be a whole number between 1 and 128, got 0"),
        ("gemmini:dram_bytes_per_cycle=7.5", "must be a multiple of 4 for the RTL's bus, got 7.5"),
        ("gemmini:dim=128,accumulator=256", "has no whole row"),
    ],
)
def test_hardware_that_there_is_not(target: str, said: str) -> None:
    made = imported(apply("relu", tensor(0, 2, 2)))
    with pytest.raises(HardwareRangeError, match=said):
        tilewright.compile(made, target=target)


def test_a_machine_as_a_target() -> None:
    made = imported(apply("matmul", tensor(0, 4, 4), tensor(1, 4, 4)))
    found = tilewright.compile(made, target=GemminiMachine(dim=8))
    assert accelerated(found) == ["matmul"]


def test_a_simulator_is_not_measured() -> None:
    made = imported(apply("relu", tensor(0, 2, 2)))
    with pytest.raises(OptionError, match="measures on this machine"):
        tilewright.compile(made, target="gemmini", effort="quick")


@pytest.mark.parametrize(
    "broken",
    [
        lambda code: b"ELF" + code,
        lambda code: code[:-1],
        lambda code: code.replace(b'"start":64', b'"start":99999999'),
        lambda code: code[:20] + b"}" + code[21:],
        lambda code: code[:-24] + b"\xff" * 24,
    ],
)
def test_code_that_is_no_program(broken: Callable[[bytes], bytes]) -> None:
    made = imported(apply("matmul", tensor(0, 4, 4), tensor(1, 4, 4)))
    model = tilewright.compile(made, target=SMALL)
    (kernel,) = model.executor.accelerated.values()
    with pytest.raises(CodegenError):
        AcceleratorKernel(broken(kernel.code), "kernel").check()


# -- forms and the cache ----------------------------------------------------------------------------------------------


def test_a_matmul_is_loop_instructions_where_they_take_no_longer() -> None:
    rng = np.random.default_rng(3)
    made = apply("matmul", tensor(0, 64, 64), tensor(1, 64, 64))
    found = check(imported(made), bytes_of(rng, 64, 64), bytes_of(rng, 64, 64), target="gemmini")
    (kernel,) = found.executor.accelerated.values()
    assert [each.name for each in kernel.program][-2:] == ["loop_ws", "fence"]
    assert kernel.header.instructions == len(kernel.program) < 40
    layer, machine = matmul(64, 64, 64, full=True), GemminiMachine()
    place = Placement(data=64, weights=64, results=64)
    plain = simulate(layer_program(layer, default_tiling(layer, machine), machine, place), machine)
    assert kernel.header.cycles <= plain.total
    assert "loop_ws of tiles 64x64" in found.plan.tasks[found.plan.steps[0].task].program


def test_a_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second compilation takes it from the cache on disk."""
    made = imported(apply("matmul", tensor(0, 6, 11), tensor(1, 11, 7)))
    first = tilewright.compile(made, target=SMALL)
    monkeypatch.setattr(generator, "compiled", None)  # what makes programs
    second = tilewright.compile(made, target=SMALL)
    kernels = [next(iter(model.executor.accelerated.values())).code for model in (first, second)]
    assert kernels[0] == kernels[1]


# -- biases -----------------------------------------------------------------------------------------------------------


def with_bias(magnitude: int, as_input: bool = False) -> tuple[ImportedModel, list[np.ndarray]]:
    """A matmul that waits for its bias more than for the array."""
    rng = np.random.default_rng(0)
    value = rng.integers(-magnitude, magnitude + 1, 32).astype(np.int32)
    value[:2] = magnitude, -magnitude
    bias = tensor(1, 32, dtype=DType.I32) if as_input else constant(value)
    product = apply("matmul", tensor(0, 64, 8), constant(bytes_of(rng, 8, 32)))
    arrays = [bytes_of(rng, 64, 8), *([value] if as_input else [])]
    return imported(stored(apply("add", product, bias), 0.01)), arrays


def bias_rows(model: CompiledModel) -> list[int]:
    assert isinstance(model, GemminiModel)
    kernels = model.executor.accelerated.values()
    return [
        region.bias_rows for kernel in kernels for region in kernel.header.arguments if region.bytes == 128
    ]


@pytest.mark.parametrize(("magnitude", "rows"), [(100, 1), (9999, 2), (127 + 15 * 127 * 127, 16)])
def test_a_constant_bias_is_added_by_the_array(magnitude: int, rows: int) -> None:
    model, arrays = with_bias(magnitude)
    found = check(model, *arrays, target="gemmini")
    assert accelerated(found) and bias_rows(found) == [rows]


@pytest.mark.parametrize(
    ("magnitude", "as_input"), [(128 + 15 * 127 * 127, False), (2**31 - 1, False), (99, True)]
)
def test_a_bias_that_bytes_may_not_hold_is_loaded(magnitude: int, as_input: bool) -> None:
    model, arrays = with_bias(magnitude, as_input)
    found = check(model, *arrays, target="gemmini")
    assert accelerated(found) and bias_rows(found) == [0]

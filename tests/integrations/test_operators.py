"""`tilewright.op`: tile kernels as operators in eager mode, torch.compile, compiled models and artifacts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilewright
import tilewright.tile as tl
from tests.nvrtc import needs_nvrtc
from tilewright.db.database import Database
from tilewright.errors import (
    OperatorError,
    ReferenceMismatchError,
    UnsupportedOpsError,
)
from tilewright.report.gather import report_on_model
from tilewright.runtime.cuda import device


@tilewright.kernel
def axpy_kernel(x, y, out, n, alpha, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    result = alpha * tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside)
    tl.store(out + at, result, mask=inside)


@tilewright.kernel
def row_sum_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        total += tl.load(x + row * columns + first + n, mask=first + n < columns, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, axis=0))


@tilewright.op(
    "twtest::axpy", shape=lambda x, y, alpha=1.0: x, reference=lambda x, y, alpha=1.0: alpha * x + y
)
def axpy(x, y, alpha: float = 1.0, out=None):
    n = x.numel()
    axpy_kernel[(tl.cdiv(n, 256),)](x, y, out, n, alpha, BLOCK=256)


def axpy_grid(meta: dict[str, Any]) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


tuned_axpy_kernel = tilewright.autotune({"BLOCK": (64, 256, 1024)}, key=["n"])(axpy_kernel)


@tilewright.op("twtest::tuned_axpy", shape=lambda x, y: x, reference=lambda x, y: 2 * x + y)
def tuned_axpy(x, y, out):
    tuned_axpy_kernel[axpy_grid](x, y, out, x.numel(), 2.0)


@tilewright.op(
    "twtest::row_sum",
    shape=lambda x: ((x.shape[0],), torch.float32),
    reference=lambda x: x.to(torch.float32).sum(dim=1),
)
def row_sum(x, out):
    row_sum_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=64)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(37, 37)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).relu()
        return torch.softmax(axpy(h, y, 0.5), -1) + axpy(x, x)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(20, 37), torch.randn(20, 37)


def test_eager(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = inputs
    assert torch.allclose(axpy(x, y, 2.0), 2 * x + y)
    assert torch.allclose(axpy(x.T, y.T), (x + y).T), "tensors that are not dense are copied"
    assert np.allclose(axpy(x.numpy(), y.numpy(), alpha=3.0), 3 * x + y)
    assert torch.allclose(row_sum(x), x.sum(1), atol=1e-5)
    assert axpy.check(x, y, 2.0) <= 1


def test_a_compiled_model(model: Model, inputs: tuple[torch.Tensor, torch.Tensor], tmp_path: Path) -> None:
    fast = tilewright.compile(model, inputs)
    expected = model(*inputs)
    assert torch.allclose(fast(*inputs), expected, atol=1e-5)
    assert "twtest::axpy" in str(fast.explain(inputs))

    path = tmp_path / "model.tw"
    fast.save(path)
    np.savez(tmp_path / "data.npz", x=inputs[0].numpy(), y=inputs[1].numpy(), out=expected.detach().numpy())
    script = (
        "import sys, numpy, tilewright; d = numpy.load(sys.argv[2]); model = tilewright.load(sys.argv[1]);"
        "assert numpy.allclose(model(d['x'], d['y']), d['out'], atol=1e-5); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, path, tmp_path / "data.npz"], check=True)


@pytest.mark.parametrize("backend", ["tilewright", "eager"])
def test_torch_compile(model: Model, inputs: tuple[torch.Tensor, torch.Tensor], backend: str) -> None:
    with torch.no_grad():
        fast = torch.compile(model, backend=backend, fullgraph=True)
        assert torch.allclose(fast(*inputs), model(*inputs), atol=1e-5)


def test_half_precision_stays_as_the_kernel_wants_it() -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return row_sum(x * 2) + 1

    x = torch.randn(8, 100).to(torch.float16)
    fast = tilewright.compile(Sum().eval(), (x,))
    assert torch.allclose(fast(x), (x * 2).float().sum(1) + 1, atol=1e-3)


def test_the_knobs_of_a_tuned_kernel_are_tuned_in_the_model(
    inputs: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return tuned_axpy(x, y)

    fast = tilewright.compile(Twice().eval(), inputs, effort="quick", budget=10, db=tmp_path / "tuning.db")
    assert torch.allclose(fast(*inputs), 2 * inputs[0] + inputs[1])
    report = str(fast.explain(inputs))
    assert "twtest::tuned_axpy" in report and "tuned" in report


def test_between_convolutions_and_with_a_constant_of_one_element() -> None:
    """The order of axes in memory may be another around it, and a constant is an operand all the same."""

    class Between(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 8, 3)
            self.register_buffer("one", torch.full((1, 1), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).relu()
            h = self.last(axpy(h, h, 0.5)).relu()
            return h.sum() + axpy(self.one, h[:1, :1, 0, 0], 2.0)

    torch.manual_seed(0)
    model, x = Between().eval(), torch.randn(1, 3, 20, 20)
    assert torch.allclose(tilewright.compile(model, (x,))(x), model(x), rtol=1e-4)


def test_a_report_shows_the_tile_program(
    model: Model, inputs: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    compiled = tilewright.compile(model, inputs)
    with Database.open(tmp_path / "trials.db") as database:
        report = report_on_model(compiled, "axpy", database)
    assert "axpy" in {row.layer for row in compiled.explain(inputs).rows}
    shown = [task.code for task in report.tasks if "axpy" in task.text]
    assert len(shown) == 2  # y is an operand of the first, and x both operands of the second
    for code in shown:
        assert code is not None and code.runs and code.assembly
        assert code.loops.startswith("kernel axpy_kernel(")


def test_numbers_of_numpy() -> None:
    """As in an eager launch, a NumPy number has the type of the Python number."""

    @tilewright.op("twtest::numpy_numbers", shape=lambda x: x, reference=lambda x: 0.1 * x + x)
    def numpy_numbers(x, out):
        n = np.int64(x.numel())
        axpy_kernel[(tl.cdiv(int(n), 16),)](x, x, out, n, np.float64(0.1), BLOCK=np.int64(16))

    fast, x = compiled(numpy_numbers), torch.randn(4, 5)
    assert torch.equal(fast(x), numpy_numbers(x))


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def test_a_model_for_a_described_gpu_has_the_kernel(
    model: Model, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    needs_nvrtc()
    made = tilewright.compile(model, inputs, target="sm_90a")
    assert "twtest::axpy" in " ".join(info.label for info in made.plan.tasks.values())


def threads_on_a_gpu(op: Any) -> list[int]:
    """Of the kernels of a model for an H200 that calls the operator."""
    needs_nvrtc()
    made = compiled(op, target="sm_90a")
    return [step.launch.threads for step in made.plan.steps]


def test_a_model_for_a_gpu_has_the_options_of_the_launch() -> None:
    @tilewright.op("twtest::warps", shape=lambda x: x, reference=lambda x: 2 * x)
    def warps(x, out):
        axpy_kernel[(1,)](x, x, out, x.numel(), 1.0, BLOCK=1024, options={"warps": 8})

    assert threads_on_a_gpu(warps) == [256]
    x = torch.randn(4, 5)
    assert torch.equal(compiled(warps)(x), 2 * x), "a processor has no warps"


def test_a_model_for_a_gpu_has_the_knobs_that_are_options_of_the_launch() -> None:
    tuned = tilewright.autotune({"BLOCK": (256, 1024), "warps": (16, 8), "threads": (1, 2)}, key=["n"])(
        axpy_kernel
    )

    @tilewright.op("twtest::tuned_warps", shape=lambda x: x, reference=lambda x: 2 * x)
    def knobs(x, out):
        tuned[axpy_grid](x, x, out, x.numel(), 1.0)

    @tilewright.op("twtest::fixed_warps", shape=lambda x: x, reference=lambda x: 2 * x)
    def fixed(x, out):
        tuned[axpy_grid](x, x, out, x.numel(), 1.0, options={"warps": 2})

    assert threads_on_a_gpu(knobs)[0] in (256, 512)
    assert threads_on_a_gpu(fixed) == [64]
    x = torch.randn(4, 5)
    assert torch.equal(compiled(knobs)(x), 2 * x)


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
def test_a_model_on_a_gpu(model: Model, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The kernel runs, in `torch.compile` too."""
    model, given = model.cuda(), tuple(each.cuda() for each in inputs)
    with torch.no_grad():
        expected = model(*given)
        fast = tilewright.compile(model, given)
        assert torch.allclose(fast(*given), expected, atol=1e-4)
        assert "twtest::axpy" in str(fast.explain(given))
        if "tilewright" in torch._dynamo.list_backends(()):  # an entry point: not of a checkout by itself
            again = torch.compile(model, backend="tilewright", fullgraph=True)
            assert torch.allclose(again(*given), expected, atol=1e-4)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def operator(**changes: Any) -> Any:
    def copy(x, out):
        n = x.numel()
        axpy_kernel[(tl.cdiv(n, 256),)](x, x, out, n, 0.0, BLOCK=256)

    given = {"name": "twtest::copy", "shape": lambda x: x, "reference": lambda x: x + 0, **changes}
    return tilewright.op(given.pop("name"), **given)(copy)


def compiled(op: Any, **how: Any) -> Any:
    class Calls(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return op(x)

    return tilewright.compile(Calls().eval(), (torch.randn(4, 5),), **how)


def test_a_reference_that_disagrees_is_found_when_a_model_is_compiled() -> None:
    assert compiled(operator()) is not None
    wrong = operator(reference=lambda x: x + 1)
    with pytest.raises(
        ReferenceMismatchError, match="twtest::copy: the kernel and its reference disagree: 20 of 20"
    ):
        wrong.check(torch.randn(4, 5))
    with pytest.raises(ReferenceMismatchError, match=r"lambda x: x \+ 1\)\n *\^+\n"):
        wrong.check(torch.randn(4, 5))
    with pytest.raises(ReferenceMismatchError, match="disagree"):
        compiled(wrong)


def test_a_reference_of_another_shape() -> None:
    with pytest.raises(ReferenceMismatchError, match=r"returns f32\[4\], and the shape rule says f32\[4,5\]"):
        compiled(operator(reference=sums))


def sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


def test_a_mismatch_shows_the_reference() -> None:
    with pytest.raises(ReferenceMismatchError) as caught:
        operator(reference=sums).check(torch.randn(4, 5))
    assert f'File "{__file__}"' in str(caught.value)
    assert "    def sums(x: torch.Tensor) -> torch.Tensor:\n    ^^^^" in str(caught.value)
    with pytest.raises(ReferenceMismatchError) as caught:  # a function without source
        operator(reference=torch.nn.ReLU()).check(torch.randn(4, 5))
    assert "File" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "copy"}, "must be namespace::operator"),
        ({"shape": lambda x, y: x}, "the shape rule of twtest::copy does not take"),
        ({"reference": lambda: 0}, "the reference of twtest::copy does not take"),
    ],
)
def test_what_cannot_be_registered(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        operator(**changes)


def test_a_function_without_a_result() -> None:
    with pytest.raises(OperatorError, match="must be `out`"):
        tilewright.op("twtest::none", shape=lambda x: x, reference=lambda x: x)(lambda x: None)
    with pytest.raises(OperatorError, match="takes no tensor"):
        tilewright.op("twtest::none", shape=lambda n: (n,), reference=lambda n: n)(_only_numbers)


def _only_numbers(n: int, out: Any) -> None: ...


def test_a_shape_rule_that_returns_no_shape() -> None:
    with pytest.raises(OperatorError, match="must return a shape"):
        operator(shape=lambda x: 3.5)(torch.randn(3))


def test_two_launches_cannot_be_part_of_a_model() -> None:
    @tilewright.op("twtest::twice", shape=lambda x: x, reference=lambda x: x + 0)
    def twice(x, out):
        for _ in range(2):
            axpy_kernel[(1,)](x, x, out, x.numel(), 0.0, BLOCK=256)

    assert torch.equal(twice(torch.ones(4, 5)), torch.ones(4, 5))
    with pytest.raises(UnsupportedOpsError, match="launches 2 kernels"):
        compiled(twice)


def test_storing_to_an_argument_cannot_be_part_of_a_model() -> None:
    @tilewright.op("twtest::stores", shape=lambda x: x, reference=lambda x: x + 0)
    def stores(x, out):
        axpy_kernel[(1,)](out, x, x, x.numel(), 0.0, BLOCK=256)

    with pytest.raises(UnsupportedOpsError, match="stores to an argument"):
        compiled(stores)


def test_an_option_that_no_launch_has_cannot_be_part_of_a_model() -> None:
    @tilewright.op("twtest::misspelt", shape=lambda x: x, reference=lambda x: x + 0)
    def misspelt(x, out):
        axpy_kernel[(1,)](x, x, out, x.numel(), 0.0, BLOCK=256, options={"wraps": 8})

    with pytest.raises(UnsupportedOpsError, match="option 'wraps'"):
        compiled(misspelt)

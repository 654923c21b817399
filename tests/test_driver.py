"""The pipeline as a user takes it: `tilewright.compile`, call, save, load; and each mistake a user can make."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tilewright import errors, zoo
from tilewright.support.trace import Trace


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return TwoLayers().eval()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(7, 12, generator=torch.Generator().manual_seed(1))


def test_module_and_exported_program_agree_with_pytorch(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        expected = model(x)
        for source in (model, torch.export.export(model, (x,))):
            torch.testing.assert_close(tilewright.compile(source, (x,))(x), expected)


@pytest.mark.parametrize("channels", [3, 32])
def test_convolutions_in_either_layout_agree_with_pytorch(channels: int) -> None:
    """Few channels stay where the model has them, many are stored last."""
    torch.manual_seed(0)
    narrow = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.MaxPool2d(3, 2, 1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(channels * 15 * 14, 5),
    ).eval()
    image = torch.randn(2, 3, 29, 27)
    with torch.no_grad():
        torch.testing.assert_close(tilewright.compile(narrow, (image,))(image), narrow(image))


def test_numpy_in_numpy_out(model: nn.Module, x: torch.Tensor) -> None:
    compiled = tilewright.compile(model, (x,))
    result = compiled(x.numpy())
    assert isinstance(result, np.ndarray)
    with torch.no_grad():
        np.testing.assert_allclose(result, model(x).numpy(), rtol=1e-5, atol=1e-5)


def test_non_contiguous_input_just_works(model: nn.Module, x: torch.Tensor) -> None:
    compiled = tilewright.compile(model, (x,))
    turned = x.t().contiguous().t()
    assert not turned.is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(compiled(turned), model(x))


def test_nested_inputs_and_outputs_keep_their_form() -> None:
    class Nested(nn.Module):
        def forward(self, pair, *, scale):
            a, b = pair["a"], pair["b"]
            return {"sum": a + b, "rest": [a * scale, (b,)]}

    a, b, scale = torch.randn(3), torch.randn(3), torch.randn(3)
    compiled = tilewright.compile(torch.export.export(Nested(), ({"a": a, "b": b},), {"scale": scale}))
    result = compiled({"a": a, "b": b}, scale=scale)
    torch.testing.assert_close(result["sum"], a + b)
    torch.testing.assert_close(result["rest"][0], a * scale)
    torch.testing.assert_close(result["rest"][1][0], b)
    assert isinstance(result["rest"], list) and isinstance(result["rest"][1], tuple)


def test_outputs_that_are_inputs_constants_views_and_repeats() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(6.0))

        def forward(self, x: torch.Tensor):
            y = x + 1
            return x, self.table, y, y, y.reshape(3, 2), torch.zeros(0, 4)

    x = torch.randn(2, 3)
    got, expected = tilewright.compile(Odd().eval(), (x,))(x), Odd()(x)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tensors_without_elements() -> None:
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, torch.cat([x, torch.ones(2, 3)]).sum(0)

    x = torch.zeros(0, 3)
    doubled, total = tilewright.compile(Empty().eval(), (x,))(x)
    assert doubled.shape == (0, 3)
    torch.testing.assert_close(total, torch.full((3,), 2.0))


def test_nan_and_infinity_propagate(model: nn.Module) -> None:
    class Steps(nn.Module):
        def forward(self, x: torch.Tensor):
            pooled = torch.nn.functional.max_pool1d(x[None, None], 2)[0, 0]
            return (
                torch.softmax(x, 0),
                torch.relu(x),
                x.amax(),
                x.sum(),
                torch.maximum(x, -x),
                torch.sigmoid(x),
                pooled,
            )

    for special in (float("nan"), float("inf"), float("-inf")):
        x = torch.tensor([1.0, special, -2.0, 0.5, 3.0, -1.0])
        for ours, theirs in zip(tilewright.compile(Steps().eval(), (x,))(x), Steps()(x), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_trace_tells_what_happened(model: nn.Module, x: torch.Tensor) -> None:
    trace = Trace()
    tilewright.compile(model, (x,), trace=trace)
    names = [event.name for event in trace.events]
    assert [n for n in names if n in ("import", "rewrite", "build", "link", "load")] == [
        "import",
        "rewrite",
        "build",
        "link",
        "load",
    ]
    assert "kernel" in names and "rewrites.fold-constants" in names


def test_second_compile_comes_from_the_cache(
    model: nn.Module, x: torch.Tensor, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    for expected in (False, True):
        trace = Trace()
        tilewright.compile(model, (x,), trace=trace)
        assert {event.notes["cached"] for event in trace.events if event.name == "kernel"} == {expected}


def test_kernels_of_one_model_serve_the_next(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    first = nn.Sequential(nn.Linear(12, 16), nn.ReLU()).eval()
    second = nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)
    ).eval()  # other weights, one layer more
    tilewright.compile(first, (torch.randn(5, 12),))
    trace = Trace()
    tilewright.compile(second, (torch.randn(5, 12),), trace=trace, partition="greedy")  # no chain
    assert [event.notes["cached"] for event in trace.events if event.name == "kernel"] == [True, False]


def test_called_from_many_threads(model: nn.Module) -> None:
    inputs = [torch.randn(7, 12) for _ in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    compiled = tilewright.compile(model, (inputs[0],))
    wrong: list[int] = []

    def call(number: int) -> None:
        results = [compiled(inputs[number]) for _ in range(50)]
        wrong.extend(number for result in results if not torch.allclose(result, expected[number], atol=1e-5))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_are_the_same_bits_for_any_number_of_threads() -> None:
    model, inputs = zoo.build("resnet18", small=True), zoo.example_inputs("resnet18", small=True)
    compiled = tilewright.compile(model, inputs)
    results = []
    for threads in (1, 2, 3, 2):
        compiled.threads = threads
        results.append(compiled(*inputs))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_saved_and_loaded_without_torch_or_the_compiler(tmp_path: Path) -> None:
    model, inputs = zoo.build("mobilenetv2", small=True), zoo.example_inputs("mobilenetv2", small=True)
    compiled = tilewright.compile(model, inputs)
    path = tmp_path / "model.tw"
    compiled.save(path)
    np.save(tmp_path / "x.npy", inputs[0].numpy())
    script = textwrap.dedent(
        """
        import sys
        import numpy as np

        FORBIDDEN = ("torch", "onnx", "lightgbm", "tilewright.te", "tilewright.graph", "tilewright.frontend",
                     "tilewright.rewrites", "tilewright.loops", "tilewright.codegen", "tilewright.driver")

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name in FORBIDDEN or name.startswith(tuple(f + "." for f in FORBIDDEN)):
                    raise ImportError(f"{name} must not be needed here")

        sys.meta_path.insert(0, Refuse())
        import tilewright
        fast = tilewright.load(sys.argv[1])
        np.save(sys.argv[3], fast(np.load(sys.argv[2])))
        """
    )
    arguments = [str(path), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), compiled(inputs[0].numpy()))


def test_two_processes_compile_the_same_model_at_once(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import torch, tilewright
        from tilewright import zoo
        model, inputs = zoo.build("resnet18", small=True), zoo.example_inputs("resnet18", small=True)
        with torch.no_grad():
            torch.testing.assert_close(tilewright.compile(model, inputs)(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
        """
    )
    environment = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path)}
    workers = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(2)]
    assert [worker.wait(timeout=180) for worker in workers] == [0, 0]


def test_an_interrupted_compile_leaves_a_sound_cache(
    model: nn.Module, x: torch.Tensor, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))

    def interrupt(kind: str, event) -> None:
        if kind == "end" and event.name == "kernel":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tilewright.compile(model, (x,), trace=Trace(listener=interrupt))
    assert not list(tmp_path.rglob(".writing-*"))
    with torch.no_grad():
        torch.testing.assert_close(tilewright.compile(model, (x,))(x), model(x))


def test_import_is_light() -> None:
    script = (
        "import sys, tilewright\n"
        "heavy = {'torch', 'onnx', 'lightgbm', 'llvmlite', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_training_mode(model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(errors.TrainingModeError, match=r"eval\(\)"):
        tilewright.compile(nn.Sequential(nn.Linear(12, 3), nn.Dropout()).train(), (x,))


def test_not_a_model() -> None:
    with pytest.raises(errors.UnsupportedModelError):
        tilewright.compile(lambda x: x, (torch.ones(1),))
    with pytest.raises(errors.ModelFileError, match=r"cannot read resnet50\.pth"):
        tilewright.compile("resnet50.pth", (torch.ones(1),))


def test_no_example_inputs(model: nn.Module) -> None:
    with pytest.raises(errors.UnsupportedModelError, match="example"):
        tilewright.compile(model)


def test_a_buffer_that_changes() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    with pytest.raises(errors.MutationError, match="calls"):
        tilewright.compile(Counter().eval(), (torch.ones(3),))


def test_all_unsupported_operators_are_named_at_once_with_their_lines() -> None:
    class Strange(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.linalg.inv(x)
            return torch.fft.fft(y).real

    with pytest.raises(errors.UnsupportedOpsError) as caught:
        tilewright.compile(Strange().eval(), (torch.eye(4),))
    message = str(caught.value)
    assert "linalg_inv" in message and "fft" in message
    assert message.count("test_driver.py") >= 2


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda f, x: f(), "x"),
        (lambda f, x: f(x, x), "argument"),
        (lambda f, x: f(x[:3]), r"\(7, 12\), got \(3, 12\)"),
        (lambda f, x: f(x.double()), r"expected f32.*float64"),
        (lambda f, x: f("text"), "str"),
        (lambda f, x: f(x.to("meta")), "meta"),
    ],
)
def test_wrong_inputs_are_described(model: nn.Module, x: torch.Tensor, call, complaint: str) -> None:
    compiled = tilewright.compile(model, (x,))
    with pytest.raises(errors.InputError, match=complaint):
        call(compiled, x)


def test_an_input_that_wants_gradients(model: nn.Module, x: torch.Tensor) -> None:
    compiled = tilewright.compile(model, (x,))
    wanting = x.clone().requires_grad_()
    with pytest.raises(errors.GradientError, match="no_grad"):
        compiled(wanting)
    with torch.no_grad():
        compiled(wanting)


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"effort": "maximal"}, errors.OptionError, "effort"),
        ({"numerics": "sloppy"}, errors.OptionError, "numerics"),
        ({"target": "quantum"}, errors.TargetError, "quantum"),
        ({"threads": -2}, errors.OptionError, "threads"),
    ],
)
def test_wrong_options(model: nn.Module, x: torch.Tensor, options, error, complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        tilewright.compile(model, (x,), **options)


def test_a_mean_of_doubled_values() -> None:
    """A sum of products whose data is one number: nothing of it is left to be staged."""

    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([x, 0.5 * x], 1)
            return (x.permute(0, 2, 3, 1) * 2).permute(0, 3, 1, 2).mean((2, 3))

    x = torch.randn(1, 64, 3, 8)
    model = torch.nn.Sequential(torch.nn.Conv2d(64, 48, 2, 1, 1, bias=False), Doubled()).eval()
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(
        tilewright.compile(model, (x,), target="cpu")(x), expected, atol=1e-5, rtol=1e-5
    )

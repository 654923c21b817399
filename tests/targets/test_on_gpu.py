"""Whole models on a GPU: right, in order with the caller's streams, and refused with a clear word where they cannot be.

Errors are held against PyTorch's own, of the same model in the same precision, as the design of half precision says.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tests.targets.pooled import Pooled, imported, partitioned
from tilewright.db.database import Database
from tilewright.errors import InputError, MixedDevicesError
from tilewright.hw.gpu import PORTABLE, detect
from tilewright.knobs import DEPENDENT_LAUNCHES
from tilewright.rewrites.join_reductions import alternatives, join_reductions
from tilewright.runtime.cuda.model import GpuModel
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.options import Settings
from tilewright.targets.stages import build_plan, choose_implementations
from tilewright.targets.target import boundary as boundary_of
from tilewright.targets.target import computed
from tilewright.tune.choose import choose
from tilewright.tune.effort import Tuning
from tilewright.zoo import registry

pytestmark = pytest.mark.gpu

MODELS = ["resnet50", "mobilenetv2", "vgg16", "bert-tiny", "gpt2", "vit-b16", "detr-3", "unet", "setr-pup"]


def half_model(
    name: str, dtype: torch.dtype = torch.float16, batch: int = 2
) -> tuple[nn.Module, tuple[Any, ...]]:
    model = registry.build(name, small=True).cuda().to(dtype)
    inputs = registry.example_inputs(name, batch, small=True)
    return model, tuple(x.cuda().to(dtype) if x.is_floating_point() else x.cuda() for x in inputs)


def leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [leaf for each in value for leaf in leaves(each)]


def errors_of(model: nn.Module, inputs: tuple[Any, ...], result: Any) -> list[tuple[float, float]]:
    """Of each result: Tilewright's error and PyTorch's, relative to float64."""
    with torch.no_grad():
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        exact = leaves(copy.deepcopy(model).double()(*wide))
        framework = leaves(model(*inputs))
    pairs = []
    for ours, theirs, expected in zip(leaves(result), framework, exact, strict=True):
        scale = float(torch.linalg.vector_norm(expected)) or 1.0
        pairs.append(
            tuple(float(torch.linalg.vector_norm(r.double() - expected)) / scale for r in (ours, theirs))
        )
    return pairs


def assert_right(model: nn.Module, inputs: tuple[Any, ...], result: Any, floor: float = 2e-3) -> None:
    for ours, theirs in errors_of(model, inputs, result):
        assert ours <= max(2 * theirs, floor), f"{ours:.2e}, and PyTorch's is {theirs:.2e}"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right(name: str) -> None:
    model, inputs = half_model(name)
    fast = tilewright.compile(model, inputs)
    assert isinstance(fast, GpuModel)
    assert_right(model, inputs, fast(*inputs))


@pytest.mark.parametrize("name", ["resnet18", "bert-tiny"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    model, inputs = half_model(name, dtype)
    floor = 1e-2 if dtype is torch.bfloat16 else 1e-4
    assert_right(model, inputs, tilewright.compile(model, inputs)(*inputs), floor)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2", "gpt2"])
def test_without_libraries(name: str) -> None:
    model, inputs = half_model(name)
    fast = tilewright.compile(model, inputs, target=detect())
    assert not any(step.vendor for step in fast.plan.steps)
    assert_right(model, inputs, fast(*inputs))


def test_repeats_are_equal_and_results_are_fresh() -> None:
    model, inputs = half_model("resnet18")
    fast = tilewright.compile(model, inputs)
    first = fast(*inputs)
    kept = first.clone()
    for _ in range(20):
        again = fast(*inputs)
        assert torch.equal(again, kept)
    assert first.data_ptr() != again.data_ptr()
    assert torch.equal(first, kept)


@pytest.mark.parametrize("target", ["cuda", "without libraries"])
def test_kernels_that_overlap_give_the_same_bits(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = half_model("gpt2")
    results = {}
    for way in DEPENDENT_LAUNCHES:
        monkeypatch.setenv("TILEWRIGHT_DEPENDENT_LAUNCH", way)
        fast = tilewright.compile(model, inputs, target="cuda" if target == "cuda" else detect())
        results[way] = [fast(*inputs) for _ in range(20)]
    torch.cuda.synchronize()
    for way, found in results.items():
        assert all(torch.equal(each, results["off"][0]) for each in found), way


def test_the_current_stream_is_respected() -> None:
    model, inputs = half_model("gpt2")
    fast = tilewright.compile(model, inputs)
    expected = fast(*inputs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    (ids,) = inputs
    stale = torch.zeros_like(ids)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the copy below is late: who does not wait for it reads zeros
        stale.copy_(ids)
        result = fast(stale)
        doubled = result * 2
    default = fast(ids)  # on another stream, at once
    stream.synchronize()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
    assert torch.equal(default, expected)
    assert torch.equal(doubled, expected * 2)


def test_several_threads_call_one_model() -> None:
    model, inputs = half_model("bert-tiny")
    fast = tilewright.compile(model, inputs)
    expected = fast(*inputs)
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                result = fast(*inputs)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(result, expected):
                    wrong.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_arrays_of_the_host() -> None:
    model, (x,) = half_model("resnet18")
    fast = tilewright.compile(model, (x,))
    result = fast(x.cpu().numpy())
    assert isinstance(result, np.ndarray)
    assert np.array_equal(result, fast(x).cpu().numpy())


def test_save_and_load(tmp_path: Path) -> None:
    model, inputs = half_model("gpt2")
    fast = tilewright.compile(model, inputs)
    fast.save(tmp_path / "model.tw")
    again = tilewright.load(tmp_path / "model.tw")
    assert isinstance(again, GpuModel)
    assert_right(model, inputs, again(*inputs))


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
import numpy as np
import tilewright
model = tilewright.load(sys.argv[1])
np.save(sys.argv[3], model(np.load(sys.argv[2])))
assert not {"llvmlite", "onnx"} & set(sys.modules)
"""


def test_a_file_runs_where_there_is_no_torch(tmp_path: Path) -> None:
    """It has no step that a library computes."""
    model, (x,) = half_model("resnet18")
    tilewright.compile(model, (x,)).save(tmp_path / "model.tw")
    np.save(tmp_path / "x.npy", x.cpu().numpy())
    paths = [str(tmp_path / name) for name in ("model.tw", "x.npy", "y.npy")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *paths],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert_right(model, (x,), torch.from_numpy(np.load(tmp_path / "y.npy")).cuda())


def test_portable_kernels() -> None:
    """What a file has for other cards: PTX, which the driver compiles."""
    model, inputs = half_model("bert-tiny")
    fast = tilewright.compile(model, inputs, target=PORTABLE)
    assert fast.plan.target["cpu"] == "compute_80"
    assert_right(model, inputs, fast(*inputs))


@pytest.mark.parametrize("target", ["cuda", "without libraries"])
def test_float32_is_rounded_where_that_is_allowed(target: str) -> None:
    model, inputs = half_model("bert-tiny", torch.float32)
    errors = {}
    for numerics in ("fast", "tf32"):
        machine = "cuda" if target == "cuda" else detect()
        result = tilewright.compile(model, inputs, target=machine, numerics=numerics)(*inputs)
        errors[numerics] = max(ours for ours, _ in errors_of(model, inputs, result))
    assert errors["fast"] < 1e-5 < errors["tf32"] < 2e-3


class _Prologues(nn.Module):
    """A norm by hand, a gate, weighted channels and an activation before a border: each before a product."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64))
        self.first, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.narrow, self.window = nn.Conv2d(64, 32, 1), nn.Conv2d(32, 48, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale).to(x.dtype)
        hidden = self.first(normal)
        image = self.down(nn.functional.silu(hidden) * (hidden + 1)).transpose(1, 2).reshape(-1, 64, 8, 8)
        weights = torch.sigmoid(image.mean((2, 3), keepdim=True))
        narrow = self.narrow(image * weights)
        return self.window(nn.functional.gelu(narrow) + narrow).mean((2, 3)) + narrow.amax((1, 2, 3))[:, None]


@pytest.mark.parametrize("target", ["cuda", "without libraries"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_stands_before_and_behind_products(target: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = _Prologues().cuda().to(dtype).eval()
    x = torch.randn(2, 64, 64, device="cuda", dtype=dtype)
    fast = tilewright.compile(model, (x,), target="cuda" if target == "cuda" else detect())
    assert_right(model, (x,), fast(x), 2e-3 if dtype is torch.float16 else 1e-2)


@pytest.mark.parametrize(("numerics", "size"), [("fast", 7), ("fast", 56), ("strict", 56)])
def test_a_product_and_the_mean_of_its_results_are_measured_as_one(
    numerics: str, size: int, tmp_path: Path
) -> None:
    """Whichever is faster: the same again without a measurement, and right both joined and apart."""
    torch.manual_seed(0)
    model, target = Pooled().half().eval(), CudaTarget(detect(), 0)
    partition = partitioned(model, size)
    tuning = Tuning("quick", budget=60.0, db=tmp_path / "tuning.db")
    found, ended = [], []
    for _ in range(2):
        trace = Trace()
        found.append(
            choose_implementations(Settings(target, numerics, tuning=tuning, trace=trace), [partition])
        )
        ended += [event.notes["why"] for event in trace.events if event.name == "tune.end"]
    first, second = ({key: choice.config for key, choice in each.choices.items()} for each in found)
    assert first == second and ended[0] != "known" == ended[1]
    with Database.open(tmp_path / "tuning.db") as database:
        joined = [
            r
            for r in database.records()
            if r.config.template in ("tensor-core-matmul-reduction", "fused-reduction")
        ]
    assert joined and {record.failure for record in joined} == {""}, [record.message for record in joined]
    x = torch.randn(4, 64, size, size).half().cuda()
    for keys in ((), tuple(alternatives([partition]))):
        cut = join_reductions(partition, keys)
        works = {key: Work(task, target.machine, numerics) for key, (task, _) in computed(cut).items()}
        choices = {key: choose(work) for key, work in works.items()}
        boundary = boundary_of(imported(model, size))
        linked, _ = build_plan(Settings(target, numerics), cut, choices, boundary)
        assert_right(model.cuda(), (x,), target.load(linked, linked.constants, None, _never)(x))
        model.cpu()


def _never(target: Any) -> Any:
    raise AssertionError("it is not saved")


class _Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (256, 512), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(x, self.weight.t()).float() * self.scale


@pytest.mark.parametrize("effort", ["none", "quick"])
def test_products_of_bytes_are_exact(effort: str, tmp_path: Path) -> None:
    model = _Quantised().cuda().eval()
    x = torch.randint(-128, 128, (64, 512), dtype=torch.int8, device="cuda")
    fast = tilewright.compile(model, (x,), effort=effort, db=tmp_path / "tuning.db")
    sums = x.cpu().long() @ model.weight.cpu().long().T
    assert torch.equal(fast(x).cpu(), sums.float() * model.scale.cpu())


def test_explain_times_and_checks_every_step() -> None:
    model, inputs = half_model("bert-tiny")
    explanation = tilewright.compile(model, inputs).explain(inputs, repeats=2)
    assert explanation.worst_error is not None
    assert explanation.worst_error < 5e-3
    assert all(row.seconds > 0 for row in explanation.rows)


class _Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.arange(32, device=x.device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_compile(dtype: torch.dtype) -> None:
    from tilewright.integrations.torch_compile import register

    register()
    model = _Dtypes().cuda().to(dtype).eval()
    x = torch.randn(16, 64, device="cuda", dtype=dtype)
    outcomes: list[Any] = []
    fast = torch.compile(model, backend="tilewright", options={"observe": outcomes.append})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", tilewright.errors.TilewrightWarning)
        result = fast(x)
    assert [outcome.kind for outcome in outcomes] == ["compiled"]
    assert_right(model, (x,), result, 1e-2)


def test_torch_compile_under_autocast() -> None:
    from tilewright.integrations.torch_compile import register

    register()
    model = _Dtypes().cuda().eval()
    x = torch.randn(16, 64, device="cuda")
    fast = torch.compile(model, backend="tilewright", options={"fallback": False})
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        result, expected = fast(x), model(x)
    assert result.dtype is expected.dtype
    assert float((result - expected).abs().max()) < 5e-2


def test_tensors_elsewhere_are_refused() -> None:
    model, (x,) = half_model("resnet18")
    fast = tilewright.compile(model, (x,))
    with pytest.raises(InputError, match=r"compiled for cuda:0, got a tensor on cpu"):
        fast(x.cpu())
    with pytest.raises(MixedDevicesError, match="cpu and cuda:0"):
        tilewright.compile(model, (x.cpu(),))


def test_a_model_of_the_cpu_for_the_gpu() -> None:
    model, (x,) = half_model("resnet18")
    fast = tilewright.compile(copy.deepcopy(model).cpu(), (x.cpu(),), target="cuda")
    assert_right(model, (x,), fast(x))


def test_the_libraries_are_there() -> None:
    target = CudaTarget.of_card(0)
    assert isinstance(target, CudaTarget)
    assert set(target.machine.libraries) == {"cublaslt", "torch"}

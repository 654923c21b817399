"""Models for a GPU that is only described: planned and compiled without one, refused with a clear word at the call."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tests.space.implementations import WITH_LIBRARIES, kernels_of
from tilewright import frontend
from tilewright.codegen.cuda.emit import beginning
from tilewright.driver import compile_imported
from tilewright.errors import (
    ArtifactMachineError,
    DeviceError,
    LockError,
    MissingDependencyError,
    MixedDevicesError,
    OptionError,
    TargetError,
)
from tilewright.hw.gpu import A10, A100, H200, of_capability
from tilewright.measure.check import kernel_error
from tilewright.runtime.cuda import device
from tilewright.runtime.cuda.executor import AWAITS_TURN, misfit
from tilewright.runtime.plan import Launch, MatrixMap, VendorCall, View
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.resolve import resolve_target
from tilewright.tune.choose import choose

without_a_gpu = pytest.mark.skipif(device.count() > 0, reason="there is a GPU here")


class Attends(nn.Module):
    """Queries, keys and values of one input, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], 2, 32)
        heads = [layer(x).view(split).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        return nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)


class Small(nn.Module):
    """One of each kind of Tilewright's kernels, and a GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.norm, self.last = (
            nn.Conv2d(16, 16, 3, 1, 1, groups=16),
            nn.LayerNorm(64),
            nn.Linear(64, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.window(x)).flatten(2)))


def small() -> Any:
    return frontend.import_model(Small().half().eval(), (torch.randn(2, 16, 8, 8).half(),))


def attends(batch: int = 2, length: int = 16) -> Any:
    return frontend.import_model(Attends().half().eval(), (torch.randn(batch, length, 64).half(),))


def test_kernels_of_few_blocks_may_be_started_early_where_a_card_can() -> None:
    assert beginning(128) and not beginning(100_000)
    new, old = (compile_imported(small(), machine).plan for machine in (H200, A100))
    assert new.target["features"] == [AWAITS_TURN] and not old.target["features"]
    assert all(step.launch is not None and step.launch.awaits for step in new.steps)


def test_a_model_compiles_for_a_described_gpu() -> None:
    """`python -m tests.targets.described` does this with the whole zoo."""
    model = compile_imported(small(), H200)
    assert model.plan.target["cpu"] == "sm_90a"
    assert not any(step.vendor for step in model.plan.steps)
    assert all(step.launch is not None for step in model.plan.steps)
    assert all(model.executor.objects.values())


def test_no_chosen_kernel_spills() -> None:
    partition = CudaTarget(A100).partition(small(), "fast", Trace.off())
    for task, _ in partition.tasks().values():
        kernels = kernels_of(choose(Work(task, A100)).implementation, A100)
        assert kernels and not any(kernel.resources.spilled_bytes for kernel in kernels)


def test_libraries_are_steps_between_kernels() -> None:
    target = CudaTarget(WITH_LIBRARIES)
    model = compile_imported(attends(64, 512), target)
    functions = {step.vendor.function for step in model.plan.steps if step.vendor}
    # Attention with heads this small is predicted to take about as long by the template as by the library.
    assert "product" in functions <= {"product", "attention"}
    assert "attention" in {info.label for info in model.plan.tasks.values()}
    model.plan.validate()


class Heads(nn.Module):
    """Attention over heads of this width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 2 * width) for _ in range(3))
        self.last, self.width = nn.Linear(2 * width, 64), width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], 2, self.width)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.last(found.transpose(1, 2).reshape(*x.shape[:2], -1))


class KeysInColumns(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k.transpose(2, 3), v)


def tasks_of(model: nn.Module, *inputs: torch.Tensor, trace: Trace | None = None) -> list[str]:
    """The labels of the tasks for a GPU without libraries, each of which has a kernel."""
    imported = frontend.import_model(model.to(inputs[0].dtype).eval(), inputs)
    partition = CudaTarget(H200).partition(imported, "fast", trace or Trace.off())
    assert all(choose(Work(task, H200)) for task, _ in partition.tasks().values())
    return [task.label for task, _ in partition.tasks().values()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rewrites_run_once_whether_attention_has_a_kernel_or_not(dtype: torch.dtype) -> None:
    """Without libraries, there is none for float32."""
    trace = Trace()
    labels = tasks_of(Attends(), torch.randn(2, 16, 64, dtype=dtype), trace=trace)
    assert sum(event.name == "rewrites" for event in trace.events) == 1
    assert ("attention" in " ".join(labels)) == (dtype is torch.float16)


def test_an_attention_without_a_kernel_leaves_the_others_whole() -> None:
    labels = tasks_of(nn.Sequential(Heads(32), Heads(256)), torch.randn(2, 48, 64, dtype=torch.float16))
    assert sum("attention" in label for label in labels) == 1
    assert any("softmax" in label for label in labels)


def test_movement_that_no_attention_kernel_takes_is_a_kernel_of_its_own() -> None:
    q, v = (torch.randn(2, 3, 48, 32, dtype=torch.float16) for _ in range(2))
    labels = tasks_of(KeysInColumns(), q, q.transpose(2, 3).contiguous(), v)
    assert sorted(labels) == ["attention", "permute"]


def test_saved_and_refused_without_a_gpu(tmp_path: Path) -> None:
    model = compile_imported(small(), CudaTarget(WITH_LIBRARIES))
    model.save(tmp_path / "model.tw")  # planned again, without libraries
    if device.count():
        return
    with pytest.raises(
        ArtifactMachineError, match=r"for an NVIDIA GPU, and there is none here(?s:.*)nvidia-smi"
    ):
        tilewright.load(tmp_path / "model.tw")
    with pytest.raises(ArtifactMachineError, match="there is none here"):
        model(np.zeros((2, 16, 8, 8), np.float16))


@without_a_gpu
def test_a_file_is_refused_with_the_same_word_where_there_is_no_torch(tmp_path: Path) -> None:
    compile_imported(small(), H200).save(tmp_path / "model.tw")
    code = "import sys; sys.modules['torch'] = None; import tilewright; tilewright.load(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.tw")], check=False, capture_output=True, text=True
    )
    assert "ArtifactMachineError" in done.stderr and "there is none here" in done.stderr


# -- which target -----------------------------------------------------------------------------------------------------


@without_a_gpu
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match=r"this process cannot use a GPU(?s:.*)nvidia-smi"):
        tilewright.compile(nn.ReLU().eval(), (torch.zeros(2),), target="cuda")


def test_the_drivers_bindings_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    device._driver.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match=r"the driver's bindings(?s:.*)tilewright\[cuda\]"):
            device.Device()
        assert device.count() == 0
    finally:
        device._driver.cache_clear()


def test_unknown_targets() -> None:
    with pytest.raises(TargetError, match=r"must be one of 'cpu', 'cuda'.*got 'tpu'"):
        resolve_target("tpu")
    with pytest.raises(TargetError, match="got 'cuda:x'"):
        resolve_target("cuda:x")


def test_tensors_on_several_devices() -> None:
    model, x = nn.Linear(2, 2), torch.zeros(2, device="meta")
    with pytest.raises(MixedDevicesError, match=r"cpu and meta:0(?s:.*)to one device"):
        resolve_target(None, model, (x,))


def test_a_lock_file_gives_the_same_kernels_or_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    first = compile_imported(small(), H200, lock=path)
    again = compile_imported(small(), H200, lock=path)
    assert again.plan.steps == first.plan.steps and again.executor.objects == first.executor.objects
    assert {info.origin.kind for info in again.plan.tasks.values()} == {"lock"}
    assert {info.origin.kind for info in first.plan.tasks.values()} <= {"predicted", "default"}
    with pytest.raises(
        LockError, match="another kernel here: the machine, the compiler behind it or this version differ"
    ):
        compile_imported(small(), A100, lock=path)
    with pytest.raises(LockError, match="the lock has no such task"):
        compile_imported(attends(), H200, lock=path)


def test_a_card_too_old_is_refused_and_a_newer_one_does_what_its_elders_do() -> None:
    with pytest.raises(
        TargetError, match=r"Tesla V100 has the compute capability 7\.0, .* for 8\.0 and later"
    ) as old:
        of_capability("Tesla V100", 7, 0)
    assert "Ampere" in str(old.value)
    assert of_capability("H100", 9, 0) == H200
    newer = of_capability("B200", 10, 0)
    assert newer.capability == "sm_100" and newer.clusters and not newer.warpgroup_mma
    assert of_capability("Orin", 8, 7).shared_block == A10.shared_block


def test_a_file_has_machine_code_for_one_card_and_ptx_for_the_others(tmp_path: Path) -> None:
    path = tmp_path / "model.tw"
    compile_imported(small(), H200).save(path)
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        codes = [
            {archive.read(name)[:4] for name in variant["objects"].values()}
            for variant in manifest["variants"]
        ]
    assert [variant["plan"]["target"]["cpu"] for variant in manifest["variants"]] == ["sm_90a", "compute_80"]
    assert codes[0] == {b"\x7fELF"} and b"\x7fELF" not in codes[1]


def test_where_machine_code_and_ptx_run() -> None:
    assert (
        not misfit("sm_90a", "sm_90") and not misfit("sm_80", "sm_86") and not misfit("compute_80", "sm_120")
    )
    assert misfit("sm_90a", "sm_100") == "the machine code is for sm_90a"
    assert misfit("sm_86", "sm_80") == "the machine code is for sm_86"
    assert misfit("compute_80", "sm_75") == "the PTX is for sm_80 and later"


def test_float32_is_treated_as_pytorch_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CudaTarget(H200).default_numerics() == "fast"
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert CudaTarget(H200).default_numerics() == "tf32"
        monkeypatch.setenv("TILEWRIGHT_NUMERICS", "strict")
        assert CudaTarget(H200).default_numerics() == "strict"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_a_described_gpu_cannot_be_measured() -> None:
    with pytest.raises(OptionError, match="measures on this machine"):
        tilewright.compile(nn.ReLU().eval(), (torch.zeros(2),), target=H200, effort="quick")


# -- plans that cannot be run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"launch": Launch(2048)}, "the launch"),
        ({"launch": Launch(128, maps=(MatrixMap(9, 8, 8, 8, 8, 8),))}, "a tensor map of argument 9"),
        ({"launch": Launch(128, maps=(MatrixMap(0, 1 << 20, 8, 8, 8, 8),))}, "in an argument of"),
        ({"launch": Launch(128, maps=(MatrixMap(0, 1, 16, 8, 8, 8),))}, "in an argument of"),
        ({"vendor": VendorCall("product", (View(7, (2,), (1,)),), (2,))}, "a view of argument 7"),
        ({"vendor": VendorCall("product", (View(0, (1 << 30,), (1,)),), (2,))}, "beyond the end"),
        ({"vendor": VendorCall("product", (View(0, (2,), (-1,)),), (2,))}, "the view"),
        ({"vendor": VendorCall("product", (View(0, (2,), (1,)),), (3,))}, "a result of"),
    ],
)
def test_a_broken_step_is_named(change: dict[str, Any], message: str) -> None:
    import msgspec

    plan = compile_imported(small(), CudaTarget(WITH_LIBRARIES)).plan
    number = next(n for n, step in enumerate(plan.steps) if step.launch is not None)
    step = msgspec.structs.replace(plan.steps[number], **change)
    broken = msgspec.structs.replace(plan, steps=(*plan.steps[:number], step, *plan.steps[number + 1 :]))
    with pytest.raises(tilewright.errors.VerificationError, match=message):
        broken.validate()


def test_what_explain_compares_with_is_the_pieces_own_task() -> None:
    """A packed weight is unpacked again, one that was filled up with zeros too."""
    target = CudaTarget(WITH_LIBRARIES)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).half().eval()
    compiled = compile_imported(frontend.import_model(model, (torch.randn(1, 3, 8, 8).half(),)), target)
    rng = np.random.default_rng(0)
    for step in compiled.plan.steps:
        info = compiled.plan.tasks[step.task]
        arrays = [rng.standard_normal(spec.shape).astype(np.float16) for spec in info.inputs]
        assert np.isfinite(kernel_error(info, arrays, np.ones(info.output.shape, np.float16)))

"""Machine code from the cache is that of the text at hand, whatever led to the text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.loops.formulas import EXAMPLES
from tests.loops.gpu.products import PRODUCTS
from tests.nvrtc import needs_nvrtc
from tests.space.checked import Inputs
from tests.space.sketches.cuda.tasks import product_task
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda import generator
from tilewright.codegen.cuda.build import GpuSource, build, identity, source_of
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.errors import PipelineError
from tilewright.graph.op import apply
from tilewright.hw.gpu import A100, H200
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu.default import default_program
from tilewright.loops.gpu.tensor import TensorGemm
from tilewright.loops.ir import Program
from tilewright.measure.building import Build, BuildServer, Made
from tilewright.measure.failed import Failed
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.sketches.cuda import SKETCHES
from tilewright.space.space import Config
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.matmul import TensorCores

needs_nvrtc()


def of_a_loop() -> GpuSource:
    output, inputs = next(example for example in EXAMPLES if example.name == "softmax_last").make()
    return source_of(default_program(formula_of(output, inputs), H200))


def of_a_template() -> GpuSource:
    x = Inputs()
    task = x.task(apply("matmul", x(64, 64, dtype=DType.F16), x(64, 64, dtype=DType.F16)))
    applied = TensorCores().apply(GpuWork(task, H200))
    assert applied is not None
    made = applied.program(next(iter(applied.space.configs())))
    assert isinstance(made, TensorGemm)
    return tensor_source(made)


@pytest.mark.parametrize("made", [of_a_loop, of_a_template])
def test_all_that_is_compiled_is_in_the_text(made: Callable[[], GpuSource]) -> None:
    source = made()
    assert "#include" not in source.text
    key, symbol = identity(source, H200, "fast")
    assert symbol.endswith(key)
    other = replace(source, text=source.text.replace("void", "void "))
    for another in (
        identity(other, H200, "fast"),
        identity(source, A100, "fast"),
        identity(source, H200, "strict"),
    ):
        assert another != (key, symbol)


def test_another_text_is_compiled_anew(tmp_path: Path) -> None:
    cache, source = ObjectCache(tmp_path, 1 << 24), of_a_loop()
    first = build(source, H200, "fast", cache)
    assert not first.cached and build(source, H200, "fast", cache).cached
    other = replace(source, text=source.text.replace("0.0f", "1.0f"))
    assert other.text != source.text
    second = build(other, H200, "fast", cache)
    assert not second.cached and second.cubin != first.cubin


def tiled(**knobs: Any) -> tuple[GpuWork, Config]:
    """A matmul by 32 x 32 threads, with 64 registers each."""
    work = GpuWork(product_task(replace(PRODUCTS[1], dtype=DType.F32)), H200)
    (sketch,) = (each for each in SKETCHES if each.name == "sketch:tiled")
    applied = sketch.apply(work)
    assert applied is not None
    patches = {"tm": 32, "tn": 32, "vm": 1, "vn": 2, "rm": 4, "rn": 4, "bk": 8}
    return work, Config.of(sketch.name, {**dict(applied.space.default().values), **patches, **knobs})


@pytest.mark.parametrize(
    ("knobs", "spills"), [({"stages": 2, "prefetch": True}, True), ({"stages": 1}, False)]
)
def test_a_pipeline_that_spills_is_no_candidate(
    knobs: dict[str, Any], spills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain loop does not spill: the config is refused with the reason. Legal configs keep away from it."""
    work, config = tiled(**{"prefetch": False, "fused": True, **knobs})
    monkeypatch.setattr(Candidates, "is_legal", lambda self, config: True)
    reply = BuildServer().answer(Build(TaskJob.of(work, 0), config), [])
    if not spills:
        assert isinstance(reply, Made)
        return
    assert isinstance(reply, Failed) and reply.kind == "illegal"
    assert re.search(
        r"pipelined, it spills \d+ bytes of each thread's registers; without a pipeline", reply.message
    )


@pytest.mark.parametrize(("threads", "spills"), [(16, False), (32, True)])
def test_the_plain_loop_is_built_only_where_the_pipeline_spills(
    threads: int, spills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, config = tiled(tm=threads, tn=threads, stages=2, prefetch=True, fused=True)
    applied = next(each for each in SKETCHES if each.name == "sketch:tiled").apply(work)
    assert applied is not None
    program = applied.program(config)
    texts = []

    def counted(source: GpuSource, *options: Any) -> Any:
        texts.append(source.text)
        return build(source, *options)

    monkeypatch.setattr(generator, "build_kernel", counted)
    with pytest.raises(PipelineError) if spills else contextlib.nullcontext():
        generator.check_trial(program, H200, "fast", None)
    assert len(texts) == (2 if spills else 1)
    assert isinstance(program, Program) and texts[0] == tensor_source(program).text

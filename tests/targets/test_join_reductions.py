"""A GEMM or convolution and the reduction behind it as one task: joined where that is predicted to be faster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tests.space.implementations import WITH_LIBRARIES
from tests.targets.pooled import Groups, Head, Highest, Pooled, imported, partitioned
from tilewright.driver import choose_together
from tilewright.errors import OptionError
from tilewright.graph.ir import Graph, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Partition, Task
from tilewright.hw.gpu import H200, GpuMachine
from tilewright.rewrites.join_reductions import alternatives
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.options import Settings
from tilewright.targets.stages import Chosen, choose_implementations
from tilewright.tune import tuner
from tilewright.tune.allocate import Objective
from tilewright.tune.choose import Choice, choose
from tilewright.tune.effort import Tuning
from tilewright.tune.tunable import TunableTask

JOINED = ("tensor-core-matmul-reduction", "fused-reduction")


def chosen(
    model: nn.Module, size: int = 7, machine: GpuMachine = H200, lock: Path | None = None
) -> tuple[Partition, Chosen]:
    """The partition as fusion has left it, and what is chosen for it."""
    partition = partitioned(model, size)
    found = choose_implementations(Settings(CudaTarget(machine), lock=lock), [partition])
    return partition, found


def labels_of(found: Chosen) -> list[str]:
    return [call.task.label for call in found.partitions[0].calls]


def templates_of(found: Chosen) -> list[str]:
    return [found.choices[call.task.key].config.template for call in found.partitions[0].calls]


def test_of_two_reductions_a_product_takes_the_first() -> None:
    labels = labels_of(chosen(Highest())[1])
    assert [label.rpartition("+")[2] for label in labels][-2:] == ["mean", "amax"]
    assert "conv" in labels[-2]


def test_groups_of_columns_with_more_behind_stay_apart() -> None:
    assert labels_of(chosen(Groups())[1])[-1] == "amax+tanh"


@pytest.mark.parametrize(
    ("size", "template", "kernels"), [(7, "tensor-core-matmul-reduction", 1), (56, "fused-reduction", 2)]
)
def test_a_mean_joins_the_convolution_before_it(size: int, template: str, kernels: int) -> None:
    """One kernel where a tile has all of an image, else two."""
    partition, found = chosen(Head(), size)
    assert templates_of(found).count(template) == 1
    (key,) = (key for key, choice in found.choices.items() if choice.config.template == template)
    assert len(found.choices[key].implementation.parts) == kernels
    assert len(found.partitions[0].calls) == len(partition.calls) - 1


def test_a_long_mean_is_joined_though_by_itself_it_would_be_cut() -> None:
    """Of 65,536 pixels, which two kernels of their own would combine."""
    partition = partitioned(Head(), 256)
    (pair,) = alternatives([partition]).values()
    assert choose(Work(pair.separate[1], H200)).config.template == "two-pass-reduction"
    found = choose_implementations(Settings(CudaTarget(H200)), [partition])
    assert "fused-reduction" in templates_of(found)
    assert pair.separate[1].key not in {call.task.key for call in found.partitions[0].calls}


def test_joined_or_apart_is_a_comparison_of_predicted_times() -> None:
    """With tensor cores a million times slower it does not matter that one kernel less is started, and a library's
    call alongside a second kernel is joined only if the template is predicted to be faster than both."""
    for machine in (H200, WITH_LIBRARIES, replace(H200, tensor_flops_clock=H200.tensor_flops_clock / 1e6)):
        partition = partitioned(Head(), 56)
        target = CudaTarget(machine)
        found = choose_implementations(Settings(target), [partition])
        joined = any(template in JOINED for template in templates_of(found))
        assert joined == (len(found.partitions[0].calls) < len(partition.calls))
    assert not joined


@pytest.mark.parametrize("size", [7, 56])
def test_what_is_joined_is_in_the_lock(size: int, tmp_path: Path) -> None:
    """And what the lock does not join stays apart, whatever is predicted."""
    path = tmp_path / "lock.json"
    partition, first = chosen(Head(), size, lock=path)
    target = CudaTarget(H200)
    again = choose_implementations(Settings(target, lock=path), [partition])
    configs = {key: choice.config for key, choice in first.choices.items()}
    assert {key: choice.config for key, choice in again.choices.items()} == configs
    assert labels_of(again) == labels_of(first) and any(t in JOINED for t in templates_of(again))

    other = tmp_path / "apart.json"
    slow = replace(H200, tensor_flops_clock=H200.tensor_flops_clock / 1e6)
    choose_implementations(Settings(CudaTarget(slow), lock=other), [partition])
    locked = json.loads(other.read_text())
    assert not any(task["template"] in JOINED for task in locked["tasks"].values())


def test_a_product_that_is_read_beside_its_mean_is_not_joined_with_it() -> None:
    partition = partitioned(Pooled())
    assert alternatives([partition])
    *others, product, mean = partition.calls
    flat = apply("reshape", product.output, shape=(product.output.type.size,))
    body = mean.task.graph
    alternative_tasks = input_node(len(body.inputs), flat.type)
    first = apply("slice", alternative_tasks, starts=(0,), stops=(1,), steps=(1,))
    output = apply("add", body.outputs[0], first)
    call = replace(
        mean, task=Task(Graph((*body.inputs, alternative_tasks), (output,))), inputs=(*mean.inputs, flat)
    )
    views = {**partition.views, flat: partition.buffer_of(product.output)}
    both = Partition(partition.graph, (*others, product, call), views)
    both.check()
    assert not alternatives([both])


def test_the_mean_behind_a_convolution_keeps_its_layout() -> None:
    """A permute and the mean as one kernel read along what is not contiguous: longer than the mean as the convolution
    has left its operand, which can then be joined with it."""
    partition = CudaTarget(H200).partition(imported(Head(), 56), "fast", Trace.off())
    assert "mean" in [call.task.label for call in partition.calls]
    found = choose_implementations(Settings(CudaTarget(H200)), [partition])
    assert any(template in JOINED for template in templates_of(found))


def objective_of(
    partitions: list[Partition], monkeypatch: pytest.MonkeyPatch, **options: object
) -> Objective:
    """The objective that tuning these models minimises."""
    asked: list[Objective] = []

    def tune(
        tunables: Mapping[str, tuple[TunableTask, int]], *_: object, objective: Objective, **__: object
    ) -> dict[str, Choice]:
        asked.append(objective)
        return {key: tunable.start for key, (tunable, _) in tunables.items()}

    monkeypatch.setattr(tuner, "tune", tune)
    settings = Settings(CudaTarget(H200), tuning=Tuning("quick"))
    choose_together(settings, partitions, "sum", [None] * len(partitions), **options)  # type: ignore[arg-type]
    return asked[0]


def test_of_several_models_each_counts_its_own_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    with_pair, another = partitioned(Head()), partitioned(Head(), 56)
    (key,), (other,) = alternatives([with_pair]), alternatives([another])
    without = partitioned(nn.Tanh())
    goals = objective_of([with_pair, another, without, with_pair], monkeypatch).goals
    assert [dict(goal.alternative_tasks) for goal in goals] == [{key: 1}, {other: 1}, {}, {key: 1}]


def test_a_joined_task_has_a_target_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the label that `explain` shows."""
    partition = partitioned(Head())
    joined = labels_of(choose_implementations(Settings(CudaTarget(H200)), [partition]))
    (pair,) = alternatives([partition]).values()
    assert pair.joined.label in joined
    times = {pair.joined.label: "3us", pair.separate[1].label: "2us"}
    found = objective_of([partition], monkeypatch, task_latency=times)
    assert found.enough == {pair.joined.key: pytest.approx(3e-6), pair.separate[1].key: pytest.approx(2e-6)}
    with pytest.raises(OptionError, match="unknown task 'nowhere'"):
        objective_of([partition], monkeypatch, task_latency={"nowhere": 1.0})

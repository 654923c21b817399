"""A GEMM or convolution and the reduction behind it as one task: joined where that is predicted to be faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tests.space.implementations import WITH_LIBRARIES
from tests.targets.pooled import Groups, Head, Highest, Pooled, imported, partitioned
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
from tilewright.tune.choose import choose

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

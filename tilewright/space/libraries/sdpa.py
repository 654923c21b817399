"""The framework's scaled dot-product attention, on strided views of the task's inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.graph.attention import attention_in
from tilewright.graph.ir import Graph, Node
from tilewright.runtime.plan import VendorCall, View
from tilewright.space.implementation import Implementation, cut
from tilewright.space.libraries.call import FLOATS, computed, is_for_library, unit_of
from tilewright.space.libraries.strides import Strided, strided
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied, GpuWork
from tilewright.space.terms import Counted, Roofline

NAME = "sdpa"
_FRAMEWORK = "torch"
_QUERIES = 128  # per block
_LAUNCHES = 2  # in units of a launch: it starts in 7.8 us for 12 heads of 197 queries on an H200
_REACHED = 0.6  # share of a large GEMM's speed: exponentials alternate with the products
_MASKED = 0.5  # the same with a mask, which uses another kernel: 35.6 us for 12 heads of 512 queries


class Sdpa:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        if _FRAMEWORK not in work.machine.libraries or not is_for_library(work.task):
            return None
        graph = work.task.graph
        node = attention_in(graph)
        if node is None or node.dtype not in FLOATS or node.type.rank < 3:
            return None
        if node.attrs["causal"] and len(node.inputs) > 3:
            return None
        operands = [strided(operand) for operand in node.inputs]
        views = [each for each in operands if each is not None and each.source.is_input]
        if len(views) < len(operands) or any(len(each.shape) != node.type.rank for each in views[:3]):
            return None
        order = _result_order(graph, node)
        return None if order is None else AppliedSdpa(work, node, views, order)


@dataclass(frozen=True)
class AppliedSdpa:
    work: GpuWork
    node: Node
    operands: list[Strided]
    order: tuple[int, ...]

    @property
    def space(self) -> Space:
        return Space(NAME, (), lambda values: True)

    def terms(self, config: Config) -> Counted:
        heads, queries = math.prod(self.node.shape[:-2]), self.node.shape[-2]
        blocks = heads * math.ceil(queries / _QUERIES)
        busy = blocks / (math.ceil(blocks / self.work.machine.sms) * self.work.machine.sms)
        task = self.work.task
        unit = unit_of(self.node, self.work.numerics)
        reached = _REACHED * (_MASKED if len(self.node.inputs) > 3 else 1.0)
        return Roofline(task.flops, task.bytes, unit, reached * busy, is_call=True, launches=_LAUNCHES)

    def program(self, config: Config) -> Implementation:
        graph, task, node = self.work.task.graph, self.work.task, self.node
        constants = [graph.inputs[number] for number in task.constants]
        (subtask,) = cut(graph, constants, [(computed(graph), graph.outputs[0])])
        views = tuple(
            View(subtask.operands.index(each.source), each.shape, each.strides, each.offset)
            for each in self.operands
        )
        options = {"causal": bool(node.attrs["causal"]), "scale": float(node.attrs["scale"])}
        call = VendorCall("attention", views, result=node.shape, order=self.order, options=options)
        return Implementation(graph.inputs, (subtask.by(call),))


def _result_order(graph: Graph, attention: Node) -> tuple[int, ...] | None:
    """The storage order of the result's axes, if one permute and reshapes follow it."""
    chain: list[Node] = []
    node = graph.outputs[0]
    while node is not attention:
        chain.append(node)
        node = node.inputs[0]
    permutes = [each for each in reversed(chain) if each.op == "permute"]
    if not permutes:
        return ()
    first = permutes[0]
    if len(permutes) > 1 or first.inputs[0] is not attention:
        return None
    return tuple(first.attrs["axes"])

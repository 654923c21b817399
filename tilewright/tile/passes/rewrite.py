"""Copies a program node by node, so that a pass only says what becomes of a node. What is not changed is not copied."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tilewright.tile.ir import Block, For, If, Node, Op, TileProgram, Value, While


class Rewriter:
    """A pass overrides `op`, or `loop` and `branch`; `self.same` maps a removed value to its replacement."""

    def __init__(self) -> None:
        self.same: dict[Value, Value] = {}

    def value(self, value: Value) -> Value:
        while value in self.same:
            value = self.same[value]
        return value

    def values(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        found = tuple(self.value(each) for each in values)
        return values if found == values else found

    def program(self, program: TileProgram) -> TileProgram:
        body = self.block(program.body)
        return program if body is program.body else replace(program, body=body)

    def block(self, block: Block) -> Block:
        nodes = [made for node in block.nodes for made in self.node(node)]
        return self.made(block, nodes)

    def made(self, block: Block, nodes: list[Node]) -> Block:
        """A block of these nodes."""
        yields = self.values(block.yields)
        same = len(nodes) == len(block.nodes) and all(a is b for a, b in zip(nodes, block.nodes, strict=True))
        return block if same and yields is block.yields else replace(block, nodes=tuple(nodes), yields=yields)

    def node(self, node: Node) -> Iterable[Node]:
        """The replacement of a node, whose operands are replaced first."""
        if isinstance(node, Op):
            operands = self.values(node.operands)
            return self.op(node if operands is node.operands else replace(node, operands=operands))
        if isinstance(node, If):
            return self.branch(node)
        return self.loop(node)

    def op(self, op: Op) -> Iterable[Node]:
        return (op,)

    def loop(self, node: For | While) -> Iterable[Node]:
        if isinstance(node, For):
            lower, upper, step = self.values((node.lower, node.upper, node.step))
            init, body = self.values(node.init), self.block(node.body)
            if (
                (lower, upper, step) == (node.lower, node.upper, node.step)
                and init is node.init
                and body is node.body
            ):
                return (node,)
            return (replace(node, lower=lower, upper=upper, step=step, init=init, body=body),)
        init, condition, body = self.values(node.init), self.block(node.condition), self.block(node.body)
        if init is node.init and condition is node.condition and body is node.body:
            return (node,)
        return (replace(node, init=init, condition=condition, body=body),)

    def branch(self, node: If) -> Iterable[Node]:
        condition = self.value(node.condition)
        then, other = self.block(node.then), self.block(node.other)
        if condition is node.condition and then is node.then and other is node.other:
            return (node,)
        return (replace(node, condition=condition, then=then, other=other),)

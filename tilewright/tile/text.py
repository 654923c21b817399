"""Tile programs as text, for people and for fingerprints: equal text means equal programs, up to source lines."""

from __future__ import annotations

from typing import Any

from tilewright.dtypes import DType
from tilewright.tile.ir import Block, BlockPointerType, For, If, Node, Op, TileProgram, Value, While


def print_tile_program(program: TileProgram) -> str:
    return _Printer(program).text()


class _Printer:
    def __init__(self, program: TileProgram) -> None:
        self.program = program
        self.names: dict[Value, str] = {}
        self.given = dict(program.names)
        self.used: set[str] = set()
        self.lines: list[str] = []

    def text(self) -> str:
        params = ", ".join(f"{self.define(param)}: {param.type}" for param in self.program.params)
        constants = "".join(f"{name}={value!r}, " for name, value in self.program.constants).rstrip(", ")
        head = f"kernel {self.program.name}({params})"
        self.lines.append(f"{head} with {constants}:" if constants else f"{head}:")
        self.block(self.program.body, 1, yields=False)
        return "\n".join(self.lines) + "\n"

    def define(self, value: Value) -> str:
        """A unique name: the user's, with a number from the second value of that name on."""
        base = value.name or self.given.get(value, "v")
        name, count = f"%{base}", 1
        while name in self.used:
            count += 1
            name = f"%{base}.{count}"
        self.used.add(name)
        self.names[value] = name
        return name

    def use(self, *values: Value) -> str:
        return ", ".join(self.names.get(value, "%undefined") for value in values)

    def carried(self, params: tuple[Value, ...], init: tuple[Value, ...]) -> str:
        pairs = [
            f"{self.define(param)} = {self.use(first)}" for param, first in zip(params, init, strict=False)
        ]
        return f" carrying {', '.join(pairs)}" if pairs else ""

    def block(self, block: Block, depth: int, *, yields: bool = True) -> None:
        for node in block.nodes:
            self.node(node, depth)
        if yields and block.yields:
            self.lines.append(f"{'  ' * depth}yield {self.use(*block.yields)}")

    def node(self, node: Node, depth: int) -> None:
        pad = "  " * depth
        if isinstance(node, Op):
            operands = [f" {self.use(*node.operands)}"] if node.operands else []
            attrs = [f"{name}={_attr(value)}" for name, value in node.attrs]
            settings = [f" {{{', '.join(attrs)}}}"] if attrs else []
            body = "".join([node.name, *operands, *settings])
            if not node.results:
                self.lines.append(f"{pad}{body}")
                return
            types = ", ".join(str(result.type) for result in node.results)
            left = ", ".join(map(self.define, node.results))
            self.lines.append(f"{pad}{left} = {body} : {types}")
        elif isinstance(node, For):
            bounds = self.use(node.lower, node.upper, node.step)
            index, *params = node.body.params
            head = f"for {self.define(index)} in range({bounds})"
            self.lines.append(f"{pad}{head}{self.carried(tuple(params), node.init)}:")
            self.block(node.body, depth + 1)
            self.results(node, pad)
        elif isinstance(node, While):
            head = self.carried(node.condition.params, node.init)
            self.lines.append(f"{pad}while{head}:")
            self.block(node.condition, depth + 1)
            self.lines.append(f"{pad}do{self.carried(node.body.params, node.condition.params)}:")
            self.block(node.body, depth + 1)
            self.results(node, pad)
        else:
            self.lines.append(f"{pad}if {self.use(node.condition)}:")
            self.block(node.then, depth + 1)
            if node.other.nodes or node.other.yields:
                self.lines.append(f"{pad}else:")
                self.block(node.other, depth + 1)
            self.results(node, pad)

    def results(self, node: For | While | If, pad: str) -> None:
        if node.results:
            left = ", ".join(f"{self.define(result)}: {result.type}" for result in node.results)
            self.lines.append(f"{pad}giving {left}")


def _attr(value: Any) -> str:
    if isinstance(value, DType):
        return value.short
    return str(value) if isinstance(value, BlockPointerType) else repr(value)

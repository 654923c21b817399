"""Checks that a tile program is legal: see the heads of `ir.py` and of the package."""

from __future__ import annotations

from tilewright.errors import KernelError, VerificationError
from tilewright.tile.ir import (
    Block,
    BlockPointerType,
    For,
    If,
    Node,
    Op,
    TileProgram,
    TileType,
    Type,
    Value,
    While,
    operands_of,
)
from tilewright.tile.op import BOOL, check_shape
from tilewright.tile.ops import OPS


def verify_tile_program(program: TileProgram) -> None:
    """Raises VerificationError, naming the node and the user's line, if the program breaks a rule."""
    _Verifier(program).check()


class _Verifier:
    def __init__(self, program: TileProgram) -> None:
        self.program = program
        self.defined: set[Value] = set()  # anywhere: a value has one definition
        self.node: Node | None = None

    def fail(self, what: str) -> None:
        node = self.node
        location = (
            "" if node is None else f", {node.name if isinstance(node, Op) else type(node).__name__.lower()}"
        )
        line = f" ({node.where.short})" if node is not None and node.where is not None else ""
        raise VerificationError(f"tile program {self.program.name}{location}{line}: {what}")

    def check(self) -> None:
        names = [param.name for param in self.program.params]
        if len(set(names)) != len(names):
            self.fail("two parameters have one name")
        if self.program.body.params or self.program.body.yields:
            self.fail("the body takes parameters or yields values")
        scope = self.define(self.program.params, set())
        self.block(self.program.body, scope)

    def define(self, values: tuple[Value, ...], scope: set[Value]) -> set[Value]:
        for value in values:
            if value in self.defined:
                self.fail(f"value {value.name or 'v'}: {value.type} is defined twice")
            self.type(value.type)
            self.defined.add(value)
        return scope | set(values)

    def type(self, type: Type) -> None:
        try:
            check_shape(type.block if isinstance(type, BlockPointerType) else type.shape)
        except KernelError as error:
            self.fail(error.problem)

    def use(self, values: tuple[Value, ...], scope: set[Value]) -> None:
        for value in values:
            if value not in scope:
                self.fail(f"uses value {value.name or 'v'}: {value.type}, which is not defined there")

    def block(self, block: Block, scope: set[Value]) -> None:
        scope = self.define(block.params, scope)
        for node in block.nodes:
            self.node = node
            self.use(operands_of(node), scope)
            if isinstance(node, Op):
                self.op(node)
            elif isinstance(node, For):
                self.for_loop(node, scope)
            elif isinstance(node, While):
                self.while_loop(node, scope)
            else:
                self.branch(node, scope)
            self.node = node
            scope = self.define(node.results, scope)
        self.use(block.yields, scope)

    def op(self, op: Op) -> None:
        if op.name not in OPS:
            self.fail(f"the operation {op.name} is not known")
        definition = OPS[op.name]
        least = sum(not name.endswith(("?", "*")) for name in definition.operands)
        several = any(name.endswith("*") for name in definition.operands)
        if len(op.operands) < least or (len(op.operands) > len(definition.operands) and not several):
            self.fail(f"has {len(op.operands)} operands, and takes {', '.join(definition.operands)}")
        try:
            result = definition.rule([operand.type for operand in op.operands], op.settings)
        except KernelError as error:
            self.fail(error.problem)
        wanted = () if result is None else (result,)
        found = tuple(each.type for each in op.results)
        if found != wanted:
            self.fail(f"results {_types(found)}, and the rule gives {_types(wanted)}")

    def match(self, what: str, values: tuple[Value, ...], wanted: tuple[Value, ...]) -> None:
        found, expected = tuple(v.type for v in values), tuple(v.type for v in wanted)
        if found != expected:
            self.fail(f"{what} are {_types(found)}, and should be {_types(expected)}")

    def for_loop(self, node: For, scope: set[Value]) -> None:
        kind = node.lower.type
        if not isinstance(kind, TileType) or kind.shape or kind.is_pointer or not kind.dtype.is_integer:
            self.fail(f"a bound of type {kind}")
        if not node.body.params:
            self.fail("the body has no index")
        index, *carried = node.body.params
        self.match("upper bound, step and index", (node.upper, node.step, index), (node.lower,) * 3)
        self.match("carried values", tuple(carried), node.init)
        self.match("results", node.results, node.init)
        self.block(node.body, scope)
        self.node = node
        self.match("yielded values", node.body.yields, node.init)

    def while_loop(self, node: While, scope: set[Value]) -> None:
        self.match("carried values", node.condition.params, node.init)
        self.match("carried values", node.body.params, node.init)
        self.match("results", node.results, node.init)
        self.block(node.condition, scope)
        self.node = node
        if tuple(each.type for each in node.condition.yields) != (TileType(BOOL),):
            self.fail("the condition does not yield one bool")
        self.block(node.body, scope)
        self.node = node
        self.match("yielded values", node.body.yields, node.init)

    def branch(self, node: If, scope: set[Value]) -> None:
        if node.condition.type != TileType(BOOL):
            self.fail(f"the condition is {node.condition.type}, and should be a bool")
        for block in (node.then, node.other):
            if block.params:
                self.fail("a branch takes parameters")
            self.block(block, scope)
            self.node = node
            self.match("yielded values", block.yields, node.results)


def _types(types: tuple[Type, ...]) -> str:
    return ", ".join(map(str, types)) or "nothing"

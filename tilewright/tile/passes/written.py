"""Finds the tensors that a pointer may come from, and those that a program may write by stores and atomics."""

from __future__ import annotations

from tilewright.tile.ir import For, If, Op, TileProgram, Value, While, blocks_of, walk
from tilewright.tile.op import Effect
from tilewright.tile.ops import OPS


def pointer_origins(program: TileProgram) -> dict[Value, set[Value]]:
    """The parameters that each value is computed from, except through loads."""
    origins: dict[Value, set[Value]] = {param: {param} for param in program.params}
    nodes = list(walk(program.body))
    changed = True

    def flow(target: Value, source: Value) -> None:
        nonlocal changed
        known = origins.setdefault(target, set())
        before = len(known)
        known |= origins.get(source, set())
        changed = changed or len(known) != before

    while changed:
        changed = False
        for node in nodes:
            if isinstance(node, Op):
                if OPS[node.name].effect is Effect.PURE:
                    for result in node.results:
                        for operand in node.operands:
                            flow(result, operand)
                continue
            yields = (node.body,) if isinstance(node, (For, While)) else blocks_of(node)
            for block in yields:
                for result, value in zip(node.results, block.yields, strict=True):
                    flow(result, value)
            if isinstance(node, If):
                continue
            for block in blocks_of(node):
                params = block.params[1:] if isinstance(node, For) else block.params
                for param, first, last in zip(params, node.init, node.body.yields, strict=True):
                    flow(param, first)
                    flow(param, last)
            for result, first in zip(node.results, node.init, strict=True):
                flow(result, first)
    return origins


def written_params(program: TileProgram) -> frozenset[str]:
    origins, nodes = pointer_origins(program), walk(program.body)
    writes = [node for node in nodes if isinstance(node, Op) and OPS[node.name].effect is Effect.WRITE]
    return frozenset(param.name for node in writes for param in origins.get(node.operands[0], ()))

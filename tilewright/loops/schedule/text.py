"""The text form of a schedule's tree: its loops by name, and its statements."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright import te
from tilewright.loops.ir import Scope
from tilewright.loops.schedule.nest import Fetch, Leaf, Loop, Micro, Nest, Node, leaves
from tilewright.loops.text import print_expr


def print_nest(nest: Nest) -> str:
    lines: list[str] = []
    for _, leaf in leaves(nest.body):
        if leaf.target.scope is not Scope.GLOBAL:
            shape = ", ".join(map(str, leaf.target.shape))
            count = dict(nest.stages).get(leaf.target.name, 1)
            notes = ", swizzled" * leaf.target.swizzled
            notes += f", rows of {leaf.target.shape[-1] + leaf.target.gap}" if leaf.target.gap else ""
            notes += f", {count} stages" if count > 1 else ""
            if leaf.target.name in nest.bulk:
                notes += ", by the copy engine" + ", which has threads of its own" * nest.specialised
            lines.append(
                f"{leaf.target.scope.value} {leaf.target.name}: {leaf.target.dtype.short}[{shape}]{notes}"
            )

    def visit(nodes: Sequence[Node], depth: int) -> None:
        pad = "  " * depth
        for node in nodes:
            if isinstance(node, Loop):
                notes = ", overlapping" * node.overlaps + (f", {node.rest} at the end" if node.rest else "")
                lines.append(f"{pad}{node.axis or node.kind.value} {node.name} < {node.var.extent}{notes}:")
                visit(node.body, depth + 1)
            elif isinstance(node, Micro):
                lines.append(f"{pad}{node.intrinsic.name}:")
                visit((node.loop,), depth + 1)
            elif isinstance(node, Fetch):
                lines.append(f"{pad}prefetch {node.tile.name}[{', '.join(map(print_expr, node.indices))}]")
            elif isinstance(node, Leaf):
                lines.append(pad + _leaf(node))

    visit(nest.body, 0)
    return "".join(f"{line}\n" for line in lines)


def _leaf(leaf: Leaf) -> str:
    position = f"{leaf.target.name}[{', '.join(map(print_expr, leaf.indices))}]"
    combine = {"sum": "+", "prod": "*"}.get(leaf.kind or "", leaf.kind or "")
    guard = te.all_of(leaf.guards)
    condition = "" if guard is None else f"if {print_expr(guard)}: "
    arrow = "<-" if leaf.streamed else f"{combine}="
    return f"{condition}{position} {arrow} {print_expr(leaf.value)}" + ", transposed" * leaf.transposed

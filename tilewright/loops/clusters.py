"""Clusters of neighbouring blocks: which boxes are the same for all blocks of a cluster."""

from __future__ import annotations

from tilewright import te
from tilewright.hw.warpgroups import ATOM_ROWS
from tilewright.loops.ir import BoxCopy
from tilewright.te.index import Linear, bounds, linear, simplify


def may_be_shared(copy: BoxCopy, block_var: te.Var, together: int) -> bool:
    """Whether a box is the same for the blocks of a cluster, each of which can copy as many of its rows."""
    first, rank = te.Var("cluster", block_var.extent // together), te.Var("rank", together)
    values: dict[te.Var, te.Expr] = {block_var: first * together + rank}
    starts = [_divided(simplify(te.substitute(at, values)), together) for at in (copy.row, copy.column)]
    alike = not any(rank in te.variables(start) for start in starts)
    return alike and copy.box.rows % (ATOM_ROWS * together) == 0


def _divided(index: te.Expr, together: int) -> te.Expr:
    """The index with `(n * c + rank) // (n * d)` as `c // d`, and the remainder as `n * (c % d) + rank`."""

    def rule(node: te.Expr) -> te.Expr | None:
        if not (
            isinstance(node, te.Call)
            and node.op in ("floordiv", "mod")
            and isinstance(node.args[1], te.Const)
        ):
            return None
        divisor = int(node.args[1].value)
        form = linear(_divided(node.args[0], together))
        whole = {atom: c // together for atom, c in form.terms.items() if c % together == 0}
        rest = Linear({atom: c for atom, c in form.terms.items() if c % together}, form.constant % together)
        low, high = bounds(rest.expr())
        if divisor % together or low is None or high is None or low < 0 or high >= together:
            return None
        part = Linear(whole, form.constant // together).expr()
        if node.op == "floordiv":
            return simplify(part // (divisor // together))
        return simplify(part % (divisor // together) * together + rest.expr())

    return simplify(te.rewrite(index, rule))

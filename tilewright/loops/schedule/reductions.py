"""The primitive `rfactor`: split a reduction into partial reductions."""

from __future__ import annotations

from dataclasses import replace

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.loops.ir import Scope
from tilewright.loops.schedule.nest import (
    Loop,
    Nest,
    Tile,
    find_loop,
    fresh,
    identity,
    perfect_chain,
    plain,
    replaced,
    stage_nest,
)


def rfactor(nest: Nest, loop: str) -> Nest:
    """Keep a partial result per iteration of one reduction loop in a new stage `stage.rf`; `stage` combines them.

        for ko < 8: for ki < 4:                      for ki < 4: for ko < 8:
          total[i] += x[i, ko * 4 + ki]       ->       total.rf[i, ki] += x[i, ko * 4 + ki]
                                                     for ki.final < 4:
                                                       total[i] += total.rf[i, ki.final]

    The loop is then an ordinary loop of the new stage: it can be vectorised, or run in parallel. Needs: a reduction
    loop of a stage whose other loops are unchanged. The order of the combination changes, which a schedule may do.
    Other names: rfactor (Halide, TVM).
    """
    path = find_loop(nest, loop)
    found = path[-1]
    chain = perfect_chain(path[0])
    if chain is None or found.var not in chain[1].reduced:
        raise ScheduleError(
            f"rfactor: loop {loop} is not a loop of a reduction outside of all loops of others"
        )
    old = plain(nest, chain[1].stage, reductions_too=False)
    leaf, stage = old.leaf, old.leaf.stage
    assert leaf.kind is not None
    name = fresh(nest, f"{stage}.rf")
    last = te.Var(fresh(nest, f"{loop}.final"), found.var.extent)
    partial = Tile(name, leaf.target.dtype, (*leaf.target.shape, found.var.extent), Scope.SCRATCH)
    guard = te.all_of(leaf.guards)

    def element(indices: tuple[te.Expr, ...]) -> te.Expr:
        value = old.value_at(indices[:-1])
        if guard is not None:
            value = te.select(guard, value, identity(leaf))
        return te.substitute(value, {found.var: indices[-1]})

    others = [around for around in old.reductions if around.var != found.var]
    first = stage_nest(name, partial, others, leaf.kind, element)
    second = stage_nest(
        stage, leaf.target, [Loop(last, ())], leaf.kind, lambda indices: te.Load(partial, (*indices, last))
    )
    return replace(nest, body=replaced(nest.body, old.root, (*first, *second)))

"""Each illegal use of a primitive is refused, and the message names the loop and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.loops import formulas
from tests.loops.schedule.examples import Task, chain, conv2d, plain_sum
from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import ScheduleError, TilewrightError
from tilewright.loops.schedule import Schedule, outer_product

MATMUL = formulas.matmul(6, 37, 20)
SUM = plain_sum(3, 22)
CHAIN = chain(5, 12)


def of(task: Task, **options: object) -> Schedule:
    return Schedule.of(*task, **options)  # type: ignore[arg-type]


def stencil(reach: int = 2) -> Schedule:
    """Sums of a column, of what a stage computes."""
    x = te.Tensor("x", (10 + reach, 20), DType.F32)
    p = te.compute("p", x.shape, DType.F32, lambda i, j: x[i, j] * 2.0)
    out = te.compute("out", (10, 20), DType.F32, lambda i, j: p[i, j] + p[i + reach, j])
    return of((out, [x])).split("out.i0", 5)


def kept() -> Schedule:
    return stencil().store_at("p", "out.i0.o", "out.i0.i")


def diagonal() -> Schedule:
    x = te.Tensor("x", (12, 12), DType.F32)
    p = te.compute("p", x.shape, DType.F32, lambda i, j: x[i, j] * 2.0)
    return of((te.compute("out", (4, 8), DType.F32, lambda i, j: p[j, j + i] + p[j + 1, j + i + 1]), [x]))


def square(side: int = 4) -> Schedule:
    x = te.Tensor("x", (side, side), DType.F32)
    t = te.compute("t", x.shape, DType.F32, lambda i, j: x[j, i])
    return of((te.compute("out", x.shape, DType.F32, lambda i, j: t[i, j] + 1.0), [x]))


def placed() -> Schedule:
    """The product inside tiles of the output."""
    return of(MATMUL).tile(["out.i0", "out.i1"], [3, 8], "shift").compute_at("product", "out.i1.o")


CASES: dict[str, tuple[Callable[[], object], str]] = {
    # names
    "no such loop": (
        lambda: of(SUM).split("i7", 2),
        "the loop must be one of out.local.i0, out.r0, out.i0, got i7",
    ),
    "no such stage": (
        lambda: of(SUM).inline("nothing"),
        "the stage must be one of out.local, out, got nothing",
    ),
    "no such tensor": (lambda: of(SUM).pack("y", [1]), "the tensor must be one of x, out.local, out, got y"),
    "a name twice": (lambda: of(SUM).split("out.r0", 2, into=("x", "b")), "something named x already"),
    # split
    "a factor that does not divide": (
        lambda: of(SUM).split("out.r0", 4),
        "split: 4 does not divide loop out.r0, which has 22 iterations",
    ),
    "no factor": (lambda: of(SUM).split("out.r0", 0), "split: loop out.r0 by 0"),
    "an unknown tail": (lambda: of(SUM).split("out.r0", 4, "peel"), "got 'peel'"),
    "a tile larger than the loop": (
        lambda: of(SUM).split("out.i0", 4, "shift"),
        "loop out.i0 has 3 iterations, too few for a tile of 4",
    ),
    "one name for two loops": (
        lambda: of(SUM).split("out.r0", 2, into=("a", "a")),
        "loop out.r0 becomes two loops, with two names",
    ),
    "a shifted sum": (
        lambda: of(SUM).split("out.r0", 4, "shift"),
        "loop out.r0.o has overlapping tiles and is one of the reduction out.local",
    ),
    "a vector that is split": (
        lambda: of(CHAIN).split("out.i1", 4).vectorise("out.i1.i").split("out.i1.i", 2),
        "split: loop out.i1.i is vector already",
    ),
    "a narrower tail larger than the loop": (
        lambda: of(SUM).split("out.i0", 4, "narrow"),
        "loop out.i0 has 3 iterations, too few for a tile of 4",
    ),
    "a narrower tail split again": (
        lambda: of(SUM).split("out.r0", 4, "narrow").split("out.r0.i", 2),
        "split: loop out.r0.i belongs to a split with a narrower tail",
    ),
    "a narrower tail fused": (
        lambda: of(SUM).split("out.r0", 4, "narrow").fuse("out.r0.o", "out.r0.i"),
        "fuse: loop out.r0.o belongs to a split with a narrower tail",
    ),
    "a narrower tail outside": (
        lambda: of(SUM).split("out.r0", 4, "narrow").reorder("out.r0.i", "out.r0.o"),
        "loop out.r0.i has a narrower tail and must stay inside loop out.r0.o",
    ),
    "a narrower tail on threads": (
        lambda: of(CHAIN).split("out.i1", 8, "narrow").bind("out.i1.i", "thread.x"),
        "loop out.i1.i belongs to a split with a narrower tail: thread.x would differ at the end",
    ),
    "a narrower tail in an instruction": (
        lambda: (
            of(formulas.matmul(6, 9, 4))
            .tile(["product.i0", "product.i1"], [2, 4], "narrow")
            .reorder("product.r0", "product.i0.i", "product.i1.i")
            .tensorise("product.i0.i", outer_product(2, 1, 4))
        ),
        "only 1 iterations of loop product.i1.i run at the end",
    ),
    "a factor after a narrower tail": (
        lambda: of(SUM).split("out.r0", 4, "narrow").rfactor("out.r0.i"),
        "stage out.local has been scheduled already: its loop out.r0.i was split",
    ),
    # reorder and fuse
    "overlapping tiles inside a sum": (
        lambda: of(MATMUL).split("product.i1", 8, "shift").reorder("product.r0", "product.i1.o"),
        "loop product.i1.o has overlapping tiles and would be inside product.r0, one of the reduction product",
    ),
    "loops of two nests": (
        lambda: of(MATMUL).reorder("product.i0", "out.i0"),
        "reorder: loops out.i0 and product.i0 are not inside one another",
    ),
    "a loop across another statement": (
        lambda: placed().reorder("out.i1.i", "out.i1.o"),
        "reorder: loop out.i1.o holds other statements than loop out.i0.i",
    ),
    "a loop twice": (lambda: of(MATMUL).reorder("out.i0", "out.i0"), "loops are named once each"),
    "a vector moved outside": (
        lambda: of(CHAIN).split("out.i1", 4).vectorise("out.i1.i").reorder("out.i1.i", "out.i0"),
        "vectorise: loop out.i1.i is not innermost",
    ),
    "a parallel loop moved inside": (
        lambda: of(CHAIN).inline("moved").inline("scaled").parallel("out.i0").reorder("out.i1", "out.i0"),
        "parallel: loop out.i0 is inside loop out.i1, not the outermost",
    ),
    "fuse of loops apart": (
        lambda: of(MATMUL).fuse("product.i0", "product.r0"),
        "loop product.r0 is not directly inside loop product.i0",
    ),
    "fuse of a reduction's loop with another": (
        lambda: of(MATMUL).fuse("product.i1", "product.r0"),
        "fuse: of product.i1 and product.r0, one is a loop of the reduction product",
    ),
    "fuse across another statement": (
        lambda: placed().fuse("out.i1.o", "out.i0.i"),
        "fuse: loop out.i1.o holds other statements than loop out.i0.i",
    ),
    "tiles without factors": (lambda: of(MATMUL).tile(["out.i0", "out.i1"], [2]), "2 loops and 1 factors"),
    # kinds
    "a vector of 37": (
        lambda: of(MATMUL).vectorise("out.i1"),
        "loop out.i1 has 37 iterations; lanes are 2, 4, 8",
    ),
    "a vector outside of a loop": (
        lambda: of(CHAIN).split("out.i0", 4, "shift").vectorise("out.i0.i"),
        "vectorise: loop out.i0.i is not innermost",
    ),
    "a vector over a sum": (
        lambda: of(SUM).split("out.r0", 2).vectorise("out.r0.i"),
        "loop out.r0.i belongs to the reduction out.local: its lanes would all update the same element",
    ),
    "a guarded vector": (
        lambda: of(MATMUL).split("out.i1", 8, "guard").vectorise("out.i1.i"),
        "stage out is guarded by a condition on loop out.i1.i",
    ),
    "lanes at no fixed step": (
        lambda: (
            of(CHAIN)
            .reorder("out.i1", "out.i0")
            .fuse("out.i1", "out.i0", into="f")
            .split("f", 4)
            .vectorise("f.i")
        ),
        "the lanes of loop f.i do not each write an element of out",
    ),
    "lanes that write one element": (
        lambda: (
            of(CHAIN)
            .split("out.i1", 4)
            .inline("moved")
            .compute_at("scaled", "out.i1.i")
            .vectorise("out.i1.i")
        ),
        "the lanes of loop out.i1.i do not each write an element of scaled",
    ),
    "parallel inside": (lambda: of(MATMUL).parallel("out.i1"), "parallel: loop out.i1 is inside loop out.i0"),
    "parallel with something outside": (
        lambda: of(MATMUL).parallel("out.i0"),
        "parallel: loop out.i0 must hold everything; outside of it: product",
    ),
    "twice a kind": (lambda: of(CHAIN).unroll("out.i0").unroll("out.i0"), "loop out.i0 is unroll already"),
    "too much code": (
        lambda: of(MATMUL).unroll("product.i0").unroll("product.i1").unroll("product.r0"),
        "loops product.i0, product.i1, product.r0 make 4440 copies of stage product; at most 1024",
    ),
    # places
    "a reader outside": (
        lambda: of(CHAIN).compute_at("scaled", "out.i0"),
        "compute_at: stage moved reads scaled outside of loop out.i0",
    ),
    "in its own loop": (
        lambda: of(CHAIN).compute_at("moved", "moved.i0"),
        "compute_at: loop moved.i0 belongs to stage moved itself",
    ),
    "the output": (lambda: of(CHAIN).compute_at("out", "moved.i0"), "no stage reads out"),
    "placed after it was scheduled": (
        lambda: of(MATMUL).split("product.r0", 4).split("product.i0", 2).compute_at("product", "out.i0"),
        "stage product has been scheduled already: its loops were split",
    ),
    "placed after it was unrolled": (
        lambda: of(MATMUL).unroll("product.i0").compute_at("product", "out.i0"),
        "stage product has been scheduled already: its loop product.i0 is unroll",
    ),
    "placed around another": (
        lambda: of(conv2d()).compute_at("padded", "conv.i0").compute_at("conv", "out.i0"),
        "stage conv has been scheduled already: its loop conv.i0 holds other statements too",
    ),
    "inlined sum": (lambda: of(MATMUL).inline("product"), "inline: stage product is a reduction"),
    "inlined output": (lambda: of(MATMUL).inline("out"), "inline: stage out is the output"),
    # store_at
    "kept in a loop that is not around": (
        lambda: stencil().store_at("p", "out.i0.i", "out.i0.o"),
        "store_at: loop out.i0.o is not inside loop out.i0.i",
    ),
    "kept and never used again": (
        lambda: stencil(reach=0).store_at("p", "out.i0.o", "out.i0.i"),
        "iterations of loop out.i0.i share no elements of stage p",
    ),
    "kept and the same everywhere": (
        lambda: stencil().split("out.i1", 5).store_at("p", "out.i0.i", "out.i1.o").program(),
        "iterations of loop out.i1.o share no elements of stage p",
    ),
    "kept along two axes": (
        lambda: diagonal().store_at("p", "out.i0", "out.i1"),
        "what stage p computes moves along 2 axes with loop out.i1, not along one",
    ),
    "kept and read outside": (
        lambda: of(CHAIN).split("out.i0", 5).store_at("scaled", "out.i0.o", "out.i0.i"),
        "compute_at: stage moved reads scaled outside of loop out.i0.i",
    ),
    "kept, then split": (
        lambda: kept().split("out.i0.i", 5),
        "stage p keeps elements over the iterations of out.i0.o, out.i0.i: these loops stay as they are",
    ),
    "kept, then bound": (
        lambda: kept().bind("out.i0.i", "thread.x"),
        "loop out.i0.i is thread.x, and its iterations need in order what stage p keeps",
    ),
    # stream and transpose
    "streamed twice": (lambda: of(CHAIN).stream("out").stream("out"), "stage out is streamed already"),
    "streamed and read soon": (lambda: of(CHAIN).stream("scaled"), "stage scaled is local"),
    "transposed output": (lambda: of(CHAIN).transpose("out"), "stage out is the output"),
    "transposed twice": (lambda: square().transpose("t").transpose("t"), "stage t is transposed already"),
    "transposed sum": (
        lambda: of(formulas.matmul(4, 4, 4)).transpose("product"),
        "stage product is a reduction: each element must be stored once",
    ),
    "transposed guard": (
        lambda: square(5).split("t.i0", 4, "guard").transpose("t"),
        "stage t is guarded: each element must be stored once",
    ),
    "transposed rectangle": (
        lambda: of(CHAIN).transpose("scaled"),
        "scaled[5, 12] is not a square of 2, 4, 8, 16 elements a side",
    ),
    "transposed in memory": (
        lambda: square().transpose("t").program(),
        "t is in scratch, and registers are transposed",
    ),
    "transposed among other loops": (
        lambda: square().transpose("t").compute_at("t", "out.i0"),
        "stage t has been scheduled already: its stores were changed",
    ),
    "transposed with a narrower tail": (
        lambda: square().transpose("t").split("t.i0", 3, "narrow"),
        "transpose: loop t.i0.o has a narrower tail",
    ),
    "transposed by threads": (
        lambda: square().transpose("t").bind("t.i0", "thread.x"),
        "threads share the elements of t: loop t.i0 is bound",
    ),
    # tiles
    "a copy of what is not read": (lambda: of(MATMUL).cache_read("a", "out"), "stage out does not read a"),
    "no such memory": (lambda: of(MATMUL).set_scope("product", "nowhere"), "got 'nowhere'"),
    "the output elsewhere": (lambda: of(MATMUL).set_scope("out", "register"), "stage out is the output"),
    "written after it was scheduled": (
        lambda: of(MATMUL).split("out.i1", 8, "guard").cache_write("out"),
        "stage out has been scheduled already",
    ),
    "registers that move": (
        lambda: placed().set_scope("product", "register").program(),
        "product is in registers, and stage product accesses it at a place that moves with loop product.i0",
    ),
    "registers of two widths": (
        lambda: (
            placed()
            .set_scope("product", "register")
            .reorder("product.r0", "product.i0", "product.i1")
            .unroll("product.i0")
            .vectorise("product.i1")
            .unroll("out.i0.i")
            .unroll("out.i1.i")
            .program()
        ),
        "product is in registers, and is accessed with 8 lanes by product but with 1 by out",
    ),
    "too much scratch": (
        lambda: of(formulas.matmul(600, 600, 2)).program(),
        "1440000 bytes of scratch memory, of at most 1048576; most of it is product",
    ),
    # rfactor
    "rfactor of no sum": (
        lambda: of(SUM).rfactor("out.i0"),
        "rfactor: loop out.i0 is not a loop of a reduction",
    ),
    "rfactor inside": (
        lambda: placed().rfactor("product.r0"),
        "product.r0 is not a loop of a reduction outside",
    ),
    "rfactor after a split": (
        lambda: of(MATMUL).split("product.i0", 2).rfactor("product.r0"),
        "stage product has been scheduled already",
    ),
    # pack
    "blocks of another rank": (lambda: of(MATMUL).pack("b", [16]), "pack: b has 2 axes; got blocks for 1"),
    "a block too large": (
        lambda: of(MATMUL).pack("b", [20, 64]),
        "axis 1 of b has 37 elements; a block has 1 to 37",
    ),
    "no order": (lambda: of(MATMUL).pack("b", [20, 37], [0, 1, 2, 2]), "is not an order of the 4 axes"),
    "blocks across tiles": (
        lambda: of(MATMUL, constants=[1]).pack("b", [20, 16]),
        "pack: b is read at product.i1 along axis 1, not in tiles of 16 of its 37 elements",
    ),
    "packed twice": (
        lambda: of(MATMUL, constants=[2]).pack("bias", [37]).pack("bias", [1, 37]),
        "pack: bias is packed already",
    ),
    "packed under a prefetch": (
        lambda: of(MATMUL, constants=[1]).prefetch("product.r0", "b").pack("b", [20, 37]),
        "pack: b is already prefetched unpacked",
    ),
    "nothing reads it": (lambda: of(MATMUL).pack("out", [6, 37]), "pack: nothing reads out"),
    # prefetch
    "fetch what stays": (
        lambda: of(MATMUL).prefetch("product.i0", "b"),
        "nothing inside loop product.i0 reads b",
    ),
    "fetch what is no input": (lambda: of(MATMUL).prefetch("out.i0", "product"), "product is not an input"),
    "fetch over a loop that is not inside": (
        lambda: of(MATMUL).prefetch("product.r0", "b", spread="product.i0"),
        "loop product.i0 is not inside loop product.r0",
    ),
    "fetch over what is scattered": (
        lambda: (
            of(MATMUL).reorder("product.i1", "product.r0").prefetch("product.i1", "b", spread="product.r0")
        ),
        "what loop product.i1 reads of b is not contiguous in memory",
    ),
    "fetch over what stays": (
        lambda: of(MATMUL).prefetch("product.i0", "b", spread="product.r0"),
        "nothing inside loop product.i0 reads b at a place that moves with the loop",
    ),
    "fetch into no cache": (lambda: of(MATMUL).prefetch("product.r0", "b", 1, 4), "levels are 1 to 3"),
    "fetch in a vector": (
        lambda: of(CHAIN).split("out.i1", 4).vectorise("out.i1.i").prefetch("out.i1.i", "x"),
        "loop out.i1.i is a vector loop",
    ),
    "fetch where data say": (
        lambda: of(formulas.gathered()).prefetch("out.i0", "table"),
        "where table is read depends on data",
    ),
    "fetch over where data say": (
        lambda: of(formulas.gathered()).prefetch("out.i0", "table", spread="out.i1"),
        "where table is read depends on data",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_with_the_reason(case: str) -> None:
    misuse, message = CASES[case]
    with pytest.raises(ScheduleError) as caught:
        misuse()
    assert message in caught.value.message
    assert isinstance(caught.value, TilewrightError) and caught.value.remedy


def test_a_sum_does_not_run_in_parallel_over_its_own_elements() -> None:
    whole = of(MATMUL).reorder("product.r0", "product.i0", "product.i1")
    alone = Schedule(replace(whole.nest, body=whole.nest.body[:1]))
    with pytest.raises(ScheduleError, match=r"loop product\.r0 belongs to the reduction product"):
        alone.parallel("product.r0")

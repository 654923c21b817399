"""Loops, functions, branches, chains and concatenations that are small in the file and large when expanded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.faults.hostile.building import (
    Case,
    body,
    function,
    graph_model,
    numbers,
    scalar,
    written,
)
from tests.frontend.onnx.checking import floats


def empty_loops(depth: int, trips: int) -> onnx.ModelProto:
    """Loops in each other around nothing."""

    def wrap(level: int) -> onnx.GraphProto:
        nodes = [helper.make_node("Identity", [f"c{level}"], [f"d{level}"])]
        state = f"s{level}"
        if level + 1 < depth:
            nodes.append(
                helper.make_node("Loop", ["n", "", f"s{level}"], [f"t{level}"], body=wrap(level + 1))
            )
            state = f"t{level}"
        return helper.make_graph(
            nodes,
            f"body{level}",
            [
                helper.make_tensor_value_info(f"i{level}", TensorProto.INT64, []),
                helper.make_tensor_value_info(f"c{level}", TensorProto.BOOL, []),
                helper.make_tensor_value_info(f"s{level}", TensorProto.FLOAT, [2, 3]),
            ],
            [
                helper.make_tensor_value_info(f"d{level}", TensorProto.BOOL, []),
                helper.make_tensor_value_info(state, TensorProto.FLOAT, [2, 3]),
            ],
        )

    node = helper.make_node("Loop", ["n", "", "x"], ["y"], body=wrap(0))
    return graph_model([node], initialisers=[numpy_helper.from_array(scalar(trips), "n")])


def nested_ifs(depth: int, known: bool) -> onnx.ModelProto:
    """An If in each branch of an If, so deep; with conditions that are known, or that come with the call."""

    def branch(level: int, name: str) -> onnx.GraphProto:
        out = f"{name}{level}"
        if level == depth:
            node = helper.make_node("Neg", ["x"], [out])
        else:
            node = helper.make_node(
                "If",
                ["c"],
                [out],
                then_branch=branch(level + 1, name + "t"),
                else_branch=helper.make_graph(
                    [helper.make_node("Exp", ["x"], [f"{name}e{level}"])],
                    "e",
                    [],
                    [helper.make_tensor_value_info(f"{name}e{level}", TensorProto.FLOAT, None)],
                ),
            )
        return helper.make_graph(
            [node], out, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, None)]
        )

    top = branch(0, "v").node[0]
    top.output[0] = "y"
    if known:
        return graph_model([top], initialisers=[numpy_helper.from_array(np.array(True), "c")])
    first = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["c"]),
    ]
    return graph_model(
        [*first, top], initialisers=[numpy_helper.from_array(np.float32(0).reshape(()), "zero")]
    )


def both_branches(depth: int) -> onnx.ModelProto:
    """Functions with an If that calls the next function in both of its branches: 2^depth of them when expanded."""
    functions = []
    for level in range(depth):
        inner = f"f{level + 1}" if level + 1 < depth else "Neg"
        domain = "local" if level + 1 < depth else ""
        branches = [
            helper.make_graph(
                [helper.make_node(inner, ["a"], [f"{side}out"], domain=domain)],
                side,
                [],
                [helper.make_tensor_value_info(f"{side}out", TensorProto.FLOAT, None)],
            )
            for side in ("then", "else")
        ]
        nodes = [
            helper.make_node("ReduceSum", ["a"], ["s"], keepdims=0),
            helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
            helper.make_node("If", ["c"], ["b"], then_branch=branches[0], else_branch=branches[1]),
        ]
        functions.append(function(f"f{level}", nodes))
    return graph_model([helper.make_node("f0", ["x"], ["y"], domain="local")], functions=functions)


def doubling(levels: int) -> onnx.ModelProto:
    """Functions that each call the next one twice."""
    functions = []
    for level in range(levels):
        inner, domain = (f"f{level + 1}", "local") if level + 1 < levels else ("Neg", "")
        functions.append(
            function(
                f"f{level}",
                [
                    helper.make_node(inner, ["a"], ["m"], domain=domain),
                    helper.make_node(inner, ["m"], ["b"], domain=domain),
                ],
            )
        )
    return graph_model([helper.make_node("f0", ["x"], ["y"], domain="local")], functions=functions)


def chained(levels: int) -> onnx.ModelProto:
    """Functions that each call the next one."""
    functions = [
        function(
            f"f{level}",
            [
                helper.make_node(
                    f"f{level + 1}" if level + 1 < levels else "Neg",
                    ["a"],
                    ["b"],
                    domain="local" if level + 1 < levels else "",
                )
            ],
        )
        for level in range(levels)
    ]
    return graph_model([helper.make_node("f0", ["x"], ["y"], domain="local")], functions=functions)


def heavy_function(calls: int) -> onnx.ModelProto:
    """A function with a large constant in it, called often."""
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.zeros(1 << 20, np.float32))),
        helper.make_node("ReduceSum", ["c"], ["s"]),
        helper.make_node("Add", ["a", "s"], ["b"]),
    ]
    names = ["x", *(f"v{n}" for n in range(calls - 1)), "y"]
    uses = [helper.make_node("f", [a], [b], domain="local") for a, b in itertools.pairwise(names)]
    return graph_model(uses, functions=[function("f", nodes)])


def chain(count: int, operator: str = "Neg") -> onnx.ModelProto:
    names = ["x", *(f"v{n}" for n in range(count - 1)), "y"]
    return graph_model([helper.make_node(operator, [a], [b]) for a, b in itertools.pairwise(names)])


def shared(count: int, operator: str) -> onnx.ModelProto:
    """v = v + v, so often: an expression of 2^count leaves."""
    names = ["x", *(f"v{n}" for n in range(count - 1)), "y"]
    return graph_model([helper.make_node(operator, [a, a], [b]) for a, b in itertools.pairwise(names)])


def activations(count: int) -> onnx.ModelProto:
    """x * sigmoid(x), so often: each step reads the one before twice."""
    nodes = []
    for n in range(count):
        source, target = (f"v{n - 1}" if n else "x"), ("y" if n + 1 == count else f"v{n}")
        nodes += [
            helper.make_node("Sigmoid", [source], [f"s{n}"]),
            helper.make_node("Mul", [source, f"s{n}"], [target]),
        ]
    return graph_model(nodes)


def wide_concat(parts: int, computed: bool) -> onnx.ModelProto:
    if not computed:
        return graph_model([helper.make_node("Concat", ["x"] * parts, ["y"], axis=0)])
    rows = [helper.make_node(("Neg", "Exp", "Sin")[n % 3], ["x"], [f"v{n}"]) for n in range(parts)]
    return graph_model([*rows, helper.make_node("Concat", [f"v{n}" for n in range(parts)], ["y"], axis=0)])


def loop_of(nodes: Sequence[onnx.NodeProto], out: str, trips: int, **weights: np.ndarray) -> onnx.ModelProto:
    """A loop over nodes that make `out` of `s`, [2, 3]."""
    inner = helper.make_graph(
        [helper.make_node("Identity", ["going"], ["on"]), *nodes],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info(out, TensorProto.FLOAT, None),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    node = helper.make_node("Loop", ["n", "true", "x"], ["y"], body=inner)
    # The reference stops after an iteration of a loop whose condition is left out.
    known = [numpy_helper.from_array(scalar(trips), "n"), numpy_helper.from_array(np.array(True), "true")]
    return graph_model([node], initialisers=known)


def scanned(length: int) -> onnx.ModelProto:
    inner = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("s", "e")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("t", "o")],
    )
    nodes = [
        helper.make_node("Expand", ["x", "n"], ["wide"]),
        helper.make_node("Scan", ["z", "wide"], ["last", "y"], body=inner, num_scan_inputs=1),
    ]
    weights = [numpy_helper.from_array(numbers(length, 3), "n"), numpy_helper.from_array(floats(3), "z")]
    return graph_model(nodes, shape=(1, 3), initialisers=weights)


def structures() -> Iterator[tuple[str, Case]]:
    for depth, trips in ((1, 1000), (1, 10**7), (2, 500), (3, 300), (6, 512), (12, 1 << 62), (30, 2)):
        yield f"{depth} empty loops of {trips}", written(lambda d=depth, t=trips: empty_loops(d, t))
    for depth in (5, 20, 28):
        yield f"{depth} nested Ifs, known", written(lambda d=depth: nested_ifs(d, True))
        yield f"{depth} nested Ifs, not known", written(lambda d=depth: nested_ifs(d, False))
    for depth in (3, 12, 40):
        yield f"{depth} functions with both branches", written(lambda d=depth: both_branches(d))
    for levels in (4, 16, 30, 64, 1000):
        yield f"{levels} functions that double", written(lambda n=levels: doubling(n))
    for levels in (30, 100, 10_000):
        yield f"{levels} functions in a chain", written(lambda n=levels: chained(n))
    for calls in (3, 400):
        yield f"a function of 4 MB called {calls} times", written(lambda n=calls: heavy_function(n))
    for count in (3000, 30_000):
        yield f"a chain of {count}", written(lambda n=count: chain(n))
    yield "a chain of 150,000", written(lambda: chain(150_000))
    for count in (10, 60, 300):
        yield f"{count} shared sums", written(lambda n=count: shared(n, "Add"))
        yield f"{count} shared products", written(lambda n=count: shared(n, "Mul"))
    yield "20 activations", written(lambda: activations(20))
    yield "300 activations", written(lambda: activations(300))
    for parts in (300, 5000):
        yield f"a Concat of {parts}", written(lambda n=parts: wide_concat(n, False))
    for parts in (300, 2000):
        yield f"a Concat of {parts} computed rows", written(lambda n=parts: wide_concat(n, True))
    many = [
        helper.make_node("Concat", ["s"] * 5000, ["c"], axis=0),
        helper.make_node("Slice", ["c", "a", "b"], ["t"]),
    ]
    yield (
        "a loop of wide Concats",
        written(lambda: loop_of(many, "t", 2000, a=numbers(0), b=numbers(2))),
    )
    grown = [helper.make_node("Concat", ["s", "s"], ["t"], axis=0)]
    for trips in (8, 27, 60):
        yield f"a value that doubles {trips} times", written(lambda n=trips: loop_of(grown, "t", n))
    summed = [helper.make_node("Add", ["s", "w"], ["t"])]
    for trips in (50, 1000):
        yield f"a loop of {trips} sums", written(lambda n=trips: loop_of(summed, "t", n, w=floats(2, 3)))
    constant = numpy_helper.from_array(np.ones((500_000, 3), np.float32))
    reads = [
        helper.make_node("Constant", [], ["c"], value=constant),
        helper.make_node("ReduceMax", ["c"], ["m"]),
        helper.make_node("Add", ["s", "m"], ["t"]),
    ]
    yield "a loop that reads 6 MB 600 times", written(lambda: loop_of(reads, "t", 600))
    for length in (40, 800, 10**6):
        yield f"a Scan of {length}", written(lambda n=length: scanned(n))
    yield (
        "a loop without an end",
        body(
            "y = Loop (, , x) <body = b (int64 i, bool c, float[2,3] s) => (bool d, float[2,3] t)"
            " { d = Identity (c) t = Add (s, s) }>"
        ),
    )
    yield "a loop of -5 trips", written(lambda: loop_of(summed, "t", -5, w=floats(2, 3)))
    sequence = "s0 = SequenceEmpty () " + " ".join(
        f"s{n + 1} = SequenceInsert (s{n}, x)" for n in range(2000)
    )
    yield (
        "a sequence that grows 2000 times",
        body(f"{sequence} y = ConcatFromSequence <axis: int = 0> (s2000)"),
    )
    yield "5,000 outputs", written(lambda: many_outputs(5000))
    yield "20,000 inputs of one Sum", written(lambda: many_inputs(20_000))


def many_outputs(count: int) -> onnx.ModelProto:
    names = [f"v{n}" for n in range(count)]
    return graph_model([helper.make_node("Neg", ["x"], [name]) for name in names], names)


def many_inputs(count: int) -> onnx.ModelProto:
    model = graph_model([helper.make_node("Sum", [f"i{n}" for n in range(count)], ["y"])])
    del model.graph.input[:]
    model.graph.input.extend(
        helper.make_tensor_value_info(f"i{n}", TensorProto.FLOAT, [2]) for n in range(count)
    )
    return model

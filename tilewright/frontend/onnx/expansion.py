"""Compute the expanded size of a model with functions, before expanding them.

A function that calls another twice, which calls a third twice, and so on, is a file of kilobytes and a graph of
billions of nodes. So nodes and bytes are counted once per function before anything is expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import AttributeProto

from tilewright.errors import ModelFileError
from tilewright.support.budget import Budget

Key = tuple[str, str, str]  # domain, name, overload
_EXPANDED_COPIES = 3  # copies of the expanded model while it is made: the inliner's, as text, and the result


@dataclass
class _Size:
    nodes: int = 0
    bytes: int = 0
    depth: int = 0  # of calls and subgraphs inside


def subgraphs(attribute: AttributeProto) -> list[onnx.GraphProto]:
    """The graphs that an attribute holds."""
    single = [attribute.g] if attribute.HasField("g") else []
    return [*single, *attribute.graphs]


def check_expansion(model: onnx.ModelProto, budget: Budget) -> None:
    """Raise ModelSizeError if a model with expanded functions is too large or nested too deep; ModelFileError for
    functions that are defined twice or call themselves."""
    functions: dict[Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = _key(function.domain, function.name, _overload(function))
        if functions.setdefault(key, function) is not function:
            raise ModelFileError(f"two functions are called {function.name!r}")
    known: dict[Key, _Size] = {}
    for key in functions:
        _measure(key, functions, known, budget)
    total = _total(model.graph, known, budget)
    if total.nodes > budget.limits.nodes:
        budget.count(total.nodes, "the functions" if model.functions else "the graph")
    budget.check_depth(total.depth, "functions and subgraphs are")
    if model.functions:
        budget.fits(_EXPANDED_COPIES * total.bytes, "the model with its functions expanded")


def _key(domain: str, name: str, overload: str) -> Key:
    return ("" if domain == "ai.onnx" else domain, name, overload)


def _overload(proto: onnx.NodeProto | onnx.FunctionProto) -> str:
    """The overload; "" in onnx before 1.16, which had none."""
    return str(getattr(proto, "overload", ""))


def _measure(
    root: Key, functions: dict[Key, onnx.FunctionProto], known: dict[Key, _Size], budget: Budget
) -> None:
    """Fill `known` for `root` and the functions that it calls, callees first. It does not recurse, because the model
    decides the depth."""
    open_: set[Key] = set()
    stack = [root]
    while stack:
        key = stack[-1]
        if key in known:
            stack.pop()
            open_.discard(key)
            continue
        called = [callee for callee in _calls(functions[key]) if callee in functions and callee not in known]
        if key in open_ and called:
            raise ModelFileError(f"the function {key[1]!r} calls itself, or another that calls it")
        if called:
            open_.add(key)
            for callee in called:
                if callee in open_:
                    raise ModelFileError(f"the function {callee[1]!r} calls itself, or another that calls it")
            stack += called
        else:
            known[key] = _total(functions[key], known, budget)


def _calls(body: onnx.FunctionProto) -> list[Key]:
    return list(dict.fromkeys(_key(node.domain, node.op_type, _overload(node)) for node, _ in _nodes(body)))


def _nodes(body: onnx.GraphProto | onnx.FunctionProto) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Every node, those of subgraphs too, with the number of subgraphs around it."""
    waiting = [(body, 0)]
    while waiting:
        current, depth = waiting.pop()
        for node in current.node:
            yield node, depth
            waiting += ((inner, depth + 1) for attribute in node.attribute for inner in subgraphs(attribute))


def _total(body: onnx.GraphProto | onnx.FunctionProto, known: dict[Key, _Size], budget: Budget) -> _Size:
    """The size of a body with its calls expanded. Numbers saturate far beyond any limit."""
    total = _Size(0, sum(node.ByteSize() for node in body.node), 0)
    for node, depth in _nodes(body):
        callee = known.get(_key(node.domain, node.op_type, _overload(node)), _Size())
        inside = depth + (callee.depth + 1 if callee.nodes else 0)
        total.nodes = min(total.nodes + 1 + callee.nodes, budget.limits.nodes + 1)
        total.bytes = min(total.bytes + callee.bytes, budget.limits.memory + 1)
        total.depth = max(total.depth, inside)
    return total

"""Hostile model files of every operator: the models of onnx's own node tests with one number replaced.

Small integer operands become weights first, so that shapes, axes, counts and sizes are part of the file. What is
replaced is drawn with a seed: an attribute, an element of such a weight, or a dimension of an input.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, numpy_helper

NUMBERS = (0, -1, 1, 2, 7, 64, 5000, 100_003, 1 << 24, 1 << 31, 1 << 33, 1 << 40, (1 << 63) - 1, -(1 << 63))
_SMALL = 64  # elements of an operand that becomes a weight
_EXPANDED = "_expanded"  # models of functions written out: the operators are the same


def operators(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """(name, file) of so many cases: every operator in turn, each with another of its models and numbers."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    by_operator: dict[str, list[Any]] = {}
    for case in sorted(found, key=lambda case: case.name):
        if case.model is not None and _EXPANDED not in case.name:
            by_operator.setdefault(case.model.graph.node[-1].op_type, []).append(case)
    assert len(by_operator) > 100, "onnx keeps its node tests elsewhere"
    rng = random.Random(seed)
    made = 0
    while made < count:
        for operator, samples in sorted(by_operator.items()):
            sample = rng.choice(samples)
            model = _fixed(sample)
            changes = _changes(model, rng)
            if not changes:
                continue
            words, change = rng.choice(changes)
            change()
            yield f"{made}: {operator} ({sample.name}): {words}", bytes(model.SerializeToString())
            made += 1
            if made == count:
                return


def _fixed(sample: Any) -> onnx.ModelProto:
    """The model of a node test, its small integer inputs as weights."""
    model = onnx.ModelProto()
    model.CopyFrom(sample.model)
    inputs = list(model.graph.input)
    for position, (value, array) in enumerate(zip(inputs, sample.data_sets[0][0], strict=False)):
        whole = isinstance(array, np.ndarray) and array.dtype in (np.int64, np.int32)
        if whole and position > 0 and array.size <= _SMALL:
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
            model.graph.input.remove(value)
    return model


def _changes(model: onnx.ModelProto, rng: random.Random) -> list[tuple[str, Callable[[], None]]]:
    number = rng.choice(NUMBERS)
    found: list[tuple[str, Callable[[], None]]] = []
    for node in model.graph.node:
        for attribute in node.attribute:
            words = f"{attribute.name} = {number}"
            if attribute.type == AttributeProto.INT:
                found.append((words, lambda a=attribute: setattr(a, "i", number)))
            elif attribute.type == AttributeProto.FLOAT:
                found.append((words, lambda a=attribute: setattr(a, "f", float(number))))
            found += [
                (words, lambda a=attribute, p=slot: a.ints.__setitem__(p, number))
                for slot in range(len(attribute.ints))
            ]
    for tensor in model.graph.initializer:
        if tensor.raw_data:
            array = numpy_helper.to_array(tensor).copy()
            limits = np.iinfo(array.dtype)
            value = min(max(number, limits.min), limits.max)
            for slot in range(array.size):

                def replace(
                    t: TensorProto = tensor, a: np.ndarray = array, p: int = slot, v: int = value
                ) -> None:
                    a.reshape(-1)[p] = v
                    t.raw_data = a.tobytes()

                found.append((f"{tensor.name}[{slot}] = {value}", replace))
    for given in model.graph.input:
        for axis, dim in enumerate(given.type.tensor_type.shape.dim):
            found.append(
                (
                    f"{given.name} has {number} on axis {axis}",
                    lambda d=dim: setattr(d, "dim_value", number),
                )
            )
    return found

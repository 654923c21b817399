"""Hostile model files of every operator: the models of onnx's own node tests with one number replaced.

Small integer operands become weights first, so that shapes, axes, counts and sizes are part of the file. What is
replaced is drawn with a seed: an attribute, an element of such a weight, or a dimension of an input.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

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
    by_operator: dict[str, list[Path]] = {}
    for case in sorted(found, key=lambda case: case.name):
        if case.model_dir is None or _EXPANDED in case.name:
            continue
        folder = Path(case.model_dir)
        operator = case.name.removeprefix("test_").split("_")[0]
        by_operator.setdefault(operator, []).append(folder)
    rng = random.Random(seed)
    made = 0
    while made < count:
        for operator, folders in sorted(by_operator.items()):
            folder = rng.choice(folders)
            model = _fixed(folder)
            changes = _changes(model, rng)
            if not changes:
                continue
            words, change = rng.choice(changes)
            change()
            yield f"{made}: {operator} ({folder.name}): {words}", bytes(model.SerializeToString())
            made += 1
            if made == count:
                return


def _fixed(folder: Path) -> onnx.ModelProto:
    """The model of a node test, its small integer inputs as weights."""
    model = onnx.load(folder / "model.onnx")
    inputs = list(model.graph.input)
    for position, value in enumerate(inputs):
        path = folder / "test_data_set_0" / f"input_{position}.pb"
        if not path.exists() or not value.type.HasField("tensor_type"):
            continue
        tensor = TensorProto.FromString(path.read_bytes())
        if tensor.data_type not in (TensorProto.INT64, TensorProto.INT32):
            continue
        array = numpy_helper.to_array(tensor)
        if position > 0 and array.size <= _SMALL:
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
                (words, lambda a=attribute, p=place: a.ints.__setitem__(p, number))
                for place in range(len(attribute.ints))
            ]
    for tensor in model.graph.initializer:
        if tensor.raw_data:
            array = numpy_helper.to_array(tensor).copy()
            limits = np.iinfo(array.dtype)
            value = min(max(number, limits.min), limits.max)
            for place in range(array.size):

                def replace(
                    t: TensorProto = tensor, a: np.ndarray = array, p: int = place, v: int = value
                ) -> None:
                    a.reshape(-1)[p] = v
                    t.raw_data = a.tobytes()

                found.append((f"{tensor.name}[{place}] = {value}", replace))
    for given in model.graph.input:
        for axis, dim in enumerate(given.type.tensor_type.shape.dim):
            found.append(
                (
                    f"{given.name} has {number} on axis {axis}",
                    lambda d=dim: setattr(d, "dim_value", number),
                )
            )
    return found

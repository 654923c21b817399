"""Hostile model files: seeded mutations of small models, each imported, compiled and run in one child process.

    python -m tests.frontend.onnx.mutations COUNT SEED

prints one line of JSON per mutation: what was done to which model, and how it ended: "error" (a TilewrightError, with
its class), "right" (the same results as the oracle, and as onnx's reference where that runs), or "bad".
The process limits its own memory; a mutation that takes too long is a bad end too.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.frontend.onnx.checking import compare, expected_of, floats, model_of
from tilewright.errors import InternalError, TilewrightError
from tilewright.frontend.onnx import import_onnx
from tilewright.graph.oracle import evaluate
from tilewright.runtime import tree

MAX_BYTES = 64 << 20  # of one tensor
EXTRA_MEMORY = 3 << 30  # address space beyond what the imports take
SECONDS = 20


def models() -> dict[str, onnx.ModelProto]:
    def with_weights(model: onnx.ModelProto, **weights: np.ndarray) -> onnx.ModelProto:
        model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in weights.items())
        return model

    network = with_weights(
        model_of(
            "c = Conv <pads: ints = [1, 1, 1, 1]> (x, w, b) r = Relu (c)"
            " p = MaxPool <kernel_shape: ints = [2, 2]> (r) f = Flatten (p) y = Gemm <transB: int = 1> (f, v, d)",
            {"x": floats(1, 2, 6, 6)},
        ),
        w=floats(4, 2, 3, 3),
        b=floats(4),
        v=floats(5, 36),
        d=floats(5),
    )
    shapes = model_of(
        "s = Shape (x) z = Constant <value: tensor = int64 {0}> () g = Gather (s, z)"
        " a = Constant <value_ints: ints = [0]> () u = Unsqueeze (g, a) m = Constant <value_ints: ints = [-1]> ()"
        " t = Concat <axis: int = 0> (u, m) h = Reshape (x, t) k = Constant <value_ints: ints = [2, 3]> ()"
        " y = Tile (h, k)",
        {"x": floats(2, 3, 4)},
    )
    control = model_of(
        "n = Constant <value: tensor = int64 {3}> () c = Constant <value: tensor = bool {1}> () y, q = Loop (n, c, x)"
        " <body = body (int64 i, bool going, float[3] s) => (bool on, float[3] t, float[3] o)"
        " { on = Identity (going) t = Add (s, x) o = Mul (t, t) }>",
        {"x": floats(3)},
        "y q",
    )
    quantised = with_weights(
        model_of(
            "q = QuantizeLinear (x, s, z) i = MatMulInteger (q, w, z) f = Cast <to: int = 1> (i) y = Mul (f, s)",
            {"x": floats(3, 8)},
        ),
        s=np.float32(0.1).reshape(()),
        z=np.array(3, np.uint8),
        w=np.arange(-20, 20, dtype=np.int8).reshape(8, 5),
    )
    return {"network": network, "shapes": shapes, "control": control, "quantised": quantised}


# -- mutations --------------------------------------------------------------------------------------------------------


def flip(rng: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def splice(rng: random.Random, content: bytes) -> bytes:
    begin, length = rng.randrange(len(content)), rng.randrange(1, 40)
    return content[:begin] + rng.randbytes(rng.randrange(40)) + content[begin + length :]


def structural(
    change: Callable[[random.Random, onnx.ModelProto], None],
) -> Callable[[random.Random, bytes], bytes]:
    def mutate(rng: random.Random, content: bytes) -> bytes:
        model = onnx.ModelProto.FromString(content)
        change(rng, model)
        return bytes(model.SerializeToString())

    return mutate


def rewire(rng: random.Random, model: onnx.ModelProto) -> None:
    """Some input of some node becomes some other value: cycles, wrong types, missing values."""
    names = [name for node in model.graph.node for name in (*node.input, *node.output)] + ["nowhere", ""]
    node = rng.choice([node for node in model.graph.node if node.input])
    node.input[rng.randrange(len(node.input))] = rng.choice(names)


def duplicate(rng: random.Random, model: onnx.ModelProto) -> None:
    names = [name for node in model.graph.node for name in node.output]
    rng.choice(model.graph.node).output[0] = rng.choice(names)


def absurd(rng: random.Random, model: onnx.ModelProto) -> None:
    """Dimensions and integer attributes that no model has."""
    size = rng.choice([0, -1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), 7])
    positions: list[tuple[Any, int]] = [
        (tensor.dims, n) for tensor in model.graph.initializer for n in range(len(tensor.dims))
    ]
    for node in model.graph.node:
        for attribute in node.attribute:
            positions += [(attribute.ints, n) for n in range(len(attribute.ints))]
            positions += [(attribute.t.dims, n) for n in range(len(attribute.t.dims))]
    dims = model.graph.input[0].type.tensor_type.shape.dim
    if not positions or rng.random() < 0.3:
        rng.choice(list(dims)).dim_value = size
        return
    values, position = rng.choice(positions)
    values[position] = size


def forget(rng: random.Random, model: onnx.ModelProto) -> None:
    """A node, an initialiser, an input or an output is gone."""
    lists = [model.graph.node, model.graph.initializer, model.graph.input, model.graph.output]
    chosen = rng.choice([entries for entries in lists if entries])
    del chosen[rng.randrange(len(chosen))]


def retype(rng: random.Random, model: onnx.ModelProto) -> None:
    kind = rng.randrange(0, 30)
    if model.graph.initializer and rng.random() < 0.5:
        rng.choice(model.graph.initializer).data_type = kind
    else:
        model.graph.input[0].type.tensor_type.elem_type = kind


def rename(rng: random.Random, model: onnx.ModelProto) -> None:
    operators = [
        "Loop",
        "If",
        "Concat",
        "Conv",
        "TopK",
        "Resize",
        "Expand",
        "Nothing",
        "Range",
        "Einsum",
        "Pad",
    ]
    rng.choice(model.graph.node).op_type = rng.choice(operators)


MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "flip": flip,
    "truncate": truncate,
    "splice": splice,
    **{f.__name__: structural(f) for f in (rewire, duplicate, absurd, forget, retype, rename)},
}


def mutated(count: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """(model, mutation, file) for every mutation; the same for the same seed."""
    contents = {name: bytes(model.SerializeToString(deterministic=True)) for name, model in models().items()}
    rng = random.Random(seed)
    for number in range(count):
        name = rng.choice(sorted(contents))
        kind = list(MUTATIONS)[number % len(MUTATIONS)]
        yield name, kind, MUTATIONS[kind](rng, contents[name])


# -- the child --------------------------------------------------------------------------------------------------------


def attempt(path: Path) -> tuple[str, str]:
    import tilewright

    try:
        imported = import_onnx(path, max_bytes=MAX_BYTES)
        rng = np.random.default_rng(0)
        inputs = {
            node.name: (rng.standard_normal(node.shape) * 3).astype(node.dtype.numpy)
            for node in imported.graph.inputs
        }
        exact = evaluate(imported.graph, list(inputs.values()), precise=False)
        result = tilewright.compile(imported, numerics="strict", threads=1)(*inputs.values())
    except InternalError as error:
        return "bad", f"{type(error).__name__}: {error.message}"
    except TilewrightError as error:
        return "error", type(error).__name__
    leaves, _ = tree.flatten(result)
    compare(leaves if len(exact) != 1 else leaves[0], exact, 1e-3, 1e-4)
    try:
        reference = expected_of(onnx.load(path), inputs)
    except Exception as error:  # the reference is not made for models like these
        return "right", f"reference: {type(error).__name__}"
    compare(leaves if len(exact) != 1 else leaves[0], reference, 1e-3, 1e-4)
    return "right", ""


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for name, kind, content in mutated(count, seed):
            path.write_bytes(content)
            signal.alarm(SECONDS)
            try:
                status, detail = attempt(path)
            except BaseException as error:
                status, detail = "bad", f"{type(error).__name__}: {str(error)[:500]}"
            signal.alarm(0)
            print(json.dumps({"model": name, "kind": kind, "status": status, "detail": detail}), flush=True)


if __name__ == "__main__":
    main()

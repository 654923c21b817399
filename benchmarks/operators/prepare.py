"""Before anybody's turn, in a process of its own: the right answer in float64, and the operator as an ONNX file."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np

from baselines.job import Run, save_arrays
from operators.cases import Case, OperatorJob
from operators.table import Arrays

_LINE = 64  # bytes


def load(job: OperatorJob) -> Run:
    case = job.case
    inputs, weights = map(torch_arrays, integer_operands(case)) if case.int8 else torch_operands(case)
    exact_inputs, exact_weights = (
        [array.double() if array.is_floating_point() or case.int8 else array for array in arrays]
        for arrays in (inputs, weights)
    )
    exact = case.formula.torch(exact_inputs, exact_weights, case.sizes)
    save_arrays(job.reference_file, [exact.numpy()])
    save_arrays(job.moved_file, [np.array(bytes_moved(case))])
    try:
        if case.int8:
            _write_integer_model(case, job)
        else:
            _export(torch_module(case), tuple(inputs), job)
    except (
        Exception
    ) as error:  # an exporter may raise anything; those who need the file will say why it is missing
        job.onnx_error_file.write_text(
            f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
        )
    return lambda: np.zeros(1)


def torch_arrays(arrays: Arrays) -> list[Any]:
    import torch

    return [torch.from_numpy(array) for array in arrays]


def torch_operands(case: Case) -> tuple[list[Any], list[Any]]:
    """(inputs, weights) as tensors of the case's type, integers as they are."""
    import torch

    dtype = getattr(torch, case.dtype)

    def typed(array: np.ndarray) -> Any:
        tensor = torch.from_numpy(array)
        kind = dtype if array.dtype == np.float32 else tensor.dtype
        # NumPy's memory, which is in huge pages, from where a cache line begins, as PyTorch's tensors do.
        memory = np.empty(array.size * kind.itemsize + _LINE, np.uint8)
        begin = -memory.ctypes.data % _LINE
        lines = torch.from_numpy(memory[begin : begin + array.size * kind.itemsize])
        return lines.view(kind).view(array.shape).copy_(tensor)

    inputs, weights = case.operands()
    return [typed(array) for array in inputs], [typed(array) for array in weights]


def bytes_moved(case: Case) -> int:
    """Each operand once and the result once."""
    inputs, weights = torch_operands(case)
    result = torch_module(case).to("meta")(*(x.to("meta") for x in inputs))
    read = sum(w.nbytes for w in weights)
    if case.formula.read is not None:
        read = case.formula.read(case.sizes) * weights[0].itemsize
    return int(sum(x.nbytes for x in inputs) + read + result.nbytes)


def torch_module(case: Case) -> Any:
    """The operator with its weights as a module of its inputs."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            _, weights = torch_operands(case)
            self.weights = torch.nn.ParameterList(
                torch.nn.Parameter(weight, requires_grad=False) for weight in weights
            )

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return case.formula.torch(inputs, list(self.weights), case.sizes)

    return Module().eval()


def _export(module: Any, inputs: tuple[Any, ...], job: OperatorJob) -> None:
    import torch

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, inputs, str(job.onnx_file), dynamo=True, verbose=False)


# -- int8 -------------------------------------------------------------------------------------------------------------


def integer_operands(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Unsigned bytes for the input, signed ones for the weights, as most quantised models have them; no bias."""
    inputs, weights = case.operands()
    rng = np.random.default_rng(0)
    unsigned = [rng.integers(0, 256, array.shape, dtype=np.uint8) for array in inputs]
    signed = [rng.integers(-127, 128, weights[0].shape, dtype=np.int8)]
    zeros = [np.zeros(array.shape, np.int8) for array in weights[1:]]
    return unsigned, signed + zeros


def _write_integer_model(case: Case, job: OperatorJob) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    inputs, weights = integer_operands(case)
    weight = weights[0].T.copy() if case.operator == "matmul" else weights[0]
    attributes: dict[str, Any] = {}
    if case.operator == "conv":
        pads = case.sizes["padding"]
        attributes = {
            "strides": case.sizes["stride"],
            "dilations": case.sizes["dilation"],
            "pads": (*pads, *pads),
            "group": case.sizes["groups"],
        }
    kind = "MatMulInteger" if case.operator == "matmul" else "ConvInteger"
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", "w"], ["y"], **attributes)],
        "integer",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, inputs[0].shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model), str(job.onnx_file))

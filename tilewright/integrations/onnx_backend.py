"""Tilewright as an ONNX backend: `onnx.backend.base.Backend` over `tilewright.compile`.

    rep = TilewrightBackend.prepare(onnx.load("model.onnx"))
    outputs = rep.run([x])

Kernels have fixed shapes, and an ONNX model may compute shapes from the *values* of its inputs: the target of a
Reshape, the bounds of a Slice, the axes of a sum, the k of a TopK. So a model is compiled for its first call: for the
shapes of all inputs, and for the values of those that decide shapes, which become constants. Later calls are checked
against both; other shapes or values compile another variant, and the last `MAX_VARIANTS` are kept.
(`tilewright.compile(..., dynamic=True)` handles shapes alone, with a bounded number of compilations.) `prepare`
compiles a model that needs neither, so that errors are reported early.

Numerics are strict by default, because the standard defines each operator separately, including its rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep, namedtupledict

import tilewright
from tilewright.errors import InputError, TargetError, UnknownShapeError, UnsupportedOpsError
from tilewright.frontend.onnx import import_onnx
from tilewright.runtime.dispatch import Policy
from tilewright.runtime.model import CompiledModel

MAX_VARIANTS = Policy().limit


@dataclass(frozen=True)
class ShapeVariant:
    model: CompiledModel
    pinned: Mapping[str, np.ndarray]  # inputs whose values are compiled in, by name

    def serves(self, inputs: Mapping[str, Any]) -> bool:
        leaves = dict(_leaves(inputs))
        return all(np.array_equal(leaves[name], value) for name, value in self.pinned.items())


class TilewrightRep(BackendRep):
    """A prepared model: call it with its inputs, in order or by name."""

    def __init__(self, model: onnx.ModelProto, options: Mapping[str, Any]) -> None:
        self.model = model
        self.options = dict(options)
        initialised = {tensor.name for tensor in model.graph.initializer}
        self.input_names = [value.name for value in model.graph.input if value.name not in initialised]
        self.output_names = [value.name for value in model.graph.output]
        self.variants: OrderedDict[Any, list[ShapeVariant]] = OrderedDict()
        self._result = namedtupledict("Outputs", self.output_names)
        try:
            self.general: CompiledModel | None = self._compiled(import_onnx(model))
        except (UnknownShapeError, UnsupportedOpsError):
            self.general = (
                None  # a call may provide what is missing; if not, the first call reports the error
            )

    def run(self, inputs: Any, **kwargs: Any) -> Any:
        """The outputs, as a namedtuple in the model's order."""
        if kwargs:
            raise InputError(f"unknown argument(s) {', '.join(kwargs)}")
        named = self._named(inputs)
        model = self.general
        if model is None or not self._fits(model, named):
            model = self.variant(named).model
        results = model(*(named[name] for name in self.input_names))
        return self._result(*([results] if len(self.output_names) == 1 else results))

    def variant(self, named: Mapping[str, Any]) -> ShapeVariant:
        """The variant for these inputs; it is compiled if there is none yet."""
        key = tuple((name, leaf.dtype.str, leaf.shape) for name, leaf in _leaves(named))
        known = self.variants.setdefault(key, [])
        self.variants.move_to_end(key)
        for variant in known:
            if variant.serves(named):
                return variant
        imported = import_onnx(self.model, dict(named), pin=True)
        variant = ShapeVariant(self._compiled(imported), imported.pinned)
        known.insert(0, variant)
        while sum(map(len, self.variants.values())) > MAX_VARIANTS:
            oldest = next(entries for entries in self.variants.values() if entries)
            oldest.pop()
        return variant

    def _compiled(self, imported: Any) -> CompiledModel:
        return tilewright.compile(imported, **self.options)

    def _fits(self, model: CompiledModel, named: Mapping[str, Any]) -> bool:
        leaves = _leaves(named)
        return len(leaves) == len(model.plan.inputs) and all(
            tuple(spec.shape) == leaf.shape for spec, (_, leaf) in zip(model.plan.inputs, leaves, strict=True)
        )

    def _named(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            missing = [name for name in self.input_names if name not in inputs]
            if missing:
                raise InputError(f"the inputs {', '.join(missing)} are missing")
            return {name: _as_value(inputs[name]) for name in self.input_names}
        values = inputs if isinstance(inputs, (tuple, list)) else [inputs]
        if len(values) != len(self.input_names):
            raise InputError(f"the model takes {len(self.input_names)} inputs, {len(values)} were given")
        return {name: _as_value(value) for name, value in zip(self.input_names, values, strict=True)}


class TilewrightBackend(Backend):
    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> TilewrightRep:
        """`kwargs` are options of `tilewright.compile`; `numerics` is "strict" by default."""
        if not cls.supports_device(device):
            raise TargetError(f"no device is called {device!r}; this version compiles for the CPU")
        return TilewrightRep(model, {"numerics": "strict", **kwargs})

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> Any:
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a node as a model of its own. The option `opset_version` gives its opset."""
        opset = kwargs.pop("opset_version", onnx.defs.onnx_opset_version())
        names = [name for name in node.input if name]
        values = [inputs[name] for name in names] if isinstance(inputs, Mapping) else list(inputs)
        given = [
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), np.asarray(value).shape
            )
            for name, value in zip(names, values, strict=True)
        ]
        made = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "node", given, made)
        domain = "" if node.domain in ("", "ai.onnx") else node.domain
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(domain, opset)])
        return cls.run_model(model, values, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":", maxsplit=1)[0].upper() == "CPU"


def _as_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_value(item) for item in value]
    return None if value is None else np.asarray(value)


def _leaves(named: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
    """Every array among the inputs, with the importer's name for it."""
    found: list[tuple[str, np.ndarray]] = []
    for name, value in named.items():
        if isinstance(value, list):
            found += [(f"{name}[{position}]", item) for position, item in enumerate(value)]
        elif value is not None:
            found.append((name, value))
    return found

"""The layer of an ONNX node, by the name that the model's author gave it.

Files have no layers, only node names. PyTorch's exporters write the layer into them: the older one as
`/layer1/layer1.0/conv1/Conv`, the newer one as a list of scopes in the node's metadata. Other names are used
unchanged.
"""

from __future__ import annotations

import ast
import re

import onnx

_SCOPES = "pkg.torch.onnx.name_scopes"
_NUMBERED = re.compile(r"_\d+$")


def layer_of(proto: onnx.NodeProto) -> str:
    """'layer1.0.conv1'; or the node's own name, or else its result's."""
    for entry in proto.metadata_props:
        if entry.key == _SCOPES:
            scopes = _listed(entry.value)
            if len(scopes) > 1 and scopes[-2]:
                return scopes[-2]
    scopes = proto.name.split("/")
    if len(scopes) > 2 and not scopes[0] and _NUMBERED.sub("", scopes[-1]) == proto.op_type:
        return _joined(scopes[1:-1])
    return proto.name or next((name for name in proto.output if name), "")


def _joined(scopes: list[str]) -> str:
    """Each scope is a layer's name relative to the previous one, or repeats its prefix: `layer1`, `layer1.0`,
    `conv1`."""
    path: list[str] = []
    for scope in scopes:
        if path and scope.startswith(f"{path[-1]}."):
            path.pop()
        path.append(scope)
    return ".".join(path)


def _listed(text: str) -> list[str]:
    """Parse a list of strings in Python syntax; None for other text."""
    try:
        found = ast.literal_eval(text) if len(text) < 10_000 else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else []

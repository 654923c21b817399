"""The result of a frontend: a graph, and the mapping from a call of the model to its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tilewright.graph.ir import Graph
from tilewright.runtime import tree


@dataclass(frozen=True)
class ImportedModel:
    """Leaf i of `input_tree`, the `runtime.tree` spec of (args, kwargs), is input i of the graph; leaf i of
    `output_tree`, the spec of the result, is output i.

    The classes of namedtuples, dataclasses and ModelOutputs in either are known to `runtime.tree` in this process, so
    that `tree.unflatten` rebuilds the original ones.
    """

    graph: Graph
    input_names: tuple[str, ...]  # of the graph's inputs, in order
    input_tree: tree.Spec
    output_tree: tree.Spec
    argument_names: tuple[str, ...]  # parameters of the model's call that can be passed by name
    # Inputs whose value the graph assumes, by name: a call with another value needs another graph.
    pinned: Mapping[str, np.ndarray] = field(default_factory=dict)

"""Names of layers, as tables show them."""

from __future__ import annotations

import pytest

from tilewright.support.layers import fused_name, shared_name


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ((), ""),
        (("fc",), "fc"),
        (("conv1", "bn1", "relu"), "conv1 + bn1 + relu"),
        (("layer1.0.conv1", "layer1.0.bn1", "layer1.0.relu"), "layer1.0.conv1 + bn1 + relu"),
        # A block says less than the layer inside of it.
        (("layer1.0", "layer1.0.conv1", "layer1.0.conv1"), "layer1.0.conv1"),
        (("down.0", "down.1", "add"), "down.0 + 1 + add"),
        (("layers.0.attention.out", "layers.0.add"), "layers.0.attention.out + add"),
        (("layer1.1.conv2", "layer2.0.conv1"), "layer1.1.conv2 + layer2.0.conv1"),
        (
            ("/layer1/layer1.0/conv1/Conv", "/layer1/layer1.0/relu/Relu"),
            "/layer1/layer1.0/conv1/Conv + /layer1/layer1.0/relu/Relu",
        ),
        (tuple(f"block.{n}" for n in range(9)), "block.0 + 1 + 2 + 3 + 5 more"),
        (("ends.with.dot.", "x"), "ends.with.dot. + x"),
    ],
)
def test_one_name_for_the_layers_of_a_kernel(layers: tuple[str, ...], name: str) -> None:
    assert fused_name(layers) == name


def test_one_name_for_the_calls_of_a_kernel() -> None:
    assert shared_name([]) == shared_name(["", ""]) == ""
    assert shared_name(["a", "a"]) == "a"
    assert shared_name(["a", "", "b", "c"]) == "a and 2 more"

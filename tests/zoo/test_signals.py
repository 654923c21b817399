"""With random weights the output must depend visibly on the input and on every weight; see `zoo/init.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.zoo.small import SMALL_MODELS
from tilewright import zoo

# The project's end-to-end tolerance is 1e-4. What changes the output by less could be lost without a test failing.
VISIBLE = 2e-4

# These cannot be seen under any weights. A key bias adds the same to all scores of a query, which softmax ignores. The
# values of DETR's first self-attention are projected from zeros: each is the bias, and their average is, too.
INVISIBLE = (
    "key.bias",
    "decoder.0.self_attention.query.weight",
    "decoder.0.self_attention.query.bias",
    "decoder.0.self_attention.key.weight",
    "decoder.0.self_attention.value.weight",
)


def relative_change(output: list[Tensor], reference: list[Tensor]) -> float:
    """The largest over the tensors of an output: a coarse pyramid level is small compared with the finest one."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(output, reference, strict=True))


def run(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return tree_leaves(model(*inputs))


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_outputs_are_sane_and_independent_of_the_batch(name: str) -> None:
    model = zoo.build(name, small=True)
    inputs = zoo.example_inputs(name, batch=3, small=True)
    batched = run(model, inputs)
    for tensor in batched:
        assert tensor.isfinite().all()
        assert 0.05 < tensor.std() < 20

    samples = [run(model, tuple(tensor[i : i + 1] for tensor in inputs)) for i in range(3)]
    for i, sample in enumerate(samples):
        assert relative_change([tensor[i : i + 1] for tensor in batched], sample) < 1e-5
    assert relative_change(samples[1], samples[0]) > 0.05


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_every_weight_is_visible(name: str) -> None:
    model = zoo.build(name, small=True)
    inputs = zoo.example_inputs(name, small=True)
    reference = run(model, inputs)
    generator = torch.Generator().manual_seed(0)
    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or key.endswith(INVISIBLE):
            continue
        saved = tensor.clone()
        tensor += 0.1 * saved.std() * torch.randn(saved.shape, generator=generator)
        assert relative_change(run(model, inputs), reference) > VISIBLE, key
        tensor.copy_(saved)

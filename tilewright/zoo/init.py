"""Random weights under which a wrong kernel shows.

The zoo is used to compare a compiled model with the original, mostly with random weights. The usual random weights
make that comparison blind. PyTorch's default shrinks the signal at every rectified layer until only biases are left:
the VGG-16 outputs for two different images agree to 7e-5, better than the tolerance of the comparison. A fresh batch
norm is the identity, so one that is folded wrongly changes nothing. A residual sum over fifty layers may grow until one
branch drowns the others. The weights drawn here keep every layer's contribution visible at the output:

- A convolution has variance 2 / fan-in (He et al. 2015): its input is taken to be rectified, which halves the second
  moment. A linear layer or embedding reads normalised values and has variance 1 / fan-in, or a fixed deviation.
- Batch norms get a random mean, variance, scale and shift, and their average gain is 1: no statistic is 0 or 1, so
  none can be dropped or swapped unnoticed, yet depth does not amplify.
- The last layer of each of N residual branches is scaled by 1 / sqrt(N). The sum then grows by a constant factor
  however deep the model is (the GPT-2 rule), and in a post-norm model the first layer keeps a constant share of the
  last.

A block tells what only it can know by defining one or both of these methods:

- `residual_ends() -> Iterable[nn.Module]`: the layers whose output is added to a shortcut.
- `init_gains() -> Mapping[nn.Module, float]`: layers whose deviation differs from the rules above, and by what factor.

All numbers come from one generator, drawn in the order of `model.modules()`, so a seed fixes every bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

OFFSET_STD = 0.1  # biases, shifts and running means: large enough to be seen, too small to drown the signal
EMBEDDING_STD = 0.5  # tables of tokens and positions: of the order of the residual stream they start
SCALE_RANGE = (0.8, 1.2)  # scales of norms
VARIANCE_RANGE = (0.6, 1.4)  # running variances
UNRECTIFIED = math.sqrt(
    0.5
)  # the gain of a convolution whose input no activation has halved; see `init_gains` above


def initialise(model: nn.Module, seed: int) -> None:
    """Overwrite every parameter and buffer of `model` (allocated, contents arbitrary) as this module's head says."""
    generator = torch.Generator().manual_seed(seed)
    gains = _gains(model)
    with torch.no_grad():
        for module in model.modules():
            _fill(module, gains.get(module, 1.0), generator)


def _gains(model: nn.Module) -> dict[nn.Module, float]:
    gains: dict[nn.Module, float] = {}
    ends: list[nn.Module] = []
    for module in model.modules():
        if hasattr(module, "init_gains"):
            gains.update(module.init_gains())
        if hasattr(module, "residual_ends"):
            ends.extend(module.residual_ends())
    for end in ends:
        gains[end] = gains.get(end, 1.0) / math.sqrt(len(ends))
    return gains


def _fill(module: nn.Module, gain: float, generator: torch.Generator) -> None:
    """Fill what `module` owns itself; its children have their own turn."""
    if isinstance(module, nn.Conv2d):
        fan_in = module.weight[0].numel()
        _weight_and_bias(module, gain * math.sqrt(2 / fan_in), gain, generator)
    elif isinstance(module, nn.ConvTranspose2d):
        # Strides spread the kernel: an output pixel sees only kernel / stride taps in each direction.
        taps = math.prod(module.kernel_size) / math.prod(module.stride)
        fan_in = module.in_channels // module.groups * taps
        _weight_and_bias(module, gain * math.sqrt(2 / fan_in), gain, generator)
    elif isinstance(module, nn.Linear):
        _weight_and_bias(module, gain / math.sqrt(module.in_features), gain, generator)
    elif isinstance(module, nn.Embedding):
        module.weight.normal_(0, gain * EMBEDDING_STD, generator=generator)
    elif isinstance(module, nn.LayerNorm):
        module.weight.uniform_(*SCALE_RANGE, generator=generator).mul_(gain)
        module.bias.normal_(0, gain * OFFSET_STD, generator=generator)
    elif isinstance(module, nn.BatchNorm2d):
        _batch_norm(module, gain, generator)
    else:
        # Class tokens, learned positions and queries: parameters that a model holds directly.
        for parameter in module.parameters(recurse=False):
            parameter.normal_(0, gain * EMBEDDING_STD, generator=generator)
        if unknown := [name for name, _ in module.named_buffers(recurse=False)]:
            raise TypeError(f"no initialisation rule for the buffers {unknown} of {type(module).__name__}")


def _weight_and_bias(
    module: nn.Conv2d | nn.ConvTranspose2d | nn.Linear, std: float, gain: float, generator: torch.Generator
) -> None:
    module.weight.normal_(0, std, generator=generator)
    if module.bias is not None:
        module.bias.normal_(0, gain * OFFSET_STD, generator=generator)


def _batch_norm(module: nn.BatchNorm2d, gain: float, generator: torch.Generator) -> None:
    buffers: dict[str, Tensor] = dict(module.named_buffers(recurse=False))
    buffers["running_mean"].normal_(0, OFFSET_STD, generator=generator)
    buffers["running_var"].uniform_(*VARIANCE_RANGE, generator=generator)
    buffers["num_batches_tracked"].zero_()
    module.weight.uniform_(*SCALE_RANGE, generator=generator).mul_(gain * _BATCH_NORM_SCALE)
    module.bias.normal_(0, gain * OFFSET_STD, generator=generator)


def _batch_norm_scale() -> float:
    """The factor on batch-norm scales that keeps a unit second moment a unit second moment, on average.

    With input x of variance 1, mean m and shift b of deviation OFFSET_STD, and scale g, the output's second moment is
    E[g^2] E[1/v] (1 + Var m) + Var b. The expectations below are those of the uniform distributions of g and v.
    """
    low, high = SCALE_RANGE
    scale_squared = (high**3 - low**3) / (3 * (high - low))
    low, high = VARIANCE_RANGE
    inverse_variance = math.log(high / low) / (high - low)
    offset = OFFSET_STD**2
    return math.sqrt((1 - offset) / (scale_squared * inverse_variance * (1 + offset)))


_BATCH_NORM_SCALE = _batch_norm_scale()

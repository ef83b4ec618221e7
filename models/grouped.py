"""Several networks of one architecture as one: their layers run as grouped layers, in one call for all.

N networks of a ``nn.Sequential`` are held as one set of parameters, joined along their first axis, and see one batch of
(B, N * C, H, W): channels n * C to (n + 1) * C are network n's. Convolutions run with N groups; batch and instance
normalisation work channel by channel anyway. Every network computes what it would compute alone, up to rounding, but a
layer costs one call instead of N: that is what a GPU needs, and what makes channels-last worth while on a CPU.

Axes: N networks, B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def join(parameter_sets: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return N parameter sets as one, each tensor joined along its first axis; counters become (N,)."""
    return {
        name: torch.cat([torch.atleast_1d(parameters[name]) for parameters in parameter_sets])
        for name in parameter_sets[0]
    }


def part(joined: Mapping[str, Tensor], index: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of one network again, shaped as in ``like``."""
    return {
        name: tensor.detach()[index * len_of(like[name]) : (index + 1) * len_of(like[name])]
        .reshape(like[name].shape)
        .clone(memory_format=torch.contiguous_format)
        for name, tensor in joined.items()
    }


def len_of(tensor: Tensor) -> int:
    """Return the size of the first axis; 1 for a scalar."""
    return len(tensor) if tensor.ndim else 1


def run(layers: nn.Sequential, parameters: Mapping[str, Tensor], num_networks: int, x: Tensor) -> list[Tensor]:
    """Return the input and the output of every layer, in training mode.

    Args:
        layers: convolutions, transposed convolutions, batch and instance normalisation, and activations without
            parameters; says what each layer is, its own parameters are not used.
        parameters: of N networks, joined, named as in ``layers``. Running statistics are updated in place.
        num_networks: N.
        x: (B, N * C, H, W).

    Raises:
        TypeError: A layer that has no grouped form here.
    """
    trace = [x]
    for name, layer in layers.named_children():
        trace.append(_forward(layer, name, parameters, num_networks, trace[-1]))
    return trace


def input_gradient(
    layers: nn.Sequential, parameters: Mapping[str, Tensor], num_networks: int, trace: Sequence[Tensor]
) -> Tensor:
    """Return the gradient of the sum of all outputs with respect to the input, (B, N * C, H, W).

    Written out layer by layer from the values that ``run`` returned, so it is an ordinary differentiable expression:
    a gradient penalty through it needs no second derivative of a convolution. Activations are piecewise linear, so
    their slopes are constants.

    Raises:
        TypeError: A layer whose derivative is not written out here.
    """
    gradient = torch.ones_like(trace[-1])
    children = list(layers.named_children())
    for place in reversed(range(len(children))):
        name, layer = children[place]
        gradient = _backward(layer, name, parameters, num_networks, trace[place], gradient)
    return gradient


def _forward(layer: nn.Module, name: str, parameters: Mapping[str, Tensor], num_networks: int, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(
            x, parameters[f"{name}.weight"], None, layer.stride, layer.padding, layer.dilation, num_networks
        )
    if isinstance(layer, nn.ConvTranspose2d):
        weight = parameters[f"{name}.weight"]
        return F.conv_transpose2d(x, weight, None, layer.stride, _pixels(layer.padding), groups=num_networks)
    if isinstance(layer, nn.BatchNorm2d):
        parameters[f"{name}.num_batches_tracked"].add_(1)
        mean, variance = parameters[f"{name}.running_mean"], parameters[f"{name}.running_var"]
        scale, shift = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        return F.batch_norm(x, mean, variance, scale, shift, True, layer.momentum or 0.0, layer.eps)
    if isinstance(layer, nn.InstanceNorm2d):
        normalised, _ = _standardised(x, layer.eps)
        scale, shift = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        return normalised * scale[:, None, None] + shift[:, None, None]
    if not any(True for _ in layer.parameters()):
        result: Tensor = layer(x)
        return result
    raise TypeError(f"{type(layer).__name__} has no grouped form; add one to replayfleet.models.grouped")


def _backward(
    layer: nn.Module, name: str, parameters: Mapping[str, Tensor], num_networks: int, x: Tensor, gradient: Tensor
) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        if isinstance(layer.padding, str):
            raise TypeError("a convolution with padding by name has no derivative here; give it in pixels")
        weight = parameters[f"{name}.weight"]
        return F.conv_transpose2d(gradient, weight, None, layer.stride, _pixels(layer.padding), groups=num_networks)
    if isinstance(layer, nn.LeakyReLU):
        return gradient * torch.where(x > 0, 1.0, layer.negative_slope)
    if isinstance(layer, nn.InstanceNorm2d):
        normalised, inverse_deviation = _standardised(x, layer.eps)
        scaled = gradient * parameters[f"{name}.weight"][:, None, None]
        along = (scaled * normalised).mean(dim=(2, 3), keepdim=True)
        return inverse_deviation * (scaled - scaled.mean(dim=(2, 3), keepdim=True) - normalised * along)
    raise TypeError(f"{type(layer).__name__} has no derivative here; add one to replayfleet.models.grouped")


def _pixels(padding: str | tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(padding, str):
        raise TypeError(f"padding {padding!r} has no grouped form; give it in pixels")
    return padding


def _standardised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return each map with mean 0 and variance 1 (biased), and 1 / its standard deviation."""
    centred = x - x.mean(dim=(2, 3), keepdim=True)
    inverse_deviation = torch.rsqrt((centred * centred).mean(dim=(2, 3), keepdim=True) + eps)
    return centred * inverse_deviation, inverse_deviation

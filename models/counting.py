"""Parameters and FLOPs, counted as the papers count them.

The FLOPs of pFedGRP's Table 6 are multiply-accumulates in the manner of the ``thop`` tool: convolution and linear
layers by their MACs, a normalisation with affine parameters as 4 operations per element, activations and pooling as
nothing, and a transposed convolution as out_elements x in_channels x kernel^2, which over-counts it by its stride^2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def count_parameters(module: nn.Module) -> int:
    """Return the number of trainable scalars; buffers don't count."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_flops(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the FLOPs of one forward pass over an input of shape (1, *input_shape), in eval mode.

    Args:
        module: on any device, also meta; its mode is restored.
        input_shape: (C, H, W) for images, (Z,) for latents.
    """
    total = 0

    def add(layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        nonlocal total
        total += _layer_flops(layer, output)

    leaves = [layer for layer in module.modules() if not any(True for _ in layer.children())]
    handles = [leaf.register_forward_hook(add) for leaf in leaves]
    was_training = module.training
    device = next(module.parameters()).device
    try:
        with torch.no_grad():
            module.eval()(torch.zeros((1, *input_shape), device=device))
    finally:
        module.train(was_training)
        for handle in handles:
            handle.remove()
    return total


def _layer_flops(layer: nn.Module, output: Tensor) -> int:
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        return output.numel() * (layer.in_channels // layer.groups) * math.prod(layer.kernel_size)
    if isinstance(layer, nn.Linear):
        return output.numel() * layer.in_features
    if isinstance(layer, (nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm)):
        return 4 * output.numel()
    return 0

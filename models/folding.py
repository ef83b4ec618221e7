"""The task model in eval mode with its BatchNorms folded into the convolutions.

In eval mode BatchNorm is affine with constants, so ``norm(conv(x)) = conv'(x)`` with ``w' = w * s``,
``b' = shift - mean * s`` and ``s = scale / sqrt(variance + eps)``. Folding costs one pass over the parameters and
spares two passes over every activation, forwards and backwards. It is differentiable with respect to all parameters,
so Eq. 3 of pFedGRP can descend through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from replayfleet.models.build import build_task_model
from replayfleet.models.resnet import ResNet
from replayfleet.models.specs import TaskSpec

EPSILON = 1e-5
"""PyTorch's default for BatchNorm, which the task model uses."""

_PARTNERS = {"conv": "norm", "conv1": "norm1", "conv2": "norm2", "0": "1"}
"""Last name of a convolution -> last name of the normalisation behind it (``0`` and ``1`` inside a shortcut)."""


def folded(spec: TaskSpec) -> tuple[nn.Module, Callable[[dict[str, Tensor]], dict[str, Tensor]]]:
    """Return what answers as the task model in eval mode, for ``functional_call``, and what makes its parameters.

    In a network that isn't a ``ResNet`` a normalisation may stand anywhere: there each is the affine map, by itself.
    """
    module: nn.Module = build_task_model(spec, device="meta").eval()
    if type(module) is ResNet:
        return build_folded_task_model(spec), fold_batch_norm
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.running_mean is not None:
            layer.forward = functools.partial(_affine, layer)
    return module, lambda parameters: parameters


def _affine(norm: Any, x: Tensor) -> Tensor:
    """Return what a BatchNorm makes of (B, C, ...); PyTorch's own has no gradient with respect to its statistics."""
    scale = torch.rsqrt(norm.running_var + norm.eps)
    shift = -norm.running_mean * scale
    if norm.affine:
        scale, shift = scale * norm.weight, shift * norm.weight + norm.bias
    shape = (-1, *[1] * (x.ndim - 2))
    answer: Tensor = x * scale.view(shape) + shift.view(shape)
    return answer


def build_folded_task_model(spec: TaskSpec) -> nn.Module:
    """Return a ``ResNet`` without normalisations, on the meta device, for ``functional_call``."""
    module: nn.Module = build_task_model(spec, device="meta").eval()
    convolutions = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d)]
    for name, layer in convolutions:
        if layer.bias is not None:
            continue  # no normalisation follows
        parent, _, last = name.rpartition(".")
        owner = module.get_submodule(parent)
        layer.bias = nn.Parameter(torch.empty(layer.out_channels, device="meta"))
        setattr(owner, _PARTNERS[last], nn.Identity())
    return module


def fold_batch_norm(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of ``build_folded_task_model`` from those of the task model.

    Args:
        parameters: the task model's state dict, or any mixture of several.
    """
    folded: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        layer, _, kind = name.rpartition(".")
        parent, _, last = layer.rpartition(".")
        norm = f"{parent}.{_PARTNERS.get(last)}" if parent else _PARTNERS.get(last)
        if kind == "weight" and tensor.ndim == 4 and f"{norm}.running_var" in parameters:
            scale = parameters[f"{norm}.weight"] * torch.rsqrt(parameters[f"{norm}.running_var"] + EPSILON)
            folded[name] = tensor * scale[:, None, None, None]
            folded[f"{layer}.bias"] = parameters[f"{norm}.bias"] - parameters[f"{norm}.running_mean"] * scale
        elif f"{layer}.running_var" not in parameters:
            folded[name] = tensor
    return folded

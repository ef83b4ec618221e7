"""Several task models as one network, for training many clients' models in one call.

``models.grouped`` says how N networks are held and laid out; this is ``models.resnet.ResNet`` in that form.

Axes: N networks, B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.models.resnet import BasicBlock, ResNet


def task_logits(module: ResNet, parameters: Mapping[str, Tensor], num_networks: int, images: Tensor) -> Tensor:
    """Return the logits (B, N, K) of N task models in training mode.

    Args:
        module: the architecture; its own parameters are not used.
        parameters: of N task models, joined. Running statistics are updated in place.
        num_networks: N.
        images: (B, N * C, H, W), channels n * C to (n + 1) * C for network n.
    """
    run = _Grouped(parameters, num_networks)
    x = F.relu(run.norm("norm", module.norm, run.convolution("conv", module.conv, images)))
    for name, block in module.blocks.named_children():
        assert isinstance(block, BasicBlock)
        x = run.block(f"blocks.{name}", block, x)
    features = x.mean(dim=(2, 3)).unflatten(1, (num_networks, -1))  # (B, N, features)
    weight = parameters["head.weight"].unflatten(0, (num_networks, -1))  # (N, K, features)
    bias = parameters["head.bias"].unflatten(0, (num_networks, -1))
    logits: Tensor = torch.einsum("bnf,nkf->bnk", features, weight) + bias
    return logits


class _Grouped:
    """Layers by name, with the parameters of N networks."""

    def __init__(self, parameters: Mapping[str, Tensor], num_networks: int) -> None:
        self._parameters, self._num = parameters, num_networks

    def convolution(self, name: str, layer: nn.Conv2d, x: Tensor) -> Tensor:
        weight = self._parameters[f"{name}.weight"]
        return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, self._num)

    def norm(self, name: str, layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
        own = {kind: self._parameters[f"{name}.{kind}"] for kind in ("running_mean", "running_var", "weight", "bias")}
        self._parameters[f"{name}.num_batches_tracked"].add_(1)
        return F.batch_norm(x, **own, training=True, momentum=layer.momentum or 0.0, eps=layer.eps)

    def block(self, name: str, block: BasicBlock, x: Tensor) -> Tensor:
        inner = F.relu(self.norm(f"{name}.norm1", block.norm1, self.convolution(f"{name}.conv1", block.conv1, x)))
        outer = self.norm(f"{name}.norm2", block.norm2, self.convolution(f"{name}.conv2", block.conv2, inner))
        shortcut = x
        if isinstance(block.shortcut, nn.Sequential):
            convolution, norm = block.shortcut
            assert isinstance(convolution, nn.Conv2d)
            assert isinstance(norm, nn.BatchNorm2d)
            shortcut = self.norm(f"{name}.shortcut.1", norm, self.convolution(f"{name}.shortcut.0", convolution, x))
        return F.relu(shortcut + outer)

"""Several networks as one: layer by layer equal to each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from replayfleet.models import grouped
from replayfleet.models.build import build_critic, build_generator, initialise
from replayfleet.models.specs import LATENT_SIZE, TaskSpec

NAMES = ("a", "b", "c")
SPECS = [TaskSpec(1, 28, NAMES, "cifar", 4), TaskSpec(3, 32, NAMES, "cifar", 4), TaskSpec(3, 64, NAMES, "imagenet", 2)]


def networks(build: Callable[[TaskSpec], nn.Module], spec: TaskSpec, num: int) -> list[Any]:
    rng = torch.Generator().manual_seed(0)
    return [initialise(build(spec), rng).double().train() for _ in range(num)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.image_size}px")
def test_grouped_generators_draw_what_each_draws_alone_and_keep_the_same_statistics(spec: TaskSpec):
    alone = networks(build_generator, spec, 3)
    joined = grouped.join([{k: v.clone() for k, v in net.layers.state_dict().items()} for net in alone])
    latents = torch.randn(5, 3, LATENT_SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    images = grouped.run(alone[0].layers, joined, 3, latents.flatten(1)[:, :, None, None])[-1].chunk(3, dim=1)
    for index, net in enumerate(alone):
        torch.testing.assert_close(images[index], net(latents[:, index]))
        own = grouped.part(joined, index, net.layers.state_dict())
        for name, tensor in net.layers.state_dict().items():
            torch.testing.assert_close(own[name], tensor, msg=name)
            assert own[name].dtype == tensor.dtype


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.image_size}px")
def test_grouped_critics_score_and_differentiate_like_each_alone(spec: TaskSpec):
    alone = networks(build_critic, spec, 2)
    joined = grouped.join([net.layers.state_dict() for net in alone])
    rng = torch.Generator().manual_seed(1)
    images = torch.randn(4, 2, *spec.image_shape, generator=rng, dtype=torch.float64, requires_grad=True)
    trace = grouped.run(alone[0].layers, joined, 2, images.flatten(1, 2))
    slopes = grouped.input_gradient(alone[0].layers, joined, 2, trace)
    for index, net in enumerate(alone):
        own = images[:, index].detach().requires_grad_(True)
        scores = net(own)
        torch.testing.assert_close(trace[-1].flatten(1)[:, index], scores)
        (expected,) = torch.autograd.grad(scores.sum(), own)
        torch.testing.assert_close(slopes.chunk(2, dim=1)[index], expected)


def test_the_written_out_gradient_is_differentiable_like_the_double_backward():
    (net,) = networks(build_critic, SPECS[0], 1)
    images = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    own = images.clone().requires_grad_(True)
    (slopes,) = torch.autograd.grad(net(own).sum(), own, create_graph=True)
    expected = torch.autograd.grad(slopes.pow(2).sum(), list(net.parameters()), allow_unused=True)

    joined = {name: tensor.detach().clone().requires_grad_(True) for name, tensor in net.layers.state_dict().items()}
    trace = grouped.run(net.layers, joined, 1, images)
    written = grouped.input_gradient(net.layers, joined, 1, trace)
    found = torch.autograd.grad(written.pow(2).sum(), list(joined.values()), allow_unused=True)
    for name, left, right in zip(joined, found, expected, strict=True):
        if right is None or not right.any():
            assert left is None or not left.any(), name
        else:
            torch.testing.assert_close(left, right, msg=name)


def test_a_layer_without_a_grouped_form_is_named():
    layers = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(TypeError, match="Linear has no grouped form"):
        grouped.run(layers, grouped.join([layers.state_dict()]), 1, torch.zeros(1, 3))
    tanh = nn.Sequential(nn.Tanh())
    with pytest.raises(TypeError, match="Tanh has no derivative"):
        grouped.input_gradient(tanh, {}, 1, grouped.run(tanh, {}, 1, torch.zeros(1, 3)))

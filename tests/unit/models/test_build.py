"""Construction and initialisation from an explicit generator."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from replayfleet.models.build import build_critic, build_generator, build_like, build_task_model, initialise
from replayfleet.models.specs import TaskSpec
from tests.support.rng import rng

TASK = TaskSpec(1, 28, ("a", "b", "c"), generator_width=8)
BUILDERS = [build_task_model, build_generator, build_critic]
Build = Callable[[TaskSpec], nn.Module]


@pytest.mark.parametrize("build", BUILDERS)
def test_building_and_initialising_touch_no_global_randomness(build: Build):
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())  # noqa: NPY002
    initialise(build(TASK), rng())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("build", BUILDERS)
def test_one_seed_gives_the_same_bits_and_another_seed_others(build: Build):
    one, same, other = (initialise(build(TASK), rng(seed)).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("build", BUILDERS)
def test_before_initialisation_a_model_is_zero_and_not_random_memory(build: Build):
    model = build(TASK)
    assert all(not parameter.any() for parameter in model.parameters())
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())


def test_initialising_again_resets_what_training_changed():
    model = initialise(build_task_model(TASK), rng())
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()(torch.ones(2, 1, 28, 28))
    assert not torch.equal(model.norm.running_mean, fresh["norm.running_mean"])
    initialise(model, rng())
    assert all(torch.equal(value, fresh[name]) for name, value in model.state_dict().items())


def test_the_task_model_gets_pytorchs_default_spread():
    model = initialise(build_task_model(TASK), rng())
    weight = model.blocks[7].conv2.weight
    bound = (128 * 9) ** -0.5
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert model.head.bias.abs().max() <= 128**-0.5
    assert (model.norm.weight == 1).all()


def test_the_generator_gets_dcgans_spread():
    layers = initialise(build_generator(TASK), rng()).layers
    assert layers[0].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layers[1].weight.mean().item() == pytest.approx(1.0, abs=0.02)
    assert not layers[1].bias.any()


def test_meta_models_hold_shapes_only():
    layout = build_task_model(TASK, device="meta").state_dict()
    real = build_task_model(TASK).state_dict()
    assert all(value.is_meta for value in layout.values())
    assert {name: (value.shape, value.dtype) for name, value in layout.items()} == {
        name: (value.shape, value.dtype) for name, value in real.items()
    }


def test_a_layer_without_a_scheme_is_refused_and_not_left_as_it_was():
    with pytest.raises(TypeError, match="no initialisation is defined for LSTM"):
        initialise(nn.LSTM(2, 2), rng())


@pytest.mark.parametrize("build", BUILDERS)
def test_each_network_is_one_of_its_own(build: Build):
    """What is done to one, on whatever device, no other sees: they are copies of one pattern."""
    one, other = build(TASK, device="meta"), build(TASK, device="meta")
    names = [name for name, _ in one.named_parameters()]
    one.requires_grad_(False).eval()
    one.register_forward_hook(lambda *_: None)
    one.load_state_dict({name: torch.ones(tensor.shape) for name, tensor in one.state_dict().items()}, assign=True)
    del one._modules[next(iter(one._modules))]
    for left in (other, build(TASK, device="meta")):
        assert [name for name, parameter in left.named_parameters() if parameter.requires_grad] == names
        assert all(tensor.is_meta for tensor in left.state_dict().values())
        assert all(module.training and not module._forward_hooks for module in left.modules())
    first, second = (initialise(build(TASK), rng()) for _ in range(2))
    after = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    with torch.no_grad():
        for tensor in first.state_dict().values():
            tensor.fill_(7)
    assert all(torch.equal(tensor, after[name]) for name, tensor in second.state_dict().items())


def test_a_network_that_was_first_made_where_nothing_is_learnt_can_be_trained():
    task = TaskSpec(1, 28, ("a", "b"), architecture="lenet")
    with torch.inference_mode():
        build_task_model(task)
    model = initialise(build_task_model(task), rng())
    model(torch.zeros(2, 1, 28, 28)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_part_that_stands_in_two_places_stands_in_two_places_of_every_copy():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.other = nn.Linear(2, 2)

    for model in (build_like(Twice), build_like(Twice)):
        assert model.one is model.other
        assert [name for name, _ in model.named_parameters()] == ["one.weight", "one.bias"]


def test_a_network_has_the_dtype_that_is_the_default_when_it_is_asked_for():
    task = TaskSpec(1, 28, ("a", "b"), architecture="cnn")
    found = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            found.append({tensor.dtype for tensor in build_task_model(task).parameters()})
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [{torch.float64}, {torch.float32}]

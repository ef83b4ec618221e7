from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.steps.projection import (
    flat_gradient,
    gradient_at,
    gradient_layout,
    joined,
    project_conflicting,
    project_gradient,
)
from replayfleet.federation.methods.steps.task_model import trainable_task_model
from replayfleet.models.build import build_task_model, initialise
from tests.support.toy import TOY, toy_data


def vector(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def test_a_conflicting_gradient_loses_its_component_along_the_reference() -> None:
    projected = project_conflicting(vector(1.0, -2.0, 3.0), vector(0.0, 4.0, 0.0))
    assert projected.tolist() == [1.0, 0.0, 3.0]  # Eq. 4: g + 8/16 ref
    gradient, reference = vector(3.0, -1.0), vector(-1.0, 1.0)
    assert project_conflicting(gradient, reference).tolist() == [1.0, 1.0]  # <g, ref> = -4, <ref, ref> = 2
    assert gradient.tolist() == [3.0, -1.0]
    assert reference.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("reference", [(2.0, 5.0), (0.0, 1.0), (1.0, 0.5)])
def test_a_gradient_without_conflict_is_returned_itself(reference: tuple[float, float]) -> None:
    gradient = vector(1.0, 0.0)
    assert project_conflicting(gradient, vector(*reference)) is gradient


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf")])
def test_a_reference_without_a_direction_changes_nothing(value: float) -> None:
    gradient = vector(1.0, -1.0)
    assert project_conflicting(gradient, torch.full((2,), value)) is gradient
    if value:
        assert project_conflicting(gradient, vector(0.0, value)) is gradient


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_diverged_stays_as_it_is(value: float) -> None:
    gradient = vector(value, -1.0)
    assert project_conflicting(gradient, vector(1.0, 1.0)) is gradient


@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1.0, 1e20, 1e37])
def test_the_length_of_the_reference_doesnt_matter(scale: float) -> None:
    projected = project_conflicting(vector(3.0, -1.0), scale * vector(-1.0, 1.0))
    assert projected.tolist() == pytest.approx([1.0, 1.0], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_gradients_dtype_is_kept_whatever_the_references(dtype: torch.dtype) -> None:
    projected = project_conflicting(vector(3.0, -1.0, dtype=dtype), vector(-1.0, 1.0))
    assert projected.dtype == dtype
    assert projected.tolist() == [1.0, 1.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gradients_torch_device_is_kept() -> None:
    assert project_conflicting(vector(3.0, -1.0).cuda(), vector(-1.0, 1.0).cuda()).is_cuda


@pytest.mark.parametrize(
    ("gradient", "reference"),
    [(torch.ones(2), torch.ones(3)), (torch.ones(2, 2), torch.ones(2, 2)), (torch.ones(()), torch.ones(()))],
)
def test_anything_but_two_equally_long_vectors_is_refused(gradient: Tensor, reference: Tensor) -> None:
    with pytest.raises(ValueError, match="expected two vectors"):
        project_conflicting(gradient, reference)


def test_a_modules_gradients_are_projected_as_one_vector() -> None:
    module = nn.Linear(2, 1)
    module.weight.grad, module.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([-1.0])
    before = flat_gradient(module)
    assert before.tolist() == [3.0, 0.0, -1.0]
    project_gradient(module, vector(1.0, 1.0, 1.0))
    assert flat_gradient(module).equal(before)  # no conflict
    project_gradient(module, vector(-1.0, 0.0, 1.0))
    assert module.weight.grad.tolist() == [[1.0, 0.0]]
    assert module.bias.grad.tolist() == [1.0]


def test_a_parameter_without_a_gradient_counts_as_zeros_and_may_get_one() -> None:
    module = nn.Linear(1, 1)
    module.weight.grad = torch.tensor([[-2.0]])
    assert flat_gradient(module).tolist() == [-2.0, 0.0]
    project_gradient(module, vector(1.0, 1.0))
    assert flat_gradient(module).tolist() == [-1.0, 1.0]


def test_the_gradient_at_a_model_is_that_of_its_loss_and_leaves_everything_untouched() -> None:
    start = dict(initialise(build_task_model(TOY), torch.Generator().manual_seed(0)).state_dict())
    copy = {name: tensor.clone() for name, tensor in start.items()}
    data = toy_data({0: 3, 2: 3})
    gradient = gradient_at(TOY, start, data.images, data.labels, "float32")
    assert same_bits(start, copy)
    module = trainable_task_model(TOY, start)
    F.cross_entropy(module(data.images), data.labels).backward()
    assert list(gradient) == list(gradient_layout(TOY)) == [name for name, _ in module.named_parameters()]
    assert joined(gradient, gradient_layout(TOY)).equal(flat_gradient(module))
    backwards = dict(sorted(gradient.items(), reverse=True))
    assert joined(backwards, gradient_layout(TOY)).equal(flat_gradient(module))
    assert not any("running" in name for name in gradient)

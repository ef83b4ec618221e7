from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from replayfleet.models.counting import count_flops, count_parameters
from replayfleet.models.flow import ConditionalFlow, initialise_flow, standard_normal_log_density
from replayfleet.models.resnet_plus import ResNetPlus, build_resnet_plus
from replayfleet.models.specs import TaskSpec


def flow_of(num_features: int = 8, hidden: int = 16, scale: float = 2.0) -> ConditionalFlow:
    """A flow that is far from the identity."""
    flow = initialise_flow(ConditionalFlow(num_features, 3, hidden), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.mul_(scale)
    return flow.double()


@pytest.mark.parametrize(
    ("hidden", "parameters", "flops"), [(512, 4_663_808, 46.49), (1024, 17_715_712, 176.87), (2048, 68_985_344, 689.27)]
)
def test_the_flow_has_the_size_of_the_paper_and_a_tenth_of_its_flops(hidden: int, parameters: int, flops: float):
    with torch.device("meta"):
        flow = ConditionalFlow(128, 10, hidden)
    assert count_parameters(flow) == parameters
    linear = sum(layer.weight.numel() for layer in flow.modules() if isinstance(layer, nn.Linear))
    assert round(10 * linear / 1e6, 2) == flops  # Table 6 has 46.49, 176.87 and 688.74: its batch was ten


@pytest.mark.parametrize(
    ("image_channels", "image_size", "stem", "parameters", "flops"),
    [
        (1, 28, "cifar", 734_202, 29_085_952),
        (3, 32, "cifar", 734_490, 35_693_824),
        (3, 64, "imagenet", 735_258, 35_803_888),
    ],
)
def test_the_task_model_has_the_size_and_cost_of_the_paper(
    image_channels: int, image_size: int, stem: str, parameters: int, flops: int
):
    spec = TaskSpec(image_channels, image_size, tuple("0123456789"), stem)
    model = build_resnet_plus(spec).to_empty(device="cpu")
    assert count_parameters(model) == parameters
    assert count_flops(model, (image_channels, image_size, image_size)) == flops


def test_logits_are_what_the_upper_layers_make_of_the_features():
    model = ResNetPlus(1, 4).eval()
    images = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(images), model.classify(model.features(images)))
    assert model.features(images).shape == (2, 128)


def test_the_inverse_gives_the_features_back():
    flow = flow_of()
    features = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    classes = F.one_hot(torch.tensor([0, 1, 2, 0, 1]), 3).double()
    noise, _ = flow(features, classes)
    assert not torch.allclose(noise, features, atol=0.1)
    assert torch.allclose(flow.inverse(noise, classes), features, atol=1e-10)
    assert torch.allclose(flow(flow.inverse(features, classes), classes)[0], features, atol=1e-10)


def test_the_log_determinant_is_that_of_autograds_jacobian():
    flow = flow_of()
    features = torch.randn(3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    classes = F.one_hot(torch.tensor([2, 0, 1]), 3).double()
    _, log_determinant = flow(features, classes)
    for row in range(3):

        def noise_of(x: torch.Tensor, row: int = row) -> torch.Tensor:
            return flow(x[None], classes[row : row + 1])[0][0]

        jacobian = torch.autograd.functional.jacobian(noise_of, features[row])
        assert log_determinant[row].item() == pytest.approx(torch.linalg.slogdet(jacobian)[1].item(), abs=1e-9)


def test_every_feature_moves_and_the_class_matters():
    flow = flow_of(16)
    features = torch.randn(1, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    one, other = (flow(features, F.one_hot(torch.tensor([c]), 3).double())[0] for c in (0, 1))
    assert not torch.isclose(one, other).any()


def test_densities_integrate_to_one():
    flow = flow_of(2, 8, 1.0)
    axis = torch.linspace(-12, 12, 301, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    classes = F.one_hot(torch.tensor([1]), 3).double().expand(len(grid), 3)
    mass = flow.log_density(grid, classes).exp().sum() * (axis[1] - axis[0]) ** 2
    assert mass.item() == pytest.approx(1.0, abs=1e-3)
    assert standard_normal_log_density(torch.zeros(1, 2)).item() == pytest.approx(-math.log(2 * math.pi))


def test_an_odd_number_of_features_is_refused_and_one_seed_gives_the_same_bits():
    with pytest.raises(ValueError, match="even"):
        ConditionalFlow(7, 2, 4)
    one, same = (initialise_flow(ConditionalFlow(4, 2, 4), torch.Generator().manual_seed(0)) for _ in range(2))
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in one.state_dict().items())

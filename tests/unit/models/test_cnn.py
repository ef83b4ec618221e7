"""The small networks of the federated papers: sizes as published, features under the head, one spelling of a task."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torchvision

from replayfleet.models.build import build_task_model, initialise, num_features
from replayfleet.models.specs import TaskSpec, plain_task

TASK = TaskSpec(1, 28, tuple("abcdefghij"))


@pytest.mark.parametrize(("architecture", "parameters"), [("cnn", 1_663_370), ("lenet", 21_840)])
def test_they_have_as_many_parameters_as_published(architecture: str, parameters: int) -> None:
    """McMahan et al. 2017, section 3; PyTorch's MNIST example."""
    module = build_task_model(replace(TASK, architecture=architecture), device="meta")
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


@pytest.mark.parametrize("architecture", ["cnn", "lenet", "resnet20-he", "resnet18-cosine"])
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, 64)])
def test_the_head_sees_the_features(architecture: str, channels: int, size: int) -> None:
    spec = replace(TASK, architecture=architecture, image_channels=channels, image_size=size)
    module = initialise(build_task_model(spec), torch.Generator().manual_seed(0))
    images = torch.randn(3, *spec.image_shape, generator=torch.Generator().manual_seed(1))
    module.eval()
    assert torch.equal(module.head(module.features(images)), module(images))
    assert module(images).shape == (3, 10)
    assert num_features(spec) == module.features(images).shape[1]
    assert module(images).std() > 0


@pytest.mark.parametrize(("stem", "classes"), [("imagenet", 1000), ("cifar", 10)])
def test_resnet_18_is_torchvision_s(stem: str, classes: int) -> None:
    """He et al. 2016, Table 1; with stem ``cifar``, MFCL's: its first layer is 3x3, and nothing is pooled before."""
    spec = TaskSpec(3, 64, tuple(f"c{i}" for i in range(classes)), stem=stem, architecture="resnet18")
    ours = initialise(build_task_model(spec), torch.Generator().manual_seed(0)).eval()
    theirs = torchvision.models.resnet18(num_classes=classes)
    if stem == "cifar":
        theirs.conv1, theirs.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
    pairs = zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True)
    theirs.load_state_dict({name: own.reshape(each.shape) for (name, each), own in pairs})
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(images), theirs.eval()(images))


def test_he_s_resnet_20_has_as_many_parameters_as_published() -> None:
    """269,722 with shortcuts that pad, and three projections: 16 x 32 + 32 x 64 weights, 2 x (32 + 64) of BatchNorm."""
    spec = replace(TASK, architecture="resnet20-he", image_channels=3, image_size=32)
    module = build_task_model(spec, device="meta")
    assert sum(parameter.numel() for parameter in module.parameters()) == 269_722 + 2_560 + 192


def test_a_cosine_head_looks_at_directions_alone() -> None:
    spec = replace(TASK, architecture="resnet20-cosine")
    module = initialise(build_task_model(spec), torch.Generator().manual_seed(0)).eval()
    module.requires_grad_(False)
    images = torch.randn(4, *spec.image_shape, generator=torch.Generator().manual_seed(1))
    features = module.features(images)
    assert float(features.min()) < 0  # no ReLU after the last block
    expected = 10 * torch.cosine_similarity(features[:, None], module.head.weight[None], dim=2)
    torch.testing.assert_close(module(images), expected)
    torch.testing.assert_close(module.head(7 * features), module.head(features))


def test_a_task_says_its_network_only_where_it_isnt_the_usual_one() -> None:
    assert "architecture" not in plain_task(TASK)
    assert plain_task(replace(TASK, architecture="cnn"))["architecture"] == "cnn"
    with pytest.raises(ValueError, match="architecture is 'vgg', no task model of ours"):
        replace(TASK, architecture="vgg")

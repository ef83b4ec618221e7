from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from replayfleet.federation.methods.steps.task_model import (
    Alignment,
    Optimisation,
    aligned_loss,
    descend,
    judge_with,
    train_task_model,
)
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.folding import build_folded_task_model, fold_batch_norm
from replayfleet.models.specs import TaskSpec
from tests.support.toy import TOY, accuracy, toy_data

QUICK = Optimisation(num_epochs=2, batch_size=16, learning_rate=0.01, momentum=0.9, weight_decay=0.01)


def start() -> dict[str, torch.Tensor]:
    return dict(initialise(build_task_model(TOY), torch.Generator().manual_seed(0)).state_dict())


def test_a_trained_model_is_laid_out_as_one_from_a_disk_and_answers_with_the_same_bits() -> None:
    """Channels-last leaves strides of its own where a side is 1: FedLwF-2T was another in a fleet by it."""
    data = toy_data({0: 8, 1: 8})
    trained = train_task_model(TOY, start(), data.images, data.labels, QUICK, torch.Generator().manual_seed(1))
    read = {name: torch.from_numpy(tensor.numpy().copy(order="C")) for name, tensor in trained.items()}
    assert {name: tensor.stride() for name, tensor in trained.items()} == {
        name: torch.empty(tensor.shape).stride() for name, tensor in trained.items()
    }
    assert torch.equal(judge_with(TOY, trained)(data.images), judge_with(TOY, read)(data.images))


def test_whoever_watches_is_told_the_mean_loss_of_the_samples_of_each_epoch() -> None:
    values = torch.arange(35.0)  # two steps of 16 and one of 3
    told: list[float] = []

    def loss(module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return values[batch].mean() + 0 * sum(weight.sum() for weight in module.parameters())

    watched = replace(QUICK, watch=told.append)
    trained = descend(TOY, start(), len(values), watched, torch.Generator().manual_seed(1), loss)
    assert told == [pytest.approx(17.0)] * 2
    alone = descend(TOY, start(), len(values), QUICK, torch.Generator().manual_seed(1), loss)
    assert all(torch.equal(alone[name], tensor) for name, tensor in trained.items())
    told.clear()
    stopped = replace(watched, should_stop=lambda: True)
    descend(TOY, start(), len(values), stopped, torch.Generator().manual_seed(1), loss)
    assert told == [], "an epoch that was cut short is none"


def test_the_aligned_loss_equals_its_closed_form() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[9.0, 9.0], [1.0, 3.0]])
    mask = torch.tensor([False, True])
    labels = torch.tensor([0, 1])
    loss = aligned_loss(logits, labels, teacher, mask, 0.3)
    cross_entropy = (math.log(1 + math.exp(-2)) + math.log(2)) / 2
    distance = (1 + 9) / 2  # mean over the two logits of the one masked sample
    assert loss.item() == pytest.approx(cross_entropy + 0.3 * distance / 2, rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    expected = (0.5 - 0) / 2 + 0.3 * (2 * (0.0 - 1.0) / 2) / 2  # softmax part and MSE part of row 1, column 0
    assert logits.grad[1, 0].item() == pytest.approx(expected, rel=1e-5)


def test_without_weight_or_replay_only_cross_entropy_is_left() -> None:
    logits, teacher = torch.randn(4, 3), torch.randn(4, 3)
    labels = torch.tensor([0, 1, 2, 0])
    plain = torch.nn.functional.cross_entropy(logits, labels)
    assert torch.equal(aligned_loss(logits, labels, teacher, torch.ones(4, dtype=torch.bool), 0.0), plain)
    assert torch.equal(aligned_loss(logits, labels, teacher, torch.zeros(4, dtype=torch.bool), 0.3), plain)


def test_the_step_size_falls_as_its_schedule_says() -> None:
    def rates(schedule: str, num_epochs: int) -> list[float]:
        whole = replace(QUICK, schedule=schedule, num_epochs=num_epochs, learning_rate=2.0)
        return [whole.rate(epoch) for epoch in range(num_epochs)]

    assert rates("constant", 3) == [2.0, 2.0, 2.0]
    assert rates("cosine", 4) == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])
    assert rates("step", 10) == pytest.approx([2.0] * 6 + [0.2] + [0.02] * 3)


def test_training_takes_the_steps_of_its_schedule() -> None:
    data, plain = toy_data({0: 9, 1: 8}), replace(QUICK, momentum=0.0, num_epochs=10)
    expected, one = start(), torch.Generator().manual_seed(4)
    for num_epochs, rate in ((6, 0.01), (1, 0.01 * 0.1), (3, 0.01 * 0.1 * 0.1)):
        part = replace(plain, num_epochs=num_epochs, learning_rate=rate)
        expected = train_task_model(TOY, expected, data.images, data.labels, part, one)
    whole, other = replace(plain, schedule="step"), torch.Generator().manual_seed(4)
    found = train_task_model(TOY, start(), data.images, data.labels, whole, other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.learning
def test_training_learns_the_toy_problem() -> None:
    data = toy_data({0: 30, 1: 30, 2: 30, 3: 30})
    schedule = Optimisation(num_epochs=8, batch_size=8, learning_rate=0.05, momentum=0.0, weight_decay=0.0)
    trained = train_task_model(TOY, start(), data.images, data.labels, schedule, torch.Generator().manual_seed(0))
    assert accuracy(trained, {0: 20, 1: 20, 2: 20, 3: 20}) > 0.9


def test_one_seed_gives_the_same_bits_and_leaves_the_start_untouched() -> None:
    data = toy_data({0: 9, 1: 8})
    parameters = start()
    copy = {name: tensor.clone() for name, tensor in parameters.items()}
    first = train_task_model(TOY, parameters, data.images, data.labels, QUICK, torch.Generator().manual_seed(3))
    second = train_task_model(TOY, parameters, data.images, data.labels, QUICK, torch.Generator().manual_seed(3))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(parameters[name], copy[name]) for name in copy)


@pytest.mark.learning
def test_alignment_pulls_towards_the_teacher() -> None:
    data = toy_data({0: 16, 1: 16})
    teacher = torch.zeros(32, 4)
    strong = Alignment(torch.ones(32, dtype=torch.bool), teacher, 5.0)
    parameters = start()
    free = train_task_model(TOY, parameters, data.images, data.labels, QUICK, torch.Generator().manual_seed(0))
    held = train_task_model(
        TOY, parameters, data.images, data.labels, QUICK, torch.Generator().manual_seed(0), alignment=strong
    )
    norm_free = judge_with(TOY, free)(data.images).norm()
    norm_held = judge_with(TOY, held)(data.images).norm()
    assert norm_held < norm_free


def test_a_single_sample_is_too_little() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        train_task_model(
            TOY, start(), torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64), QUICK, torch.Generator()
        )


@pytest.mark.parametrize(
    ("channels", "size", "stem", "architecture"),
    [
        (1, 28, "cifar", "resnet20"),
        (3, 32, "cifar", "resnet20"),
        (3, 64, "imagenet", "resnet20"),
        (1, 28, "cifar", "lenet"),
        (3, 32, "cifar", "cnn"),
        (3, 64, "imagenet", "resnet18"),
    ],
)
def test_the_folded_model_equals_the_task_model_in_eval_mode(
    channels: int, size: int, stem: str, architecture: str
) -> None:
    spec = TaskSpec(channels, size, ("a", "b", "c"), stem=stem, architecture=architecture)
    model = initialise(build_task_model(spec), torch.Generator().manual_seed(0)).train()
    with torch.no_grad():
        for index in range(5):
            model(3 * torch.randn(8, channels, size, size, generator=torch.Generator().manual_seed(index)) + 1)
    model.eval()
    images = torch.randn(3, channels, size, size, generator=torch.Generator().manual_seed(9))
    folded = torch.func.functional_call(build_folded_task_model(spec), fold_batch_norm(model.state_dict()), (images,))
    assert (folded - model(images)).abs().max() < 1e-5
    assert model(images).std() > 1e-3

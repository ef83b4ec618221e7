"""The toy problem in two stages, from after the first one: what a method that keeps samples must not unlearn."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload
from replayfleet.federation.methods.steps.kept_samples import Reservoir
from replayfleet.federation.methods.steps.projection import gradient_layout, joined
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.task_model import Optimisation, judge_with, train_task_model
from replayfleet.models.build import build_task_model, initialise
from tests.support import toy
from tests.support.rng import rng
from tests.support.toy import toy_data

TOY = replace(toy.TOY, architecture="resnet20")
"""The shallow network unlearns otherwise: FedGP, which descends one old gradient, then keeps nothing."""

FIRST: dict[int, int] = {0: 12, 1: 12}
SECOND: dict[int, int] = {2: 16, 3: 16}
SAMPLER = eager_sampler(TOY)
PLAIN_SGD: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0}
ONE_EPOCH: dict[str, Any] = {**PLAIN_SGD, "local_epochs": 1, "batch_size": 16, "learning_rate": 0.01}
SECOND_STAGE: dict[str, Any] = {**PLAIN_SGD, "local_epochs": 4, "batch_size": 8, "learning_rate": 0.02}
"""Long enough for FedAvg to unlearn the first stage."""


def random_model(seed: int = 0) -> Parameters:
    return dict(initialise(build_task_model(TOY), rng(seed)).state_dict())


@functools.cache
def after_first_stage() -> tuple[Parameters, RoundData]:
    """A task model that learnt the first stage, and the stage's data."""
    data = toy_data(FIRST)
    schedule = Optimisation(num_epochs=10, batch_size=8, learning_rate=0.02, momentum=0.9, weight_decay=0.0)
    return train_task_model(TOY, random_model(), data.images, data.labels, schedule, rng()), data


def reservoir_of(data: RoundData, judge: Parameters | None = None) -> Reservoir:
    """All of the data kept, with the logits of a model if there is one."""
    logits = None if judge is None else judge_with(TOY, judge)(data.images)
    return Reservoir(200).with_batch(data.images, data.labels, rng(), logits=logits)


def assert_repeatable(method: Any, reservoir: Reservoir) -> None:
    """Check that a local round of the second stage gives the same bits twice, and leaves what it gets as it was."""
    start, _ = after_first_stage()
    copies = [{name: tensor.clone() for name, tensor in each.items()} for each in (start, reservoir.samples)]
    (one, sent), (two, again) = (
        method.local_round(reservoir, toy_data(SECOND), TaskDownload(start), rng(3), sampler=SAMPLER) for _ in range(2)
    )
    assert same_bits(sent.task_parameters, again.task_parameters)
    assert same_bits(one.samples, two.samples)
    assert same_bits(start, copies[0])
    assert same_bits(reservoir.samples, copies[1])


def first_stage_loss(parameters: Parameters) -> float:
    """Cross-entropy on fresh samples of the first stage."""
    data = toy_data(FIRST, seed=99)
    return float(F.cross_entropy(judge_with(TOY, parameters)(data.images), data.labels))


def step_taken(start: Parameters, end: Parameters) -> Tensor:
    """What a single step of plain SGD followed, as one vector."""
    names = gradient_layout(TOY)
    return (joined(start, names) - joined(end, names)) / float(ONE_EPOCH["learning_rate"])


def agree(left: Tensor, right: Tensor) -> bool:
    """Whether two gradients are equal but for the order in which samples were summed."""
    return float((left - right).norm()) < 1e-3 * float(right.norm())


@functools.cache
def what_fedavg_unlearns() -> float:
    """The first stage's loss after FedAvg's local round on the second one; before it is next to nothing."""
    start, _ = after_first_stage()
    method, download = FedAvg(task=TOY, **SECOND_STAGE), TaskDownload(start)
    _, upload = method.local_round(NoState(), toy_data(SECOND), download, rng(), sampler=SAMPLER)
    return first_stage_loss(upload.task_parameters)

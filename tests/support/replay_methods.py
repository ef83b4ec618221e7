"""The three methods whose aggregator synthesises replay, small enough for tests, and what they need to start from."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.lander import Lander
from replayfleet.federation.methods.mfcl import MFCL
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.task_model import trainable_task_model
from replayfleet.federation.methods.synthesis_records import CountedUpload, SynthesisDownload
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.resnet import ResNet
from tests.support.toy import LEARNING, TOY, accuracy, toy_data

SAMPLER = eager_sampler(TOY)

SHORT = {"local_epochs": 1, "batch_size": 8, "weight_decay": 0.0, "synthetic_batch_size": 4, "generator_width": 2}
SHORT_SYNTHESIS = {"synthesis_rounds": 2, "synthesis_steps": 2, "synthesis_batch_size": 6, "latent_size": 8}


def short_mfcl(**changes: Any) -> MFCL:
    return MFCL(task=TOY, **{**SHORT, "generator_steps": 2, "generator_batch_size": 4, "latent_size": 8, **changes})


def short_target(**changes: Any) -> Any:
    from replayfleet.federation.methods.target import Target

    return Target(task=TOY, **{**SHORT, **SHORT_SYNTHESIS, **changes})


def short_lander(**changes: Any) -> Lander:
    short = {**SHORT, **SHORT_SYNTHESIS, "warm_up_rounds": 0, "student_steps": 1, "samples_per_layer": 2}
    return Lander(task=TOY, **{**short, **changes})


ONE_STEP = {"local_epochs": 1, "batch_size": 12, "learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0}
"""One step of 12 samples that moves every parameter by its gradient."""

EVERYTHING = {0: 16, 1: 16, 2: 16, 3: 16}

SHORT_METHODS = {"mfcl": short_mfcl, "target": short_target, "lander": short_lander}


def random_task_model(seed: int = 0) -> dict[str, Tensor]:
    return initialise(build_task_model(TOY), torch.Generator().manual_seed(seed)).state_dict()


def uploads_of(counts: dict[str, dict[int, int]]) -> dict[str, CountedUpload]:
    return {client: CountedUpload(random_task_model(index), c) for index, (client, c) in enumerate(counts.items())}


def aggregated(method: Any, uploads: dict[str, CountedUpload], *, state: Any = None, seed: int = 0) -> tuple[Any, Any]:
    """Return (state, downloads) after one aggregation."""
    start = method.initial_states()[1] if state is None else state
    return method.aggregate(start, uploads, seeded_generator(seed, 0, "aggregator"), sampler=SAMPLER)


def fedavg_local(parameters: Parameters, data: Any, settings: dict[str, Any], seed: int = 0) -> Parameters:
    """Return what FedAvg's client makes of the same start, samples and random numbers."""
    from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload

    method = FedAvg(task=TOY, **settings)
    _, upload = method.local_round(
        NoState(), data, TaskDownload(parameters), seeded_generator(seed, 0, "a"), sampler=SAMPLER
    )
    return upload.task_parameters


@cache
def old_model() -> Parameters:
    """Return a model that knows classes 0 and 1."""
    return fedavg_local(random_task_model(), toy_data({0: 24, 1: 24}), LEARNING)


@cache
def what_fedavg_remembers() -> float:
    """Return FedAvg's accuracy on all four classes after ``old_model`` met classes 2 and 3 alone."""
    return accuracy(fedavg_local(old_model(), newer_data(), LEARNING), EVERYTHING)


def newer_data() -> RoundData:
    return toy_data({2: 24, 3: 24}, seed=3)


def real_replay() -> dict[str, Tensor]:
    """Return what a perfect generator would make of classes 0 and 1, as a download carries it."""
    return {"images": data_free.to_bytes(toy_data({0: 24, 1: 24}, seed=7).images)}


@torch.no_grad()
def answered(parameters: Parameters, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and logits of images by the task model with these parameters, in eval mode."""
    module = data_free.frozen_task_model(TOY, parameters)
    features = module.features(images)
    return features, module.head(features)


def what_it_remembers(method: Any, download: SynthesisDownload) -> float:
    """Return the accuracy on all four classes after a local round on classes 2 and 3."""
    state = method.initial_states()[0]
    _, upload = method.local_round(state, newer_data(), download, seeded_generator(0, 0, "a"), sampler=SAMPLER)
    return accuracy(upload.task_parameters, EVERYTHING)


def assert_descends(
    method: Any, data: RoundData, download: SynthesisDownload, loss_of: Callable[[ResNet], Tensor]
) -> None:
    """Check that a local round of ``ONE_STEP`` takes the gradient of ``loss_of`` at the downloaded task model."""
    start = download.task_parameters
    module = trainable_task_model(TOY, start)
    gradients = torch.autograd.grad(loss_of(module), list(module.parameters()))
    state = method.initial_states()[0]
    _, upload = method.local_round(state, data, download, seeded_generator(0, 0, "a"), sampler=SAMPLER)
    names = [name for name, _ in module.named_parameters()]
    taken = torch.cat([(start[name] - upload.task_parameters[name]).flatten() for name in names])
    expected = torch.cat([gradient.flatten() for gradient in gradients])
    # In single precision the order of a batch's samples alone moves a deep gradient by half a percent.
    assert (taken - expected).norm() < 0.02 * expected.norm()

"""A tiny classification problem that a few training steps can solve, and a whole run of a method over it."""

from __future__ import annotations

from typing import Any

import torch

from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.models.resnet import ResNet, ResNetShape
from replayfleet.models.specs import ADDED_MODELS, TaskSpec

SHALLOW = ResNetShape((16, 32), 1, 5)
"""Two blocks of a ResNet, with all kinds of layers that the eight of ``resnet20`` have."""


def _toy_resnet(spec: TaskSpec) -> ResNet:
    return ResNet(spec.image_channels, spec.num_classes, "imagenet", SHALLOW)


ADDED_MODELS.built_in["toy-resnet"] = _toy_resnet  # type: ignore[index]  # a dict
TOY = TaskSpec(1, 28, ("a", "b", "c", "d"), generator_width=4, architecture="toy-resnet")

LEARNING: dict[str, Any] = {
    "local_epochs": 20,
    "batch_size": 8,
    "learning_rate": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
}
"""Learns two toy classes of 24 images whatever the rounding.

With momentum 0.9 a few dozen steps leave BatchNorm's running statistics behind the parameters, and accuracy in eval
mode then jumps between 0.25 and 1 with the last bit of an image. Plain steps of the same total length don't; batches of
4, whose statistics are noise, still do now and then: 2 of 24 runs whose images differed by 1e-6.
"""


SHORT_REPLAY: dict[str, Any] = {
    "local_epochs": 1,
    "batch_size": 16,
    "sub_generator_epochs": 1,
    "gan_batch_size": 8,
    "gate_samples": 16,
    "max_tries_factor": 2,
}
"""Trains a task model and sub-generators for a moment."""

SHORT_PFEDGRP: dict[str, Any] = {**SHORT_REPLAY, "replay_per_client": 16, "aggregation_epochs": 1}


def toy_data(counts: dict[int, int], seed: int = 0) -> RoundData:
    """Return noisy images whose class shows as one bright quadrant."""
    rng = torch.Generator().manual_seed(seed)
    images, labels = [], []
    for class_id, count in counts.items():
        batch = 0.3 * torch.randn(count, 1, 28, 28, generator=rng) - 0.5
        row, column = divmod(class_id, 2)
        batch[:, :, 14 * row : 14 * row + 14, 14 * column : 14 * column + 14] += 1.0
        images.append(batch.clamp(-1, 1))
        labels.append(torch.full((count,), class_id, dtype=torch.int64))
    return RoundData(torch.cat(images), torch.cat(labels))


def accuracy(parameters: Parameters, counts: dict[int, int], seed: int = 99, task: TaskSpec = TOY) -> float:
    """Return the share of fresh toy samples that the task model gets right."""
    data = toy_data(counts, seed)
    predictions = judge_with(task, parameters)(data.images).argmax(dim=1)
    return float((predictions == data.labels).float().mean())


def run_rounds(
    method: Any, rounds: list[dict[str, dict[int, int]]], *, run_seed: int = 0, last: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Run a method over ``rounds[r][client] = counts``; return (last aggregator state, last downloads).

    ``last`` runs the last round instead: say, one that hardly trains the sub-generators that nobody will draw from.
    """
    client_state, aggregator_state = method.initial_states()
    initial = method.initial_download(seeded_generator(run_seed, 0, "initial"))
    states: dict[str, Any] = {}
    downloads: dict[str, Any] = {}
    sampler = sampler_of(method)
    for index, clients in enumerate(rounds):
        if last is not None and index == len(rounds) - 1:
            method = last
        uploads = {}
        for position, (client, counts) in enumerate(sorted(clients.items())):
            data = toy_data(counts, seed=100 * index + position)
            states[client], uploads[client] = method.local_round(
                states.get(client, client_state),
                data,
                downloads.get(client, initial),
                seeded_generator(run_seed, index, client),
                sampler=sampler,
            )
        aggregator_state, downloads = method.aggregate(
            aggregator_state, uploads, seeded_generator(run_seed, index, "aggregator"), sampler=sampler
        )
    return aggregator_state, downloads

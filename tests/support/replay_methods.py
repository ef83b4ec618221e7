"""The three methods whose aggregator synthesises replay, small enough for tests, and what they need to start from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from federation.methods.fedavg import FedAvg
from federation.methods.lander import Lander
from federation.methods.mfcl import MFCL
from federation.methods.records import Parameters
from federation.methods.seeding import seeded_generator
from federation.methods.steps.replay import eager_sampler
from federation.methods.synthesis_records import CountedUpload
from models.build import build_task_model, initialise
from tests.support.toy import TOY

SAMPLER = eager_sampler(TOY)

SHORT = {"local_epochs": 1, "batch_size": 8, "weight_decay": 0.0, "synthetic_batch_size": 4, "generator_width": 2}
SHORT_SYNTHESIS = {"synthesis_rounds": 2, "synthesis_steps": 2, "synthesis_batch_size": 6, "latent_size": 8}


def short_mfcl(**changes: Any) -> MFCL:
    return MFCL(task=TOY, **{**SHORT, "generator_steps": 2, "generator_batch_size": 4, "latent_size": 8, **changes})


def short_target(**changes: Any) -> Any:
    from federation.methods.target import Target

    return Target(task=TOY, **{**SHORT, **SHORT_SYNTHESIS, **changes})


def short_lander(**changes: Any) -> Lander:
    short = {**SHORT, **SHORT_SYNTHESIS, "warm_up_rounds": 0, "student_steps": 1, "samples_per_layer": 2}
    return Lander(task=TOY, **{**short, **changes})


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
    from federation.methods.task_records import NoState, TaskDownload

    method = FedAvg(task=TOY, **settings)
    _, upload = method.local_round(
        NoState(), data, TaskDownload(parameters), seeded_generator(seed, 0, "a"), sampler=SAMPLER
    )
    return upload.task_parameters

"""pFedGRP's aggregator with a robust average: what everybody starts from, and whose models are mixed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_records import AggregatorState, ClientState, Download, Upload
from replayfleet.federation.methods.steps.personalisation.mixtures import personalise_all
from replayfleet.federation.methods.steps.personalisation.personalise import Mixture
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.robust import robust_average
from tests.support.toy import SHORT_PFEDGRP, TOY, toy_data

SAMPLER = eager_sampler(TOY)
METHOD = PFedGRP(task=TOY, **{**SHORT_PFEDGRP, "replay_per_client": 8})
RULES = ("median", "trimmed-mean", "krum", "multi-krum")


@pytest.fixture(scope="module")
def uploads() -> dict[str, Upload]:
    """Four that are honest, and one whose task model is far away."""
    initial = METHOD.initial_download(seeded_generator(0, 0, "initial"))
    data = toy_data({0: 8, 1: 8})
    _, own = METHOD.local_round(ClientState(), data, initial, seeded_generator(0, 0, "a"), sampler=SAMPLER)

    def moved(factor: float, seed: int) -> Upload:
        rng = torch.Generator().manual_seed(seed)
        noisy = {
            name: tensor + factor * torch.rand(tensor.shape, generator=rng) if tensor.is_floating_point() else tensor
            for name, tensor in own.task_parameters.items()
        }
        return replace(own, task_parameters=noisy)

    return {**{client: moved(1e-3, place) for place, client in enumerate("abcd")}, "e": moved(0.05, 9)}


def aggregated(method: PFedGRP, uploads: dict[str, Upload]) -> dict[str, Download]:
    rng = seeded_generator(0, 0, "aggregator")
    return method.aggregate(AggregatorState(), uploads, rng, sampler=SAMPLER)[1]


@pytest.mark.parametrize("rule", RULES)
def test_everybody_starts_from_the_robust_average_and_mixes_no_hostile_model(
    rule: str, uploads: dict[str, Upload], monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = []

    def watched(*arguments: Any) -> list[Mixture]:
        trusted.append(arguments[5])
        return personalise_all(*arguments)

    monkeypatch.setattr("replayfleet.federation.methods.pfedgrp.personalise_all", watched)
    downloads = aggregated(replace(METHOD, robust=rule), uploads)
    models: list[Parameters] = [uploads[client].task_parameters for client in "abcde"]
    expected = robust_average(models, rule, 0.2).parameters
    assert trusted == [(0, 1, 2, 3)]
    for client, download in downloads.items():
        assert same_bits(download.average, expected)
        assert list(download.weights) == list("abcde")
        assert client == "e" or download.weights["e"] == 0.0
        assert sum(download.weights.values()) == pytest.approx(1.0)


def test_none_is_the_plain_mean_of_all_and_mixes_all(uploads: dict[str, Upload]) -> None:
    plain = aggregated(METHOD, uploads)
    mean = torch.stack([uploads[client].task_parameters["head.bias"] for client in "abcde"]).mean(dim=0)
    assert torch.allclose(plain["a"].average["head.bias"], mean)
    assert not same_bits(plain["a"].average, aggregated(replace(METHOD, robust="median"), uploads)["a"].average)

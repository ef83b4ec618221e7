"""What pFedGRP replays, how much of it, who judges it, and what an update starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.lockstep import TrainSubGenerators, TrainTaskModel
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_records import AggregatorState, ClientState, Download, Upload
from replayfleet.federation.methods.steps.personalisation.personalise import Mixture
from replayfleet.federation.methods.steps.replay import Replay, eager_sampler
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import SubGenerator
from tests.support.toy import TOY, toy_data

METHOD = PFedGRP(
    task=TOY,
    local_epochs=1,
    batch_size=16,
    gate_samples=4,
    max_tries_factor=2,
    replay_per_client=16,
    sub_generator_epochs=1,
)
SAMPLER = eager_sampler(TOY)


def rng(seed: int = 0) -> torch.Generator:
    return seeded_generator(seed, 0, "a")


def model_that_says(class_id: int, seed: int = 0) -> Parameters:
    """A task model that takes everything for one class."""
    parameters = dict(METHOD.initial_download(rng(seed)).average)
    parameters["head.weight"] = torch.zeros_like(parameters["head.weight"])
    parameters["head.bias"] = 9.0 * (torch.arange(4) == class_id)
    return parameters


def sub_generators(class_ids: Sequence[int]) -> dict[int, SubGenerator]:
    kind = METHOD.sub_generator_kind()
    return {class_id: kind.new(rng(class_id)) for class_id in class_ids}


def remembering(seen: dict[int, int]) -> ClientState:
    return ClientState(sub_generators=sub_generators(list(seen)), seen=seen)


def requests(state: ClientState, counts: dict[int, int], download: Download, **changes: Any) -> Any:
    """What a local round asks to be trained, as it would in step with other clients."""
    return replace(METHOD, **changes).local_work(state, toy_data(counts), download, rng(), sampler=SAMPLER)


@pytest.mark.parametrize(("personalised", "average", "num_filled"), [(0, 1, 0), (1, 0, 6)])
def test_the_personalised_model_judges_local_replay_and_not_the_average(
    personalised: int, average: int, num_filled: int
) -> None:
    download = Download(model_that_says(personalised), model_that_says(average))
    _, upload = METHOD.local_round(remembering({0: 6}), toy_data({2: 6}), download, rng(), sampler=SAMPLER)
    assert upload.num_filled == num_filled


@pytest.mark.parametrize(
    ("seen", "now", "replayed"),
    [
        ({0: 10, 1: 4}, {2: 5}, {0: 5, 1: 4}),  # new: 5 / 5 of what was seen, no class more than 5
        ({0: 10, 1: 4}, {0: 5}, {0: 0, 1: 1}),  # again: 5 / 15 of what was seen
        ({0: 12, 1: 40}, {0: 4, 2: 8}, {0: 4, 1: 8}),
    ],
)
def test_local_replay_has_the_generation_scale(
    seen: dict[int, int], now: dict[int, int], replayed: dict[int, int]
) -> None:
    """Section 4.1.4: the largest share of a class that is in this round; what the round brings is subtracted."""
    request = next(requests(remembering(seen), now, Download(model_that_says(0), model_that_says(0))))
    assert isinstance(request, TrainTaskModel)
    labels = request.job.labels[sum(now.values()) :]
    assert {c: int((labels == c).sum()) for c in replayed} == replayed
    assert len(labels) == sum(replayed.values())


def test_an_update_goes_on_from_the_sub_generator_that_was_there_and_a_new_class_gets_a_fresh_one() -> None:
    state = remembering({0: 6})
    work = requests(state, {0: 6, 1: 6}, Download(model_that_says(3), model_that_says(3)), gate_threshold=1.01)
    work.send(None)
    request = work.send(model_that_says(3))
    assert isinstance(request, TrainSubGenerators)
    again, new = request.work
    assert again.start == state.sub_generators[0]
    assert not same_bits(new.start.generator, state.sub_generators[0].generator)


def test_the_aggregator_solves_eq_3_on_the_clients_own_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Replay]] = []

    def solve(_spec: Any, _experts: Any, replays: list[tuple[int, Replay]], *_: Any) -> list[Mixture]:
        asked.extend(replays)
        return [Mixture(torch.tensor([1.0, 0.0]), 0.0, "optimised") for _ in replays]

    monkeypatch.setattr("replayfleet.federation.methods.pfedgrp.personalise_all", solve)
    seen = {"a": {0: 30, 1: 10}, "b": {2: 4, 3: 12}}
    uploads = {
        client: Upload(
            task_parameters=model_that_says(0, seed),
            sub_generators={c: s.generator for c, s in sub_generators(list(counts)).items()},
            seen=counts,
            num_samples=4,
            num_updates=2,
            num_filled=0,
        )
        for seed, (client, counts) in enumerate(seen.items())
    }
    METHOD.aggregate(AggregatorState(), uploads, rng(), sampler=SAMPLER)
    assert [place for place, _ in asked] == [0, 1]
    assert [torch.bincount(replay.labels, minlength=4).tolist() for _, replay in asked] == [
        [12, 4, 0, 0],
        [0, 0, 4, 12],
    ]


def test_every_client_weighs_alike_in_the_average_however_many_samples_it_has() -> None:
    uploads = {
        client: Upload(model_that_says(class_id), {}, {class_id: count}, count, 0, 0)
        for class_id, (client, count) in enumerate({"a": 30, "b": 10}.items())
    }
    _, downloads = METHOD.aggregate(AggregatorState(), uploads, rng(), sampler=SAMPLER)
    assert downloads["a"].average["head.bias"].tolist() == [4.5, 4.5, 0, 0]

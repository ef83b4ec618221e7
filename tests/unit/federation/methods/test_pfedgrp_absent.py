"""Clients that miss a round: served from the cache, or mixed into the others' models (asynchronous rounds)."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Draw, Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_records import AggregatorState, ClientState, Download, Upload
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.personalisation.personalise import Mixture
from replayfleet.federation.methods.steps.replay import eager_sampler
from tests.support.toy import SHORT_PFEDGRP, TOY, toy_data

SAMPLER = eager_sampler(TOY)
WAITING = PFedGRP(task=TOY, gate=False, **SHORT_PFEDGRP)
MIXING = replace(WAITING, mix_absent=True)


def uploads_of(round_index: int, clients: dict[str, dict[int, int]]) -> dict[str, Upload]:
    initial = WAITING.initial_download(seeded_generator(0, 0, "initial"))
    found = {}
    for place, (client, counts) in enumerate(clients.items()):
        data, rng = toy_data(counts, seed=10 * round_index + place), seeded_generator(0, round_index, client)
        _, found[client] = WAITING.local_round(ClientState(), data, initial, rng, sampler=SAMPLER)
    return found


@pytest.fixture(scope="module")
def everybody() -> tuple[AggregatorState, dict[str, Upload]]:
    first = uploads_of(0, {"a": {0: 8, 1: 8}, "b": {2: 8}, "c": {3: 8}})
    state, _ = WAITING.aggregate(AggregatorState(), first, seeded_generator(0, 0, "aggregator"), sampler=SAMPLER)
    return state, first


@pytest.fixture(scope="module")
def without_c() -> dict[str, Upload]:
    return uploads_of(1, {"a": {2: 8}, "b": {0: 8}})


def after(
    method: PFedGRP, state: AggregatorState, uploads: dict[str, Upload]
) -> tuple[AggregatorState, dict[str, Download]]:
    return method.aggregate(state, uploads, seeded_generator(0, 1, "aggregator"), sampler=SAMPLER)


def test_an_absent_client_is_served_what_it_had_and_the_new_average(
    everybody: tuple[AggregatorState, dict[str, Upload]], without_c: dict[str, Upload]
) -> None:
    state, _ = everybody
    later, downloads = after(WAITING, state, without_c)
    assert sorted(downloads) == ["a", "b", "c"]
    assert same_bits(downloads["c"].personalised, state.clients["c"].personalised)
    assert downloads["c"].weights == state.clients["c"].weights
    assert same_bits(downloads["c"].average, downloads["a"].average)
    assert same_bits(downloads["c"].sub_generators[3], state.clients["c"].sub_generators[3])
    assert same_bits(WAITING.download_for(later, "c", downloads["a"]).personalised, downloads["c"].personalised)


def test_the_personalised_model_is_the_mixture_by_the_weights_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = uploads_of(0, {"a": {0: 8, 1: 8}, "b": {2: 8}, "c": {3: 8}})
    shares = {"a": [0.5, 0.3, 0.2], "b": [0.1, 0.9, 0.0], "c": [0.25, 0.25, 0.5]}
    found = [Mixture(torch.tensor(weights), 0.0, "optimised") for weights in shares.values()]
    monkeypatch.setattr("replayfleet.federation.methods.pfedgrp.personalise_all", lambda *_: found)
    rng = seeded_generator(0, 0, "aggregator")
    _, downloads = WAITING.aggregate(AggregatorState(), uploads, rng, sampler=SAMPLER)
    models = [uploads[client].task_parameters for client in "abc"]
    for client, weights in shares.items():
        assert list(downloads[client].weights.values()) == pytest.approx(weights)
        mixed = weighted_average(models, torch.tensor(weights, dtype=torch.float64))
        assert all(torch.allclose(value, mixed[name]) for name, value in downloads[client].personalised.items())


def test_with_neighbours_a_model_is_mixed_of_the_nearest_and_tells_of_nobody_else() -> None:
    uploads = uploads_of(0, {"a": {0: 8, 1: 8}, "b": {2: 8}, "c": {0: 8, 1: 8}})
    method = dataclasses.replace(WAITING, aggregation_neighbours=1)
    _, downloads = after(method, AggregatorState(), uploads)
    assert set(downloads["a"].weights) <= {"a", "c"}
    assert sum(downloads["a"].weights.values()) == pytest.approx(1.0)
    models = [uploads[client].task_parameters for client in "ac"]
    shares = torch.tensor([downloads["a"].weights.get(client, 0.0) for client in "ac"], dtype=torch.float64)
    mixed = weighted_average(models, shares / shares.sum())
    assert all(torch.allclose(value, mixed[name]) for name, value in downloads["a"].personalised.items())


def test_the_older_a_cached_model_is_the_less_it_counts_in_the_average(
    everybody: tuple[AggregatorState, dict[str, Upload]], without_c: dict[str, Upload]
) -> None:
    method, (state, first) = replace(MIXING, staleness_exponent=0.5), everybody
    models = [without_c["a"].task_parameters, without_c["b"].task_parameters, first["c"].task_parameters]
    for num_missed in (1, 2, 3):
        state, downloads = after(method, AggregatorState.unpack(state.pack()), without_c)  # over a restart
        weights = torch.tensor([1, 1, (1 + num_missed) ** -0.5], dtype=torch.float64)
        assert same_bits(downloads["c"].average, weighted_average(models, weights / weights.sum()))
    state, _ = after(method, state, uploads_of(2, {"c": {3: 8}}))
    assert [state.clients[client].num_missed for client in "abc"] == [1, 1, 0]


def test_without_an_exponent_a_cached_model_counts_as_a_new_one(
    everybody: tuple[AggregatorState, dict[str, Upload]], without_c: dict[str, Upload]
) -> None:
    _, downloads = after(MIXING, everybody[0], without_c)
    models = [*(without_c[client].task_parameters for client in "ab"), everybody[1]["c"].task_parameters]
    assert same_bits(downloads["a"].average, weighted_average(models, torch.full((3,), 1 / 3, dtype=torch.float64)))


@pytest.mark.parametrize("wrong", [{"mix_absent": False}, {"robust": "median"}, {"staleness_exponent": -1.0}])
def test_an_exponent_that_nothing_would_obey_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="staleness_exponent"):
        PFedGRP(**{"task": TOY, "mix_absent": True, "staleness_exponent": 0.5, **wrong})


def test_an_absent_clients_old_model_takes_no_part_in_the_others(
    everybody: tuple[AggregatorState, dict[str, Upload]], without_c: dict[str, Upload]
) -> None:
    _, downloads = after(WAITING, everybody[0], without_c)
    assert set(downloads["a"].weights) == set(downloads["b"].weights) == {"a", "b"}
    models = [without_c[client].task_parameters for client in "ab"]
    assert same_bits(downloads["a"].average, weighted_average(models, torch.tensor([0.5, 0.5])))


def test_asynchronous_rounds_mix_the_cached_model_into_everybodys(
    everybody: tuple[AggregatorState, dict[str, Upload]], without_c: dict[str, Upload]
) -> None:
    state, first = everybody
    _, downloads = after(MIXING, state, without_c)
    assert all(set(download.weights) == {"a", "b", "c"} for download in downloads.values())
    assert all(abs(sum(download.weights.values()) - 1) < 1e-5 for download in downloads.values())
    models = [without_c["a"].task_parameters, without_c["b"].task_parameters, first["c"].task_parameters]
    assert same_bits(downloads["c"].average, weighted_average(models, torch.full((3,), 1 / 3, dtype=torch.float64)))


@pytest.mark.parametrize(("method", "replayed"), [(WAITING, False), (MIXING, True)])
def test_only_asynchronous_rounds_solve_eq_3_for_the_absent_client(
    method: PFedGRP, replayed: bool, everybody: tuple[AggregatorState, dict[str, Upload]], without_c: dict[str, Upload]
) -> None:
    state, _ = everybody
    bound: list[Parameters] = []

    def spy(parameters: Parameters) -> Draw:
        bound.append(parameters)
        return SAMPLER(parameters)

    method.aggregate(state, without_c, seeded_generator(0, 1, "aggregator"), sampler=spy)
    cached = state.clients["c"].sub_generators[3]
    assert any(same_bits(parameters, cached) for parameters in bound) is replayed


def test_a_client_that_comes_back_counts_with_its_new_model_again(
    everybody: tuple[AggregatorState, dict[str, Upload]], without_c: dict[str, Upload]
) -> None:
    state, _ = after(MIXING, everybody[0], without_c)
    returned = uploads_of(2, {"c": {3: 8}})
    later, downloads = after(MIXING, state, returned)
    assert same_bits(later.clients["c"].task_parameters, returned["c"].task_parameters)
    assert set(downloads["a"].weights) == {"a", "b", "c"}


def test_with_everybody_present_both_ways_are_the_same(
    everybody: tuple[AggregatorState, dict[str, Upload]],
) -> None:
    _, first = everybody
    (_, waiting), (_, mixing) = (after(method, AggregatorState(), first) for method in (WAITING, MIXING))
    for client, download in waiting.items():
        assert same_bits(download.personalised, mixing[client].personalised)
        assert download.weights == mixing[client].weights

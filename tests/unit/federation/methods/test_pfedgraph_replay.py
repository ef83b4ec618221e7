from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replayfleet.federation.methods import pfedgraph_records as graph
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.kit.seeding import seeded_generator, split_generator
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.pfedgraph import PFedGraph
from replayfleet.federation.methods.pfedgraph_replay import PFedGraphReplay, Upload
from replayfleet.federation.methods.steps.memory import Memory
from replayfleet.federation.methods.steps.replay import eager_sampler
from tests.support.toy import LEARNING, SHORT_REPLAY, TOY, accuracy, run_rounds, toy_data

SAMPLER = eager_sampler(TOY)
TINY = PFedGraphReplay(task=TOY, **SHORT_REPLAY)
PLAIN = PFedGraph(task=TOY, local_epochs=1, batch_size=16)
DATA = toy_data({0: 10, 1: 10})


def start() -> graph.Download:
    return TINY.initial_download(seeded_generator(0, 0, "initial"))


@pytest.fixture(scope="module")
def first_round() -> tuple[Memory, Upload]:
    return TINY.local_round(Memory(), DATA, start(), seeded_generator(0, 0, "a"), sampler=SAMPLER)


def test_a_client_that_remembers_nothing_trains_as_pfedgraph_does(first_round: tuple[Memory, Upload]) -> None:
    _, upload = first_round
    rng = seeded_generator(0, 0, "a")
    split_generator(rng)  # the replay's
    _, theirs = PLAIN.local_round(NoState(), DATA, start(), split_generator(rng), sampler=SAMPLER)
    assert same_bits(upload.task_parameters, theirs.task_parameters)
    assert same_bits(upload.initial, theirs.initial)
    assert upload.num_samples == theirs.num_samples


def test_replay_joins_the_training_but_not_the_sample_shares(first_round: tuple[Memory, Upload]) -> None:
    memory, _ = first_round
    data, download = toy_data({2: 12}, seed=1), start()
    after, ours = TINY.local_round(memory, data, download, seeded_generator(0, 1, "a"), sampler=SAMPLER)
    rng = seeded_generator(0, 1, "a")
    split_generator(rng)
    _, theirs = PLAIN.local_round(NoState(), data, download, split_generator(rng), sampler=SAMPLER)
    assert not same_bits(ours.task_parameters, theirs.task_parameters)
    assert ours.num_samples == 12
    assert (ours.num_updates, sorted(after.sub_generators)) == (1, [0, 1, 2])


def test_the_server_is_pfedgraphs(first_round: tuple[Memory, Upload]) -> None:
    _, upload = first_round
    _, other = TINY.local_round(
        Memory(), toy_data({2: 10, 3: 6}, seed=2), start(), seeded_generator(0, 0, "b"), sampler=SAMPLER
    )
    plain = {c: graph.Upload(u.task_parameters, u.num_samples, u.initial) for c, u in (("a", upload), ("b", other))}
    _, ours = TINY.aggregate(graph.AggregatorState(), {"b": other, "a": upload}, torch.Generator(), sampler=SAMPLER)
    _, theirs = PLAIN.aggregate(graph.AggregatorState(), plain, torch.Generator(), sampler=SAMPLER)
    assert ours.keys() == theirs.keys() == {"a", "b"}
    for client in ours:
        assert same_bits(ours[client].task_parameters, theirs[client].task_parameters)
        assert ours[client].weights == theirs[client].weights


def test_its_records_survive_packing(first_round: tuple[Memory, Upload]) -> None:
    _, upload = first_round
    again = Upload.unpack(upload.pack())
    assert same_bits(again.task_parameters, upload.task_parameters)
    assert same_bits(again.initial, upload.initial)
    assert (again.num_samples, again.num_updates, again.num_filled) == (20, 2, 0)
    assert set(upload.pack().parameter_sets) == {"task", "initial"}
    with pytest.raises(ValueError, match="num_filled"):
        Upload.unpack(Artefacts(upload.pack().parameter_sets, {"num_samples": 1, "num_updates": 0}))


@pytest.mark.parametrize(("key", "value"), [("strength", 0.0), ("gate_samples", 0), ("regulariser_sign", "both")])
def test_impossible_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        replace(TINY, **{key: value})  # type: ignore[arg-type]


@pytest.mark.learning
def test_it_learns_a_small_problem() -> None:
    _, downloads = run_rounds(replace(TINY, **LEARNING), [{"a": {0: 24, 1: 24}}])
    assert accuracy(downloads["a"].task_parameters, {0: 20, 1: 20}) > 0.8

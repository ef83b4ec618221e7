from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
import torch

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.fedavg_replay import FedAvgReplay, Upload
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.kit.seeding import seeded_generator, split_generator
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload, TaskModels
from replayfleet.federation.methods.lockstep import together
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.steps.memory import Memory
from replayfleet.federation.methods.steps.replay import eager_sampler
from tests.support.toy import LEARNING, SHORT_REPLAY, TOY, accuracy, run_rounds, toy_data

SAMPLER = eager_sampler(TOY)
TINY = FedAvgReplay(task=TOY, **SHORT_REPLAY)
DATA = toy_data({0: 10, 1: 10})


def start() -> TaskDownload:
    download: TaskDownload = TINY.initial_download(seeded_generator(0, 0, "initial"))
    return download


@pytest.fixture(scope="module")
def first_round() -> tuple[Memory, Upload]:
    return TINY.local_round(Memory(), DATA, start(), seeded_generator(0, 0, "a"), sampler=SAMPLER)


def same_memory(left: Memory, right: Memory) -> bool:
    a, b = left.pack(), right.pack()
    sets = a.parameter_sets
    return sets.keys() == b.parameter_sets.keys() and all(same_bits(sets[n], b.parameter_sets[n]) for n in sets)


def test_a_client_that_remembers_nothing_trains_as_fedavg_does(first_round: tuple[Memory, Upload]) -> None:
    rng = seeded_generator(0, 0, "a")
    split_generator(rng)  # the replay's
    plain = FedAvg(task=TOY, local_epochs=1, batch_size=16)
    _, theirs = plain.local_round(NoState(), DATA, start(), split_generator(rng), sampler=SAMPLER)
    assert same_bits(first_round[1].task_parameters, theirs.task_parameters)


def test_sub_generators_stay_on_the_client_and_their_updates_are_counted(first_round: tuple[Memory, Upload]) -> None:
    memory, upload = first_round
    assert sorted(memory.sub_generators) == [0, 1]
    assert memory.seen == {0: 10, 1: 10}
    assert list(upload.pack().parameter_sets) == ["task"]
    assert upload.pack().facts == {"num_samples": 20, "num_updates": 2, "num_filled": 0}
    assert TINY.upload_layout("sub-generator/0") is None


def test_its_client_half_is_pfedgrps_without_alignment(first_round: tuple[Memory, Upload]) -> None:
    """With one model for both roles and lambda = 0, the client half of pFedGRP gives the same bits."""
    memory, upload = first_round
    shared = {key: getattr(TINY, key) for key in ("gan_batch_size", "gate_samples", "max_tries_factor")}
    theirs = PFedGRP(task=TOY, local_epochs=1, batch_size=16, sub_generator_epochs=1, alignment_weight=0.0, **shared)
    download = theirs.initial_download(seeded_generator(0, 0, "initial"))
    data, rng = toy_data({2: 12}, seed=1), (seeded_generator(0, 1, "a"), seeded_generator(0, 1, "a"))
    ours_after, ours = TINY.local_round(memory, data, start(), rng[0], sampler=SAMPLER)
    theirs_after, other = theirs.local_round(memory, data, download, rng[1], sampler=SAMPLER)
    assert same_bits(ours.task_parameters, other.task_parameters)
    assert same_memory(ours_after, theirs_after)
    assert (ours.num_updates, ours.num_filled) == (other.num_updates, other.num_filled)
    assert not same_bits(ours.task_parameters, upload.task_parameters)


def test_equal_arguments_give_equal_bits_and_leave_the_memory_alone(first_round: tuple[Memory, Upload]) -> None:
    memory, _ = first_round
    before = {name: {k: t.clone() for k, t in p.items()} for name, p in memory.pack().parameter_sets.items()}
    data = toy_data({0: 8, 2: 8}, seed=1)
    once = TINY.local_round(memory, data, start(), seeded_generator(0, 1, "a"), sampler=SAMPLER)
    again = TINY.local_round(memory, data, start(), seeded_generator(0, 1, "a"), sampler=SAMPLER)
    assert same_bits(once[1].task_parameters, again[1].task_parameters)
    assert same_memory(once[0], again[0])
    assert all(same_bits(memory.pack().parameter_sets[name], parameters) for name, parameters in before.items())


def test_clients_that_train_together_replay_as_well(first_round: tuple[Memory, Upload]) -> None:
    memory, _ = first_round
    data = toy_data({2: 8}, seed=1)
    state, upload = TINY.local_round(memory, data, start(), seeded_generator(0, 1, "a"), sampler=SAMPLER)
    works = {c: TINY.local_work(memory, data, start(), seeded_generator(0, 1, c), sampler=SAMPLER) for c in "ab"}
    done = together(works)
    assert (done["a"][1].num_updates, done["a"][0].seen) == (upload.num_updates, state.seen)
    for name, tensor in upload.task_parameters.items():
        assert torch.allclose(done["a"][1].task_parameters[name], tensor, atol=1e-4)


def test_the_server_weighs_clients_by_real_samples_in_any_order_of_arrival() -> None:
    uploads = {"b": Upload({"w": torch.tensor([4.0])}, 30, 2, 5), "a": Upload({"w": torch.tensor([0.0])}, 10)}
    for order in (["a", "b"], ["b", "a"]):
        arrived = {client: uploads[client] for client in order}
        _, downloads = TINY.aggregate(TaskModels(), arrived, torch.Generator(), sampler=SAMPLER)
        assert downloads["a"].task_parameters["w"].item() == 3.0
    with pytest.raises(ValueError, match="without uploads"):
        TINY.aggregate(TaskModels(), {}, torch.Generator(), sampler=SAMPLER)


def test_its_records_survive_packing(first_round: tuple[Memory, Upload]) -> None:
    memory, upload = first_round
    assert same_memory(Memory.unpack(memory.pack()), memory)
    assert Memory.unpack(memory.pack()).seen == memory.seen
    again = Upload.unpack(upload.pack())
    assert same_bits(again.task_parameters, upload.task_parameters)
    assert (again.num_samples, again.num_updates, again.num_filled) == (20, 2, 0)
    with pytest.raises(ValueError, match="num_updates"):
        Upload.unpack(Artefacts(upload.pack().parameter_sets, {"num_samples": 1}))
    with pytest.raises(ValueError, match="num_samples"):
        TINY.check_upload(replace(upload, num_samples=0))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("local_epochs", 0),
        ("generators", "many"),
        ("gan_learning_rate", float("nan")),
        ("gate_threshold", "high"),
        ("max_tries_factor", 0),
        ("sub_generator_epochs", -1),
        ("gan_beta1", 1.5),
    ],
)
def test_impossible_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        replace(TINY, **{key: value})  # type: ignore[arg-type]


@pytest.mark.learning
def test_it_remembers_what_fedavg_forgets() -> None:
    task, learning = replace(TOY, architecture="lenet"), LEARNING | {"learning_rate": 0.05}
    rounds = [{"a": {0: 24, 1: 24}}, {"a": {2: 24, 3: 24}}]
    everything = {0: 20, 1: 20, 2: 20, 3: 20}
    method = FedAvgReplay(
        task=task,
        sub_generator_epochs=80,
        gan_batch_size=12,
        gan_learning_rate=2e-3,
        gan_beta1=0.5,
        critic_steps_per_generator_step=1,
        **learning,
    )
    _, remembered = run_rounds(method, rounds, last=replace(method, sub_generator_epochs=1))
    forgot = [run_rounds(FedAvg(task=task, **learning), rounds, run_seed=seed)[1] for seed in range(5)]
    # One of a dozen seeds forgets little.
    assert median(accuracy(one["a"].task_parameters, everything, task=task) for one in forgot) <= 0.55
    assert accuracy(remembered["a"].task_parameters, everything, task=task) > 0.8

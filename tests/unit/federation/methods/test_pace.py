"""Local rounds that are stopped in time: what is trained first, what is kept, and what waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import pytest
import torch
from support.toy import TOY, toy_data

from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.pace import ShouldStop, Stage, never, steps_per_epoch
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.memory import Memory, Retraining, first_trainings, train_in_time, with_replay
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.sub_generators.ddpm import DdpmSchedule, new_denoiser, train_denoiser
from replayfleet.federation.methods.steps.sub_generators.kinds import WganGp
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import SubGenerator, new_sub_generator
from replayfleet.federation.methods.steps.task_model import Optimisation, judge_with, train_task_model
from replayfleet.federation.service.fleet.presets import settings_for
from replayfleet.models.build import build_task_model, initialise
from tests.support.rng import rng

SPEC = replace(TOY, generator_width=1)
KIND = WganGp(spec=SPEC, batch_size=4, learning_rate=1e-4, betas=(0.5, 0.9), critic_steps_per_generator_step=2)
TINY = {
    "local_epochs": 2,
    "batch_size": 4,
    "sub_generator_epochs": 2,
    "gan_batch_size": 4,
    "gate_samples": 4,
    "max_tries_factor": 1,
}


def after(num_steps: int) -> ShouldStop:
    left = iter(range(num_steps - 1))
    return lambda: next(left, None) is None


class Script:
    """A pace that stops the task model after some steps, and knows which sub-generators have a turn."""

    def __init__(self, task_steps: int = 10**6, turns: Sequence[int | None] = ()) -> None:
        self._task_steps = task_steps
        self._turns = list(turns)
        self.asked: list[tuple[Stage, tuple[Stage, ...]]] = []

    def task_model(self, stage: Stage, ahead: Sequence[Stage]) -> ShouldStop:
        self.asked.append((stage, tuple(ahead)))
        return after(self._task_steps)

    def sub_generator(self, stage: Stage, ahead: Sequence[Stage]) -> ShouldStop | None:
        self.asked.append((stage, tuple(ahead)))
        if not self._turns:
            return never
        steps = self._turns.pop(0)
        return None if steps is None else after(steps)


def same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_stopped_task_model_is_what_fewer_epochs_give() -> None:
    data, start = toy_data({0: 6, 1: 6}), initialise(build_task_model(SPEC), rng()).state_dict()

    def trained(num_epochs: int, should_stop: ShouldStop = never) -> Any:
        how = Optimisation(
            num_epochs=num_epochs,
            batch_size=4,
            learning_rate=0.01,
            momentum=0.9,
            weight_decay=0.0,
            should_stop=should_stop,
        )
        return train_task_model(SPEC, start, data.images, data.labels, how, rng(1))

    assert same(trained(50, after(3)), trained(1))
    assert not same(trained(50, after(2)), trained(1))


def test_a_stopped_sub_generator_is_what_fewer_epochs_give() -> None:
    images, start = toy_data({0: 8}).images, new_sub_generator(SPEC, rng())
    stopped = KIND.train(start, images, 50, rng(1), after(2))
    whole = KIND.train(start, images, 1, rng(1))
    assert same(stopped.generator, whole.generator)
    assert same(stopped.critic, whole.critic)


def test_a_stopped_diffusion_model_is_what_fewer_epochs_give() -> None:
    pytest.importorskip("diffusers")
    images, start = toy_data({0: 4}).images, new_denoiser(SPEC, 4, rng())

    def trained(num_epochs: int, should_stop: ShouldStop = never) -> SubGenerator:
        schedule = DdpmSchedule(num_epochs=num_epochs, batch_size=4, learning_rate=1e-3, should_stop=should_stop)
        return train_denoiser(SPEC, 4, start, images, schedule, rng(1))

    assert same(trained(50, after(1)).generator, trained(1).generator)


def test_never_learned_classes_come_first_then_the_worst_drifted_and_results_keep_their_order() -> None:
    def work(count: int, recognised: float | None = None, *, can_wait: bool = False) -> Retraining:
        images = toy_data({0: count}).images
        return Retraining(KIND.new(rng(count)), images, 1, rng(count), recognised, can_wait)

    asked = [work(5, 0.2, can_wait=True), work(6), work(7, 0.1, can_wait=True), work(9)]
    pace = Script(turns=[1, 1, None, 1])
    trained = train_in_time(KIND, asked, pace)
    assert [result is None for result in trained] == [False, False, True, False]
    assert [stage.steps_per_epoch for stage, _ in pace.asked] == [3, 2, 2, 2]
    assert [stage.can_wait for stage, _ in pace.asked] == [False, False, True, True]
    assert [len(ahead) for _, ahead in pace.asked] == [3, 2, 1, 0]
    expected = KIND.train(asked[3].start, asked[3].images, 1, work(9).rng, after(1))
    assert same(trained[3].generator, expected.generator)


@pytest.mark.parametrize("num_samples", [2, 4, 5, 6, 9])
def test_a_pace_is_told_as_many_steps_as_are_taken(num_samples: int) -> None:
    pace, taken = Script(), 0

    def count() -> bool:
        nonlocal taken
        taken += 1
        return False

    sgd = Optimisation(num_epochs=3, batch_size=4, learning_rate=0.1, momentum=0.0, weight_decay=0.0)
    sgd.paced(num_samples, pace)
    data, start = toy_data({0: num_samples}), initialise(build_task_model(SPEC), rng()).state_dict()
    train_task_model(SPEC, start, data.images, data.labels, replace(sgd, should_stop=count), rng())
    assert pace.asked[0][0].num_steps == taken


def round_of(method: str, data: RoundData, state: Any = None, **options: Any) -> tuple[Any, Any]:
    built = METHODS[method](task=SPEC, **TINY)
    download = built.initial_download(seeded_generator(0, 0, "initial"))
    first = built.initial_states()[0] if state is None else state
    made: tuple[Any, Any] = built.local_round(first, data, download, rng(5), sampler=eager_sampler(SPEC), **options)
    return made


def same_records(left: Any, right: Any) -> bool:
    left_sets, right_sets = left.pack().parameter_sets, right.pack().parameter_sets
    return (
        left_sets.keys() == right_sets.keys()
        and all(same(left_sets[name], right_sets[name]) for name in left_sets)
        and left.pack().facts == right.pack().facts
    )


@pytest.mark.parametrize("method", ["pfedgrp", "fedavg-replay"])
def test_a_pace_that_never_stops_costs_no_bits(method: str) -> None:
    data = toy_data({0: 6, 1: 5, 2: 2})
    plain, paced = round_of(method, data), round_of(method, data, pace=Script())
    assert all(same_records(left, right) for left, right in zip(plain, paced, strict=True))


PLAIN = ["fedprox", "pfedgraph", "pfedgraph-replay", "agem", "der", "fedgp", "lander", "target", "mfcl"]
"""Methods that train their task model in ``local_round`` itself."""


def test_every_method_that_deploys_can_be_stopped() -> None:
    paced = {name for name, method in METHODS.items() if "pace" in signature(method.local_round).parameters}
    assert paced >= {name for name, method in METHODS.items() if method.deployable}


@pytest.mark.parametrize("name", PLAIN)
def test_the_task_model_of_every_other_method_stops_in_its_first_round_and_in_the_next(name: str) -> None:
    known = {field.name for field in fields(METHODS[name])}
    settings = {**settings_for(name, "tiny", known=known), "batch_size": 4}
    method = METHODS[name](task=SPEC, **settings, **({"warm_up_rounds": 1} if name == "target" else {}))
    sampler = eager_sampler(SPEC)
    state, aggregator_state = method.initial_states()
    download = method.initial_download(rng())
    for index, counts in enumerate(({0: 6, 1: 6}, {1: 5, 2: 7})):
        data = toy_data(counts, seed=index)

        def trained(
            pace: Script | None, state: Any = state, data: RoundData = data, download: Any = download, seed: int = index
        ) -> tuple[Any, Any]:
            return method.local_round(state, data, download, rng(seed), sampler=sampler, pace=pace)  # type: ignore[no-any-return]

        plain, whole, one_step = trained(None), trained(Script()), trained(stopped := Script(task_steps=1))
        assert all(same_records(left, right) for left, right in zip(plain, whole, strict=True))
        assert stopped.asked[0][0].num_epochs == settings["local_epochs"]
        assert stopped.asked[0][0].steps_per_epoch >= 3
        assert not same(plain[1].pack().parameter_sets["task"], one_step[1].pack().parameter_sets["task"])
        state = plain[0]
        aggregator_state, downloads = method.aggregate(aggregator_state, {"a": plain[1]}, rng(9), sampler=sampler)
        download = downloads["a"]


@pytest.mark.parametrize("method", ["pfedgrp", "fedavg-replay"])
def test_a_class_without_a_turn_is_counted_but_not_remembered_and_is_first_when_it_is_met_again(method: str) -> None:
    data = toy_data({0: 8, 1: 5})
    pace = Script(task_steps=1, turns=[1, None])
    state, upload = round_of(method, data, pace=pace)
    task, ahead = pace.asked[0]
    assert (task.num_epochs, task.steps_per_epoch) == (2, 3), "13 samples in batches of 4, the last of one left out"
    assert sorted(stage.num_steps for stage in ahead) == [4, 4]
    assert list(state.sub_generators) == [0]
    assert state.seen == {0: 8, 1: 5}
    assert upload.num_updates == 1

    again = Script()
    state, _ = round_of(method, toy_data({0: 5, 1: 5}, seed=1), state, pace=again)
    assert next(stage.can_wait for stage, _ in again.asked[1:]) is False
    assert list(state.sub_generators) == [0, 1]


def test_a_drifted_class_without_a_turn_keeps_its_sub_generator() -> None:
    state, _ = round_of("pfedgrp", toy_data({0: 8}))
    later = METHODS["pfedgrp"](task=SPEC, **{**TINY, "gate_threshold": 2.0})  # everything drifted
    download = later.initial_download(seeded_generator(0, 0, "initial"))
    data = toy_data({0: 6}, seed=1)
    arguments: Any = (state, data, download, rng(5))
    waited, upload = later.local_round(*arguments, sampler=eager_sampler(SPEC), pace=Script(turns=[None]))
    assert same(waited.sub_generators[0].generator, state.sub_generators[0].generator)
    assert upload.num_updates == 0
    assert waited.seen == {0: 14}


def test_what_cannot_wait_is_known_before_the_gate_looks() -> None:
    method = METHODS["pfedgrp"](task=SPEC, **TINY)
    parameters = method.initial_download(rng()).personalised
    known = Memory({0: new_sub_generator(SPEC, rng())}, {0: 4})
    mixed = with_replay(method, known, toy_data({0: 4, 2: 9}), judge_with(SPEC, parameters), rng(), eager_sampler(SPEC))
    assert first_trainings(method, known, mixed) == (Stage(2, 3),)
    single = METHODS["pfedgrp"](task=SPEC, **TINY, generators="single")
    num_samples = 13 + len(mixed.replay.labels)
    assert first_trainings(single, known, mixed) == (Stage(2, steps_per_epoch(num_samples, 4)),)


def test_steps_of_an_epoch_count_the_last_smaller_batch() -> None:
    assert [steps_per_epoch(count, 4) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]

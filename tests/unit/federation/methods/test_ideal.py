from __future__ import annotations

import pytest

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.ideal import Ideal
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload, TaskModels
from replayfleet.federation.methods.steps.kept_samples import StoredRounds
from tests.support.toy import run_rounds, toy_data
from tests.support.two_stages import (
    ONE_EPOCH,
    SAMPLER,
    SECOND,
    SECOND_STAGE,
    TOY,
    after_first_stage,
    first_stage_loss,
    random_model,
    rng,
    what_fedavg_unlearns,
)


def test_the_first_round_has_fedavgs_bits_and_the_second_trains_on_both() -> None:
    start, data = TaskDownload(random_model()), toy_data({0: 4, 1: 4})
    method = Ideal(task=TOY, **ONE_EPOCH)
    stored, upload = method.local_round(StoredRounds(), data, start, rng(), sampler=SAMPLER)
    _, plain = FedAvg(task=TOY, **ONE_EPOCH).local_round(NoState(), data, start, rng(), sampler=SAMPLER)
    assert same_bits(upload.task_parameters, plain.task_parameters)
    later, both = method.local_round(stored, toy_data({2: 3}), start, rng(), sampler=SAMPLER)
    assert (upload.num_samples, both.num_samples) == (8, 11)
    assert later.all_of("labels").tolist() == [0] * 4 + [1] * 4 + [2] * 3
    assert len(stored.rounds) == 1


@pytest.mark.learning
def test_it_unlearns_next_to_nothing() -> None:
    start, first = after_first_stage()
    method, stored = Ideal(task=TOY, **SECOND_STAGE), StoredRounds().with_round(first)
    _, upload = method.local_round(stored, toy_data(SECOND), TaskDownload(start), rng(), sampler=SAMPLER)
    assert first_stage_loss(upload.task_parameters) < 0.1 * what_fedavg_unlearns()


def test_one_seed_gives_the_same_bits() -> None:
    method, stored = Ideal(task=TOY, **ONE_EPOCH), StoredRounds().with_round(toy_data({0: 4}))
    start, data = TaskDownload(random_model()), toy_data({1: 4})
    one, two = (method.local_round(stored, data, start, rng(3), sampler=SAMPLER)[1] for _ in range(2))
    assert same_bits(one.task_parameters, two.task_parameters)


def test_two_stages_together_leave_it_with_both() -> None:
    rounds = [{"a": {0: 8}, "b": {1: 8}}, {"a": {1: 8}, "b": {0: 8}}]
    state, downloads = run_rounds(Ideal(task=TOY, **ONE_EPOCH), rounds)
    assert same_bits(TaskModels.unpack(state.pack()).common, downloads["b"].task_parameters)

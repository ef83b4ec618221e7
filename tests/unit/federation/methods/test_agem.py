from __future__ import annotations

import pytest
import torch

from replayfleet.federation.methods.agem import AGEM
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.task_records import TaskDownload
from replayfleet.federation.methods.steps.projection import gradient_at, gradient_layout, joined, project_conflicting
from tests.support.toy import run_rounds, toy_data
from tests.support.two_stages import (
    FIRST,
    ONE_EPOCH,
    SAMPLER,
    SECOND,
    SECOND_STAGE,
    TOY,
    after_first_stage,
    agree,
    assert_repeatable,
    first_stage_loss,
    random_model,
    reservoir_of,
    rng,
    step_taken,
    what_fedavg_unlearns,
)


def test_one_step_follows_the_gradient_projected_against_the_buffers() -> None:
    start, first, data = random_model(), toy_data(FIRST), toy_data({2: 4, 3: 4})
    _, upload = AGEM(task=TOY, **ONE_EPOCH).local_round(
        reservoir_of(first), data, TaskDownload(start), rng(), sampler=SAMPLER
    )
    names = gradient_layout(TOY)
    new = joined(gradient_at(TOY, start, data.images, data.labels, "float32"), names)
    own = joined(gradient_at(TOY, start, first.images, first.labels, "float32"), names)
    assert torch.dot(new, own) < 0  # they do conflict
    taken = step_taken(start, upload.task_parameters)
    assert agree(taken, project_conflicting(new, own))
    assert not agree(taken, new)


def test_with_an_empty_buffer_it_has_fedavgs_bits() -> None:
    rounds = [{"a": {0: 8, 1: 4}, "b": {2: 8}}]  # one step each
    _, ours = run_rounds(AGEM(task=TOY, **ONE_EPOCH), rounds)
    _, theirs = run_rounds(FedAvg(task=TOY, **ONE_EPOCH), rounds)
    assert same_bits(ours["a"].task_parameters, theirs["a"].task_parameters)


def test_it_keeps_samples_without_logits_once_per_round() -> None:
    method = AGEM(task=TOY, **ONE_EPOCH)
    state, _ = method.initial_states()
    kept, _ = method.local_round(state, toy_data({0: 5, 1: 6}), TaskDownload(random_model()), rng(), sampler=SAMPLER)
    assert sorted(kept.samples) == ["images", "labels"]
    assert sorted(kept.samples["labels"].tolist()) == [0] * 5 + [1] * 6
    assert len(kept.samples["images"].flatten(1).unique(dim=0)) == 11


def test_a_sample_that_the_first_epoch_dropped_is_kept_when_training_meets_it() -> None:
    data, start = toy_data({0: 5, 1: 4}), TaskDownload(random_model())
    seen = {}
    for epochs in (1, 2):
        method = AGEM(task=TOY, **{**ONE_EPOCH, "local_epochs": epochs, "batch_size": 8})
        kept, _ = method.local_round(method.initial_states()[0], data, start, rng(), sampler=SAMPLER)
        seen[epochs] = kept.num_seen
    assert seen == {1: 8, 2: 9}


def test_one_seed_gives_the_same_bits_and_inputs_stay_untouched() -> None:
    _, first = after_first_stage()
    assert_repeatable(AGEM(task=TOY, **ONE_EPOCH), reservoir_of(first))


@pytest.mark.learning
def test_it_unlearns_less_than_fedavg() -> None:
    start, first = after_first_stage()
    method = AGEM(task=TOY, **SECOND_STAGE)
    _, upload = method.local_round(reservoir_of(first), toy_data(SECOND), TaskDownload(start), rng(), sampler=SAMPLER)
    assert first_stage_loss(upload.task_parameters) < 0.9 * what_fedavg_unlearns()

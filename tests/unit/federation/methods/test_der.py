from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from replayfleet.federation.methods import fedgp_records
from replayfleet.federation.methods.der import DER, TARGETS, refreshed
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.fedgp import FedGP
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.task_records import TaskDownload
from replayfleet.federation.methods.steps.kept_samples import Reservoir
from replayfleet.federation.methods.steps.projection import flat_gradient
from replayfleet.federation.methods.steps.task_model import judge_with, trainable_task_model
from tests.support.toy import run_rounds, toy_data
from tests.support.two_stages import (
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


@pytest.mark.parametrize(("met", "beta"), [({0: 4}, 0.0), ({0: 16, 1: 16}, 0.25)])
def test_one_step_descends_the_new_samples_loss_and_the_distance_to_the_kept_logits(
    met: dict[int, int], beta: float
) -> None:
    """With beta the loss of the kept samples' labels too."""
    start, data, old = random_model(), toy_data({2: 4, 3: 4}), toy_data(met)
    reservoir = reservoir_of(old, judge=random_model(1))
    method = DER(task=TOY, **ONE_EPOCH, alpha=0.5, beta=beta)
    _, upload = method.local_round(reservoir, data, TaskDownload(start), rng(), sampler=SAMPLER)
    module = trainable_task_model(TOY, start)
    loss = F.cross_entropy(module(data.images), data.labels)
    loss = loss + 0.5 * (module(old.images) - reservoir.samples["logits"]).square().mean()
    loss = loss + beta * F.cross_entropy(module(old.images), old.labels)
    loss.backward()
    assert agree(step_taken(start, upload.task_parameters), flat_gradient(module))


def test_targets_of_a_round_are_what_its_first_model_says_of_the_kept_samples() -> None:
    """Against these a first step's second term is 0: what a young model said when it met a sample is forgotten."""
    start, data, old = random_model(), toy_data({2: 4, 3: 4}), toy_data({0: 8, 1: 8})
    reservoir = reservoir_of(old, judge=random_model(1))
    again = refreshed(TOY, start, reservoir, "round")
    assert torch.equal(again.samples["logits"], judge_with(TOY, start)(old.images))
    assert torch.equal(again.samples["images"], old.images)
    assert refreshed(TOY, start, reservoir, "met") is reservoir
    for build in (DER, lambda **settings: FedGP(base="der", **settings)):
        methods = [build(task=TOY, **ONE_EPOCH, targets=targets) for targets in TARGETS]
        download = TaskDownload(start) if build is DER else fedgp_records.Download(start)
        kept = [m.local_round(reservoir, data, download, rng(), sampler=SAMPLER)[0].samples["logits"] for m in methods]
        assert torch.equal(kept[0][: len(old.labels)], reservoir.samples["logits"])
        assert torch.equal(kept[1][: len(old.labels)], again.samples["logits"])


def test_it_keeps_no_logits_that_nothing_uses() -> None:
    """Experience replay (alpha 0); an earlier version kept them all the same."""
    older = reservoir_of(toy_data({0: 8}), judge=random_model(1))
    for method in (DER(task=TOY, **ONE_EPOCH, alpha=0.0, beta=1.0, targets=targets) for targets in TARGETS):
        kept, _ = method.local_round(older, toy_data({1: 4}), TaskDownload(random_model()), rng(), sampler=SAMPLER)
        assert sorted(kept.samples) == ["images", "labels"]
        assert len(kept) == 12


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_without_its_term_it_has_fedavgs_bits(alpha: float) -> None:
    rounds = [{"a": {0: 8, 1: 4}, "b": {2: 8}}, {"a": {3: 8}, "b": {1: 8}}]
    num_rounds = 1 if alpha else 2  # the only step of round 0 finds an empty buffer
    _, ours = run_rounds(DER(task=TOY, **ONE_EPOCH, alpha=alpha), rounds[:num_rounds])
    _, theirs = run_rounds(FedAvg(task=TOY, **ONE_EPOCH), rounds[:num_rounds])
    assert same_bits(ours["a"].task_parameters, theirs["a"].task_parameters)


def test_it_keeps_samples_with_the_logits_that_they_had_when_they_were_met() -> None:
    start, data = random_model(), toy_data({0: 3, 1: 3})
    method = DER(task=TOY, **{**ONE_EPOCH, "local_epochs": 2}, buffer_size=4)
    state, _ = method.initial_states()
    kept, _ = method.local_round(state, data, TaskDownload(start), rng(), sampler=SAMPLER)
    assert (kept.capacity, kept.num_seen, len(kept)) == (4, 6, 4)  # once per round, not once per epoch
    met = trainable_task_model(TOY, start)(data.images).detach()
    for image, label, logits in zip(*(kept.samples[key] for key in ("images", "labels", "logits")), strict=True):
        row = int((data.images - image).abs().flatten(1).sum(dim=1).argmin())
        assert data.images[row].equal(image)
        assert data.labels[row].equal(label)
        assert torch.allclose(met[row], logits, atol=1e-5)
    assert state == Reservoir(4)


def test_one_seed_gives_the_same_bits_and_inputs_stay_untouched() -> None:
    start, first = after_first_stage()
    assert_repeatable(DER(task=TOY, **ONE_EPOCH), reservoir_of(first, judge=start))


@pytest.mark.learning
def test_it_unlearns_less_than_fedavg() -> None:
    start, first = after_first_stage()
    kept = reservoir_of(first, judge=start)
    method = DER(task=TOY, **SECOND_STAGE)
    _, upload = method.local_round(kept, toy_data(SECOND), TaskDownload(start), rng(), sampler=SAMPLER)
    assert first_stage_loss(upload.task_parameters) < 0.5 * what_fedavg_unlearns()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("alpha", -1.0), ("alpha", float("nan")), ("beta", -1.0), ("buffer_size", 1), ("buffer_batch_size", 0)],
)
def test_impossible_settings_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting} is"):
        DER(task=TOY, **{setting: value})  # type: ignore[arg-type]

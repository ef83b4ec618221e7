from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayfleet.federation.methods import pfedgrp_records as grp
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_plus import PFedGRPPlus
from replayfleet.federation.methods.steps.memory import MixedData, looking_alike, sampler_of
from replayfleet.federation.methods.steps.replay import Replay
from replayfleet.federation.methods.steps.task_model import aligned_loss, train_task_model
from tests.support.toy import LEARNING, TOY, accuracy, run_rounds, toy_data

SHORT: dict[str, Any] = {
    **LEARNING,
    "local_epochs": 1,
    "gate_samples": 16,
    "replay_per_client": 16,
    "aggregation_epochs": 1,
}
PLAIN = PFedGRPPlus(task=TOY, **SHORT)
WGAN = {"sub_generator": "wgan-gp"}
ROUNDS = [{"a": {0: 8, 1: 8}, "b": {2: 8, 3: 8}}, {"a": {2: 8, 3: 8}, "b": {0: 8, 1: 8}}]


def mixed(real: dict[int, int], replayed: dict[int, int]) -> MixedData:
    data, drawn = toy_data(real), toy_data(replayed, seed=1)
    return MixedData(data, Replay(drawn.images, drawn.labels, 0, 0))


def test_without_its_levers_it_is_pfedgrp() -> None:
    off = {"gate": True, "smooth_share": 0.0, "detail_share": 0.0}
    same = replace(PLAIN, sub_generator="wgan-gp", sub_generator_epochs=1, gan_batch_size=16, **off)
    theirs = PFedGRP(task=TOY, sub_generator_epochs=1, gan_batch_size=16, **SHORT)
    ours, plain = (run_rounds(method, ROUNDS)[1] for method in (same, theirs))
    for client in ("a", "b"):
        assert same_bits(ours[client].personalised, plain[client].personalised)


def test_one_seed_gives_the_same_bits_and_the_order_of_clients_changes_nothing() -> None:
    method = replace(PLAIN, choose=True, replay_credit=0.5)
    backwards = [dict(reversed(list(clients.items()))) for clients in ROUNDS]
    first, second = (run_rounds(method, rounds)[1] for rounds in (ROUNDS, backwards))
    assert all(same_bits(first[client].personalised, second[client].personalised) for client in ("a", "b"))


def test_samples_of_a_round_are_learned_as_replay_looks_too_and_some_replay_as_they_do() -> None:
    real, drawn = toy_data({0: 150, 1: 150}), toy_data({2: 30}, seed=1)
    replay = Replay(drawn.images.mean(dim=0, keepdim=True).expand_as(drawn.images), drawn.labels, 0, 0)
    found = looking_alike(replace(PLAIN, detail_share=0.5), real, replay, torch.Generator().manual_seed(0))
    assert torch.equal(found.smoothed.labels, real.labels)
    fine = [detail_of(images) for images in (real.images, found.smoothed.images, replay.images, found.replay.images)]
    assert fine[1].mean() < 0.8 * fine[0].mean()
    changed = (found.replay.images != replay.images).flatten(1).any(dim=1)
    assert 0 < int(changed.sum()) < 30
    assert fine[3][changed].min() > fine[2].max(), "these look real now"
    joined = found.joined()
    assert torch.equal(joined.labels, torch.cat([real.labels, real.labels, drawn.labels])), "replay stays last"


def detail_of(images: torch.Tensor) -> torch.Tensor:
    """How much neighbouring pixels differ, (N,)."""
    return images.diff(dim=-1).abs().mean(dim=(1, 2, 3)) + images.diff(dim=-2).abs().mean(dim=(1, 2, 3))


@pytest.mark.parametrize("shares", [{"smooth_share": 0.0, "detail_share": 0.0}, {}])
def test_without_shares_or_without_replay_nothing_is_drawn_or_changed(shares: dict[str, float]) -> None:
    real, rng = toy_data({0: 4}), torch.Generator().manual_seed(3)
    none = Replay(torch.empty(0, 1, 28, 28), torch.empty(0, dtype=torch.int64), 0, 0)
    replay = mixed({0: 4}, {1: 4}).replay if shares else none
    before = rng.get_state()
    found = looking_alike(replace(PLAIN, **shares), real, replay, rng)
    assert (found.smoothed, found.replay) == (None, replay)
    assert torch.equal(rng.get_state(), before)


def test_the_former_model_teaches_replay_alone() -> None:
    drawn = mixed({0: 6, 1: 6}, {2: 5})
    both = looking_alike(PLAIN, drawn.real, drawn.replay, torch.Generator().manual_seed(0))
    asked = PLAIN._training(both, frozenset(), PLAIN.initial_download(torch.Generator()), torch.Generator())
    alignment = asked.job.alignment
    assert alignment.mask.tolist() == [False] * 24 + [True] * 5


def test_a_share_of_the_samples_is_learned_twice() -> None:
    drawn = mixed({0: 200}, {1: 4})
    found = looking_alike(replace(PLAIN, smooth_share=0.3), drawn.real, drawn.replay, torch.Generator().manual_seed(0))
    assert 30 < len(found.smoothed.labels) < 90


def test_a_class_counts_for_its_real_samples_and_a_share_of_the_replayed_ones() -> None:
    prior = replace(PLAIN, replay_credit=0.5)._prior(mixed({0: 4, 1: 2}, {1: 4, 2: 4}))
    # counts 4, 4, 2 and none; their mean is 2.5
    assert prior.tolist() == pytest.approx(torch.tensor([1.6, 1.6, 0.8, 1.0]).log().tolist())
    assert PLAIN._prior(mixed({0: 4, 1: 2}, {1: 4, 2: 4})) is None


def test_a_prior_is_added_to_the_logits_of_the_cross_entropy_alone() -> None:
    logits, labels = torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([0, 1])
    prior, none = torch.tensor([0.3, -0.2]), torch.zeros(2, dtype=torch.bool)
    found = aligned_loss(logits, labels, logits, none, 0.0, prior)
    closed = -(logits + prior).log_softmax(dim=1)[torch.arange(2), labels].mean()
    assert found.item() == pytest.approx(closed.item())
    whole = aligned_loss(logits, labels, torch.zeros(2, 2), ~none, 0.5, prior)
    assert whole.item() == pytest.approx((closed + 0.5 * logits.square().mean()).item())


def test_an_even_prior_changes_no_training() -> None:
    data: RoundData = toy_data({0: 8, 1: 8})
    start = PLAIN.initial_download(torch.Generator().manual_seed(0)).average
    job = TOY, start, data.images, data.labels, PLAIN.training(data, start, torch.Generator()).optimisation
    one, other = (
        train_task_model(*job, torch.Generator().manual_seed(1), prior=prior) for prior in (None, torch.zeros(4))
    )
    assert same_bits(one, other)


def test_a_client_gets_what_answers_its_replay_best_and_the_mixture_where_all_are_alike() -> None:
    method = replace(PLAIN, choose=True, local_epochs=10)
    state, downloads = run_rounds(method, [{"a": {0: 24, 1: 24}}])
    good = downloads["a"].personalised
    client = state.clients["a"]
    bad = {name: torch.zeros_like(tensor) for name, tensor in good.items()}

    def chosen(own: Any, average: Any, mixture: Any) -> grp.Personalised:
        record = replace(client, task_parameters=own)
        candidates = grp.Personalised(mixture, {"m": 1.0}), grp.Personalised(average, {"v": 1.0})
        rng = torch.Generator().manual_seed(0)
        return method._chosen("a", record, *candidates, sampler_of(method), rng)

    assert accuracy(good, {0: 20, 1: 20}) > 0.9
    assert chosen(good, bad, bad).weights == {"a": 1.0}
    assert chosen(bad, good, bad).weights == {"v": 1.0}
    assert chosen(good, good, good).weights == {"m": 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay_credit": 1.5}, "replay_credit is 1.5"),
        ({"generators": "single", **WGAN, "smooth_share": 0.0, "detail_share": 0.0, "choose": True}, "by class"),
        ({"generators": "single", **WGAN}, "expected smooth_share and detail_share 0"),
        ({"smooth_share": 1.1}, "smooth_share is 1.1"),
        ({"detail_share": -0.1}, "detail_share is -0.1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PFedGRPPlus(task=TOY, **settings)


def test_it_remembers_what_fedavg_would_forget() -> None:
    method = PFedGRPPlus(task=TOY, replay_per_client=32, **LEARNING)
    _, downloads = run_rounds(method, [{"a": {0: 24, 1: 24}}, {"a": {2: 24, 3: 24}}])
    assert accuracy(downloads["a"].personalised, {0: 20, 1: 20}) > 0.9


def test_a_class_is_uploaded_again_when_it_was_met_five_times_as_often() -> None:
    rng = torch.Generator().manual_seed(0)
    download, state, held = PLAIN.initial_download(rng), grp.ClientState(), grp.AggregatorState()
    sent = []
    for seed in range(6):
        data = toy_data({0: 20, seed % 2 + 1: 20}, seed=seed)
        state, upload = PLAIN.local_round(state, data, download, rng, sampler=sampler_of(PLAIN))
        held, downloads = PLAIN.aggregate(held, {"a": upload}, rng, sampler=sampler_of(PLAIN))
        download = downloads["a"]
        sent.append(sorted(upload.sub_generators))
    assert sent == [[0, 1], [2], [], [], [0], []]
    assert int(state.sub_generators[0].generator["num_samples"].sum()) == 120
    always = replace(PLAIN, upload_growth=1.0)
    _, upload = always.local_round(state, toy_data({1: 5}), download, rng, sampler=sampler_of(PLAIN))
    assert sorted(upload.sub_generators) == [0, 1, 2], "whatever differs from what the aggregator holds"

"""SDD: closed forms of its losses and weights, what a session replays and joins, and its limits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayfleet.federation.methods import sdd
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload
from replayfleet.federation.methods.sdd import (
    LEAST_LABEL,
    SDD,
    accuracies_of,
    activation_divergence,
    class_specific_weights,
    entropy_loss,
    noise_aware_loss,
    with_fresh_rows,
)
from replayfleet.federation.methods.sdd_records import AggregatorState, Download
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.synthesis_records import IMAGES, CountedUpload
from replayfleet.models.build import build_task_model, initialise
from tests.support.toy import TOY, run_rounds, toy_data

QUICK: dict[str, Any] = {
    "local_epochs": 2,
    "batch_size": 8,
    "learning_rate": 0.05,
    "synthesis_rounds": 2,
    "synthesis_steps": 1,
    "synthesis_batch_size": 16,
    "synthetic_batch_size": 8,
    "generator_width": 4,
    "latent_size": 8,
    "warm_up_rounds": 0,
    "student_steps": 1,
    "replay_per_class": 6,
}
SESSIONS = [{"a": {0: 8, 1: 8}, "b": {0: 8, 1: 8}}, {"a": {2: 3, 3: 1}, "b": {3: 2}}]


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    return initialise(build_task_model(TOY), torch.Generator().manual_seed(seed)).state_dict()


def test_the_noise_aware_loss_has_its_closed_form() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), 50.0]])  # the third class is new: it takes no part
    loss = noise_aware_loss(logits, torch.tensor([0]), 2, alpha=2.0, beta=0.5)
    assert loss.item() == pytest.approx(2.0 * math.log(4) - 0.5 * 0.75 * math.log(LEAST_LABEL), rel=1e-5)


def test_a_label_that_the_model_doubts_weighs_no_more_than_its_bound() -> None:
    sure = torch.tensor([[60.0, 0.0]])
    assert noise_aware_loss(sure, torch.tensor([1]), 2, 0.0, 1.0).item() == pytest.approx(-math.log(1e-4), rel=1e-4)
    assert noise_aware_loss(sure, torch.tensor([1]), 2, 1.0, 0.0).item() == pytest.approx(60.0)
    right = noise_aware_loss(sure, torch.tensor([0]), 2, 1.0, 1.0)
    assert right.item() == pytest.approx(0.0, abs=1e-5)


def test_who_knows_a_class_gives_its_row_and_nobody_means_everybody() -> None:
    weights = class_specific_weights(torch.tensor([[0.9, 0.0, 0.0], [0.3, 0.0, 0.5]]))
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.5, 0.0], [0.25, 0.5, 1.0]]))


def test_the_entropy_is_least_where_the_teacher_is_unsure() -> None:
    assert entropy_loss(torch.zeros(3, 4)).item() == pytest.approx(-math.log(4) / 4)
    assert entropy_loss(torch.tensor([[90.0, 0.0, 0.0, 0.0]])).item() == pytest.approx(0.0, abs=1e-6)


def test_the_divergence_of_activations_has_its_closed_form() -> None:
    assert activation_divergence(torch.full((3, 5), 7.0)).item() == pytest.approx(0.0, abs=1e-6)
    one = activation_divergence(torch.tensor([[math.log(3.0), 0.0]])).item()
    assert one == pytest.approx(math.log(2) + 0.75 * math.log(0.75) + 0.25 * math.log(0.25), rel=1e-5)


@pytest.mark.parametrize("term", ["proximal_weight", "activation_weight"])
def test_a_session_descends_the_terms_of_table_v_too(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"proximal_weight": "squared_distance", "activation_weight": "activation_divergence"}[term]
    true, seen = getattr(sdd, name), []

    def noted(*args: Any) -> torch.Tensor:
        value: torch.Tensor = true(*args)
        seen.append(value.item())
        return value

    monkeypatch.setattr(sdd, name, noted)
    method = SDD(task=TOY, **{**QUICK, "local_epochs": 16, "momentum": 0.0, "fine_tuning_scale": 1.0})
    local_round(method)
    assert seen == []
    local_round(method, **{term: 1e-12})
    free = seen[-1]
    local_round(method, **{term: 4.0})
    assert seen[-1] < free / 2


def test_images_of_a_session_are_made_against_the_average_if_so_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    teachers = []
    made = data_free.Ensemble

    def noted(members: Any) -> data_free.Ensemble:
        teachers.append(len(members))
        return made(members)

    monkeypatch.setattr(data_free, "Ensemble", noted)
    run_rounds(SDD(task=TOY, **QUICK), SESSIONS)
    assert teachers == [2]
    run_rounds(SDD(task=TOY, **QUICK, teachers="average"), SESSIONS)
    assert teachers == [2]


def test_an_ensemble_answers_with_the_mean_and_shows_every_members_statistics() -> None:
    members = [data_free.frozen_task_model(TOY, model(seed)) for seed in (0, 1)]
    images = toy_data({0: 4}).images
    together = data_free.observe(data_free.Ensemble(members), images)
    alone = [data_free.observe(member, images) for member in members]
    torch.testing.assert_close(together.logits, (alone[0].logits + alone[1].logits) / 2)
    assert len(together.layers) == 2 * len(alone[0].layers)
    torch.testing.assert_close(together.layers[-1].mean, alone[1].layers[-1].mean)


def test_the_base_session_is_fedavg_to_the_bit_and_fills_the_replay_buffer() -> None:
    state, downloads = run_rounds(SDD(task=TOY, **QUICK), SESSIONS[:1])
    plain = {key: QUICK[key] for key in ("local_epochs", "batch_size", "learning_rate")}
    _, expected = run_rounds(FedAvg(task=TOY, **plain), SESSIONS[:1])
    assert same_bits(downloads["a"].task_parameters, expected["a"].task_parameters)
    assert sorted(downloads["a"].synthetic) == [0, 1]
    assert {len(each[IMAGES]) <= 6 for each in downloads["a"].synthetic.values()} == {True}
    assert same_bits(SDD.AggregatorState.unpack(state.pack()).synthetic[0], state.synthetic[0])


def test_a_session_adds_its_classes_and_leaves_the_images_of_the_others() -> None:
    first, _ = run_rounds(SDD(task=TOY, **QUICK), SESSIONS[:1])
    second, downloads = run_rounds(SDD(task=TOY, **QUICK), SESSIONS)
    assert downloads["b"].seen == (0, 1, 2, 3)
    assert set(second.synthetic) >= {0, 1}
    for class_id in (0, 1):
        assert same_bits(second.synthetic[class_id], first.synthetic[class_id])


def test_images_of_a_session_are_labelled_among_all_classes_seen_if_so_wished() -> None:
    new, seen = (run_rounds(SDD(task=TOY, **QUICK, labelled_among=among), SESSIONS)[0] for among in ("new", "seen"))
    kept = sorted(new.synthetic.keys() & seen.synthetic.keys())
    assert [same_bits(new.synthetic[class_id], seen.synthetic[class_id]) for class_id in kept[:2]] == [True, True]
    assert not all(same_bits(new.synthetic[class_id], seen.synthetic[class_id]) for class_id in kept[2:])
    with pytest.raises(ValueError, match="labelled_among"):
        SDD(task=TOY, **QUICK, labelled_among="old")


def local_round(method: SDD, data: Any = None, **changes: Any) -> dict[str, torch.Tensor]:
    images = (torch.rand(6, *TOY.image_shape, generator=torch.Generator().manual_seed(5)) * 255).to(torch.uint8)
    download = Download(model(), {0: {IMAGES: images}, 1: {IMAGES: images.flip(0)}}, (0, 1))
    data = data or toy_data({2: 4, 3: 4})
    rng = seeded_generator(0, 1, "a")
    _, upload = replace(method, **changes).local_round(NoState(), data, download, rng, sampler=eager_sampler(TOY))
    return upload.task_parameters


@pytest.mark.parametrize("old_rows_scale", [0.0, 0.5])
def test_in_a_session_all_but_the_rows_of_new_classes_hardly_move(old_rows_scale: float) -> None:
    start = model()
    method = SDD(task=TOY, **{**QUICK, "momentum": 0.0, "weight_decay": 0.1, "local_epochs": 1})
    whole = local_round(method, fine_tuning_scale=1.0)
    gentle = local_round(method, fine_tuning_scale=0.01, old_rows_scale=old_rows_scale)
    for name, tensor in gentle.items():
        moved, free = tensor - start[name], whole[name] - start[name]
        if name == "head.weight":
            torch.testing.assert_close(moved[:2], (old_rows_scale or 0.01) * free[:2], rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(moved[2:], free[2:])
        elif name == "conv.weight":
            torch.testing.assert_close(moved, 0.01 * free, rtol=1e-3, atol=1e-6)


def test_a_session_has_a_step_size_of_its_own_and_the_base_session_the_other() -> None:
    method = SDD(task=TOY, **QUICK)
    assert same_bits(
        local_round(method, session_learning_rate=0.02, learning_rate=0.7), local_round(method, learning_rate=0.02)
    )
    plain, changed = (
        run_rounds(each, SESSIONS[:1])[1] for each in (method, replace(method, session_learning_rate=0.7))
    )
    assert same_bits(plain["a"].task_parameters, changed["a"].task_parameters)


def test_a_session_begins_with_fresh_rows_of_its_classes_the_same_for_all_clients() -> None:
    start = {**model(), "head.weight": model()["head.weight"] * 50}
    fresh = with_fresh_rows(start, [2, 3])
    assert same_bits(fresh, with_fresh_rows(dict(start), [2, 3]))
    changed = [name for name in start if not torch.equal(fresh[name], start[name])]
    assert sorted(changed) == ["head.bias", "head.weight"]
    for name in changed:
        torch.testing.assert_close(fresh[name][:2], start[name][:2], rtol=0, atol=0)
        assert fresh[name][2:].abs().max() <= start["head.weight"].shape[1] ** -0.5
    still = local_round(SDD(task=TOY, **QUICK), session_learning_rate=1e-12)
    torch.testing.assert_close(still["head.weight"], with_fresh_rows(model(), [2, 3])["head.weight"])


def test_a_client_learns_as_fast_of_which_classes_of_a_session_it_has_none() -> None:
    method, start = SDD(task=TOY, **QUICK), with_fresh_rows(model(), [2, 3])
    moved = (local_round(method, data=toy_data({2: 4}))["head.weight"] - start["head.weight"]).abs().amax(dim=1)
    assert moved[3] > 50 * moved[:2].max()


@pytest.mark.parametrize("loss", ["noise-aware", "cross-entropy", "distillation"])
def test_what_is_learned_from_replay_is_the_settings(loss: str) -> None:
    method = SDD(task=TOY, **QUICK, replay_loss=loss)
    others = {other: local_round(method, replay_loss=other) for other in ("noise-aware", "distillation")}
    assert not same_bits(others["noise-aware"], others["distillation"])
    without = local_round(method, replay_weight=0.0)
    assert not same_bits(local_round(method), without)
    if loss == "cross-entropy":
        assert same_bits(local_round(method), local_round(method, replay_loss="noise-aware", beta=0.0))


def test_a_new_classes_row_comes_from_who_knows_it() -> None:
    """Two local models of which one names everything class 2, on made images of classes 2 and 3."""
    method = SDD(task=TOY, **{**QUICK, "synthesis_rounds": 4, "replay_per_class": 64})
    models = [model(), model()]
    for parameters, favourite in zip(models, (2, 0), strict=True):
        parameters["head.bias"] = torch.nn.functional.one_hot(torch.tensor(favourite), 4) * 100.0
    uploads = {name: CountedUpload(models[i], {2: 3, 3: 1}) for i, name in enumerate(("a", "b"))}
    state = AggregatorState(average=model(), seen=(0, 1), clients=("a", "b"))
    new, _ = method.aggregate(state, uploads, torch.Generator().manual_seed(0), sampler=eager_sampler(TOY))
    assert 2 in new.synthetic
    assert new.average["head.bias"].tolist() == [50.0, 0.0, 100.0, 0.0]  # class 3 is known by nobody: shared evenly
    averaged = replace(method, aggregation="average")
    new, _ = averaged.aggregate(state, uploads, torch.Generator().manual_seed(0), sampler=eager_sampler(TOY))
    expected = weighted_average(models, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert same_bits(new.average, expected)


def test_accuracies_are_of_the_classes_that_were_met() -> None:
    member = data_free.frozen_task_model(TOY, {**model(), "head.bias": torch.tensor([0.0, 0.0, 90.0, 99.0])})
    images = data_free.to_bytes(toy_data({0: 4}).images)
    found = accuracies_of([member], {2: {IMAGES: images}}, (1, 2), (0, 1, 2))
    assert found.tolist() == [[0.0, 1.0]]  # no image of class 1; class 3 was never met


def test_one_seed_gives_the_same_bits_whatever_the_order_of_arrival() -> None:
    first, _ = run_rounds(SDD(task=TOY, **QUICK), SESSIONS)
    again, _ = run_rounds(SDD(task=TOY, **QUICK), SESSIONS)
    assert same_bits(first.average, again.average)
    uploads = {name: CountedUpload(model(seed), {2: 2}) for seed, name in enumerate(("a", "b"))}
    results = [
        SDD(task=TOY, **QUICK).aggregate(first, each, torch.Generator().manual_seed(0), sampler=eager_sampler(TOY))[0]
        for each in (uploads, dict(reversed(uploads.items())))
    ]
    assert same_bits(results[0].average, results[1].average)


def test_it_serves_absent_clients_and_begins_like_the_others() -> None:
    method = SDD(task=TOY, **QUICK)
    initial = method.initial_download(torch.Generator().manual_seed(0))
    assert method.download_for(AggregatorState(), "new", initial) is initial
    assert method.download_for(AggregatorState(average=model(), seen=(0,)), "new", initial).seen == (0,)
    assert isinstance(FedAvg(task=TOY).initial_download(torch.Generator().manual_seed(0)), TaskDownload)
    with pytest.raises(ValueError, match="replay_loss is 'none', expected one of noise-aware"):
        SDD(task=TOY, replay_loss="none")
    with pytest.raises(ValueError, match="'synthetic/2' must be one tensor 'images'"):
        Download(model(), {2: {"pixels": torch.zeros(1)}})

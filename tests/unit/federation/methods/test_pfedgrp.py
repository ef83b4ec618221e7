from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayfleet.federation.methods import pfedgrp
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import TaskUpload
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_records import AggregatorState, ClientState, Download, Upload
from replayfleet.federation.methods.steps.memory import MixedData
from replayfleet.federation.methods.steps.replay import Replay, eager_sampler
from replayfleet.federation.methods.steps.task_model import judge_with
from tests.support.toy import LEARNING, SHORT_PFEDGRP, TOY, accuracy, run_rounds, toy_data

TINY = PFedGRP(task=TOY, **SHORT_PFEDGRP)
SAMPLER = eager_sampler(TOY)


def tensors(value: Any) -> dict[str, torch.Tensor]:
    packed = value.pack()
    return {f"{s}:{n}": t for s, parameters in packed.parameter_sets.items() for n, t in parameters.items()}


def same(left: Any, right: Any) -> bool:
    a, b = tensors(left), tensors(right)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) and left.pack().facts == right.pack().facts


@pytest.fixture(scope="module")
def first_round() -> tuple[Download, ClientState, Upload]:
    initial = TINY.initial_download(seeded_generator(0, 0, "initial"))
    state, upload = TINY.local_round(
        ClientState(), toy_data({0: 10, 1: 10}), initial, seeded_generator(0, 0, "a"), sampler=SAMPLER
    )
    return initial, state, upload


def test_the_first_meeting_trains_and_uploads_every_class(first_round: tuple[Download, ClientState, Upload]) -> None:
    _, state, upload = first_round
    assert sorted(upload.sub_generators) == [0, 1]
    assert upload.num_updates == 2
    assert upload.seen == {0: 10, 1: 10}
    assert sorted(state.sub_generators) == [0, 1]


@pytest.mark.parametrize(("threshold", "updates"), [(0.0, 0), (1.01, 2)])
def test_the_gate_retrains_only_below_its_threshold(
    first_round: tuple[Download, ClientState, Upload], threshold: float, updates: int
) -> None:
    initial, state, _ = first_round
    held = replace(initial, sub_generators={c: s.generator for c, s in state.sub_generators.items()})
    method = replace(TINY, gate_threshold=threshold)
    _, upload = method.local_round(
        state, toy_data({0: 10, 1: 10}, seed=1), held, seeded_generator(0, 1, "a"), sampler=SAMPLER
    )
    assert upload.num_updates == updates
    assert len(upload.sub_generators) == updates
    assert upload.seen == {0: 20, 1: 20}


def test_without_the_gate_every_class_of_the_round_is_retrained(
    first_round: tuple[Download, ClientState, Upload],
) -> None:
    initial, state, _ = first_round
    method = replace(TINY, gate=False, gate_threshold=0.0)
    _, upload = method.local_round(state, toy_data({0: 10}), initial, seeded_generator(0, 1, "a"), sampler=SAMPLER)
    assert upload.num_updates == 1


def test_what_the_aggregator_lacks_is_uploaded_again(first_round: tuple[Download, ClientState, Upload]) -> None:
    initial, state, _ = first_round
    method = replace(TINY, gate_threshold=0.0)
    _, upload = method.local_round(
        state, toy_data({2: 10}, seed=1), initial, seeded_generator(0, 1, "a"), sampler=SAMPLER
    )
    assert sorted(upload.sub_generators) == [0, 1, 2]
    assert upload.num_updates == 1


def test_a_client_that_lost_its_disk_gets_its_sub_generators_and_counts_back(
    first_round: tuple[Download, ClientState, Upload],
) -> None:
    initial, state, upload = first_round
    aggregated, downloads = TINY.aggregate(
        AggregatorState(), {"a": upload}, seeded_generator(0, 0, "aggregator"), sampler=SAMPLER
    )
    assert same(TINY.download_for(aggregated, "a", initial), downloads["a"])
    recovered, again = TINY.local_round(
        ClientState(), toy_data({2: 10}), downloads["a"], seeded_generator(0, 1, "a"), sampler=SAMPLER
    )
    assert again.seen == {0: 10, 1: 10, 2: 10}
    assert all(
        torch.equal(recovered.sub_generators[0].generator[k], v) for k, v in state.sub_generators[0].generator.items()
    )


def test_nothing_enters_a_clients_memory_that_it_could_not_draw_from(
    first_round: tuple[Download, ClientState, Upload],
) -> None:
    initial, state, _ = first_round
    own = state.sub_generators[0].generator
    for broken in ({}, {"x": torch.zeros(2)}, {n: t / 0 if t.is_floating_point() else t for n, t in own.items()}):
        planted = replace(initial, sub_generators={0: broken}, seen={0: 1})
        with pytest.raises(ValueError, match="sub-generator of class 0"):
            TINY.local_round(ClientState(), toy_data({2: 10}), planted, seeded_generator(0, 1, "a"), sampler=SAMPLER)
    kept = replace(initial, sub_generators={0: {}}, seen={0: 1})
    TINY.local_round(state, toy_data({2: 10}), kept, seeded_generator(0, 1, "a"), sampler=SAMPLER)


def test_a_client_never_heard_of_starts_from_the_average(first_round: tuple[Download, ClientState, Upload]) -> None:
    initial, _, upload = first_round
    assert TINY.download_for(AggregatorState(), "new", initial) is initial
    aggregated, _ = TINY.aggregate(AggregatorState(), {"a": upload}, seeded_generator(0, 0, "x"), sampler=SAMPLER)
    assert TINY.download_for(aggregated, "new", initial).personalised is aggregated.average


def test_equal_arguments_give_equal_bits_and_arrival_order_is_irrelevant(
    first_round: tuple[Download, ClientState, Upload],
) -> None:
    initial, state, upload = first_round
    again_state, again = TINY.local_round(
        ClientState(), toy_data({0: 10, 1: 10}), initial, seeded_generator(0, 0, "a"), sampler=SAMPLER
    )
    assert same(upload, again)
    assert same(state, again_state)
    other = replace(upload, task_parameters=initial.average, num_samples=7)
    before = {name: tensor.clone() for name, tensor in tensors(upload).items()}
    one = TINY.aggregate(AggregatorState(), {"a": upload, "b": other}, seeded_generator(1, 0, "x"), sampler=SAMPLER)
    two = TINY.aggregate(AggregatorState(), {"b": other, "a": upload}, seeded_generator(1, 0, "x"), sampler=SAMPLER)
    assert same(one[0], two[0])
    assert all(same(one[1][client], two[1][client]) for client in ("a", "b"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(upload).items())


def test_absent_clients_are_served_from_the_cache(first_round: tuple[Download, ClientState, Upload]) -> None:
    initial, _, upload = first_round
    other = replace(upload, task_parameters=initial.average)
    state, _ = TINY.aggregate(
        AggregatorState(), {"a": upload, "b": other}, seeded_generator(0, 0, "x"), sampler=SAMPLER
    )
    left_out, downloads = TINY.aggregate(state, {"a": upload}, seeded_generator(0, 1, "x"), sampler=SAMPLER)
    assert sorted(downloads) == ["a", "b"]
    assert downloads["a"].weights == {"a": 1.0}
    assert same(left_out.pack() and downloads["b"], replace(downloads["b"], average=left_out.average))
    _, mixed = replace(TINY, mix_absent=True).aggregate(
        state, {"a": upload}, seeded_generator(0, 1, "x"), sampler=SAMPLER
    )
    assert sorted(mixed["a"].weights) == ["a", "b"]


def test_who_has_seen_nothing_of_what_the_cache_draws_gets_the_average(
    first_round: tuple[Download, ClientState, Upload],
) -> None:
    _, _, upload = first_round
    counted_anew = replace(upload, seen={0: 0, 1: 0, 2: 20})
    TINY.check_upload(counted_anew)
    aggregated, downloads = TINY.aggregate(
        AggregatorState(), {"a": upload, "b": counted_anew}, seeded_generator(0, 0, "x"), sampler=SAMPLER
    )
    assert downloads["b"].personalised is aggregated.average


def test_the_average_may_filter_the_replay_of_the_aggregation(
    first_round: tuple[Download, ClientState, Upload],
) -> None:
    _, _, upload = first_round
    asked: list[str] = []

    def judge_spy(spec: Any, parameters: Any) -> Any:
        same_as_own = all(torch.equal(parameters[k], v) for k, v in upload.task_parameters.items())
        asked.append("own" if same_as_own else "average")
        return judge_with(spec, parameters)

    other = replace(upload, task_parameters=TINY.initial_download(seeded_generator(5, 0, "initial")).average)
    for choice in ("own", "average"):
        asked.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pfedgrp, "judge_with", judge_spy)
            replace(TINY, aggregation_filter=choice).aggregate(
                AggregatorState(), {"a": upload, "b": other}, seeded_generator(0, 0, "x"), sampler=SAMPLER
            )
        assert asked[0] == choice


def test_warm_start_hands_over_sub_generators_only_if_turned_on(
    first_round: tuple[Download, ClientState, Upload],
) -> None:
    initial, _, upload = first_round
    state, _ = TINY.aggregate(AggregatorState(), {"a": upload}, seeded_generator(0, 0, "x"), sampler=SAMPLER)
    assert TINY.download_for(state, "new", initial).donors == {}
    warm = replace(TINY, warm_start=True, sub_generator_epochs=0)
    download = warm.download_for(state, "new", initial)
    assert sorted(download.donors) == [0, 1]
    client, _ = warm.local_round(
        ClientState(), toy_data({0: 8}), download, seeded_generator(0, 1, "new"), sampler=SAMPLER
    )
    donor = upload.sub_generators[0]
    assert all(torch.equal(client.sub_generators[0].generator[name], tensor) for name, tensor in donor.items())


def test_every_record_survives_packing(first_round: tuple[Download, ClientState, Upload]) -> None:
    _, state, upload = first_round
    aggregated, downloads = replace(TINY, warm_start=True).aggregate(
        AggregatorState(), {"a": upload}, seeded_generator(0, 0, "x"), sampler=SAMPLER
    )
    for value in (state, upload, aggregated, downloads["a"]):
        assert same(type(value).unpack(value.pack()), value)


def test_impossible_uploads_are_refused(first_round: tuple[Download, ClientState, Upload]) -> None:
    _, _, upload = first_round
    TINY.check_upload(upload)
    for wrong, message in (
        (replace(upload, seen={9: 10}), "class 9"),
        (replace(upload, seen={}), "no samples"),
        (replace(upload, num_samples=10**6), "1000000 samples"),
        (replace(upload, seen={1: 20}), "class 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TINY.check_upload(wrong)
    with pytest.raises(ValueError, match="num_samples"):
        Upload.unpack(Artefacts(upload.pack().parameter_sets, {"seen": {"0": 1}, "num_samples": float("nan")}))
    with pytest.raises(ValueError, match="task"):
        Upload.unpack(Artefacts({}, upload.pack().facts))
    assert TINY.upload_layout("task") is not None
    assert TINY.upload_layout("sub-generator/3") is not None
    assert TINY.upload_layout("sub-generator/4") is None
    assert TINY.upload_layout("sub-generator/03") is None
    assert TINY.upload_layout("../task") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alignment_on", "all"),
        ("start_from", "own"),
        ("aggregation_filter", "none"),
        ("local_epochs", -1),
        ("local_epochs", 2.5),
        ("batch_size", 1),
        ("gan_learning_rate", float("nan")),
        ("momentum", 1.5),
        ("replay_per_client", 0),
        ("gate_threshold", "high"),
    ],
)
def test_impossible_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        replace(TINY, **{key: value})  # type: ignore[arg-type]


def test_one_client_without_memory_is_fedavg(first_round: tuple[Download, ClientState, Upload]) -> None:
    """In round 0 nothing is replayed, so with one client both methods train the same model and give it back."""
    initial, _, upload = first_round
    _, downloads = TINY.aggregate(AggregatorState(), {"a": upload}, seeded_generator(0, 0, "x"), sampler=SAMPLER)
    _, theirs = FedAvg(task=TOY).aggregate(
        FedAvg(task=TOY).initial_states()[1],
        {"a": TaskUpload(upload.task_parameters, 20)},
        seeded_generator(0, 0, "x"),
        sampler=SAMPLER,
    )
    assert all(torch.equal(downloads["a"].personalised[k], v) for k, v in theirs["a"].task_parameters.items())
    assert all(torch.equal(downloads["a"].average[k], v) for k, v in theirs["a"].task_parameters.items())
    assert initial.average.keys() == downloads["a"].average.keys()


@pytest.mark.parametrize(
    ("alignment_on", "covered"),
    [("replay", [False] * 5 + [True] * 2), ("earlier-classes", [True] * 3 + [False] * 2 + [True] * 2)],
)
def test_eq_2_holds_the_model_near_the_personalised_ones_answers(alignment_on: str, covered: list[bool]) -> None:
    """On replay; in the first version on real samples of classes met in an earlier round too (its Eq. 5)."""
    average, personalised = (TINY.initial_download(seeded_generator(seed, 0, "initial")).average for seed in (0, 1))
    real, replayed = toy_data({0: 3, 2: 2}), toy_data({1: 2}, seed=1)
    mixed = MixedData(real, Replay(replayed.images, replayed.labels, 2, 0))
    method = replace(TINY, alignment_on=alignment_on, alignment_weight=0.7)
    job = method._training(mixed, frozenset({0, 1}), Download(personalised, average), torch.Generator()).job
    assert job.start is average
    assert job.alignment.mask.tolist() == covered
    assert job.alignment.weight == 0.7
    taught = judge_with(TOY, personalised)(torch.cat([real.images, replayed.images]))[job.alignment.mask]
    torch.testing.assert_close(job.alignment.logits[job.alignment.mask], taught)


def test_the_ablations_of_local_training_leave_out_alignment_or_the_average() -> None:
    average, personalised = (TINY.initial_download(seeded_generator(seed, 0, "initial")).average for seed in (0, 1))
    replayed = toy_data({1: 2}, seed=1)
    mixed = MixedData(toy_data({0: 3}), Replay(replayed.images, replayed.labels, 2, 0))

    def job(**changes: Any) -> Any:
        method = replace(TINY, **changes)
        return method._training(mixed, frozenset({1}), Download(personalised, average), torch.Generator()).job

    assert job(alignment_weight=0.0).alignment is None
    assert job(start_from="personalised").start is personalised
    assert job().start is average


@pytest.mark.learning
def test_it_remembers_what_fedavg_forgets() -> None:
    rounds = [{"a": {0: 24, 1: 24}}, {"a": {2: 24, 3: 24}}]
    everything = {0: 20, 1: 20, 2: 20, 3: 20}
    method = PFedGRP(
        task=TOY,
        sub_generator_epochs=80,
        gan_batch_size=12,
        gan_learning_rate=2e-3,
        gan_beta1=0.5,
        critic_steps_per_generator_step=1,
        replay_per_client=64,
        aggregation_epochs=1,
        **LEARNING,
    )

    _, remembered = run_rounds(method, rounds, last=replace(method, sub_generator_epochs=1))
    _, forgot = run_rounds(FedAvg(task=TOY, **LEARNING), rounds)
    assert accuracy(forgot["a"].task_parameters, everything) <= 0.55
    assert accuracy(remembered["a"].task_parameters, everything) > 0.7

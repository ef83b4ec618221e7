from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from replayfleet.federation.methods import fedcil_records as cil
from replayfleet.federation.methods.fedcil import FedCIL
from replayfleet.federation.methods.fedcil_gan import Acgan, AcganSchedule, DrawByClass, MiniBatch
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.service.fleet.presets import TASKS, settings_for
from tests.support.toy import TOY, run_rounds, toy_data

SAMPLER = eager_sampler(TOY)
QUICK = FedCIL(task=TOY, width=4, local_iterations=2, server_iterations=2, gan_batch_size=8, gan_learning_rate=1e-3)
TWO_CLIENTS = [{"a": {0: 8, 1: 8}, "b": {2: 8, 3: 8}}, {"a": {2: 8, 3: 8}, "b": {0: 8, 1: 8}}]


def same(one: Parameters, other: Parameters) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def local(method: FedCIL, state: cil.Learnt, download: cil.Download, seed: int = 0) -> tuple[cil.Learnt, cil.Upload]:
    data = toy_data({0: 6, 1: 6}, seed)
    return method.local_round(state, data, download, seeded_generator(seed, 0, "a"), sampler=SAMPLER)


def initial(method: FedCIL = QUICK) -> cil.Download:
    return method.initial_download(seeded_generator(0, 0, "initial"))


def test_a_round_counts_what_it_met_and_keeps_its_generator() -> None:
    state, upload = local(QUICK, cil.Learnt({}, {}), initial())
    assert upload.now == upload.seen == state.seen == {0: 6, 1: 6}
    assert upload.num_samples == 12
    assert same(state.generator, upload.gan.generator)
    again, second = local(QUICK, cil.Learnt(state.generator, {1: 6, 3: 2}), initial(), 1)
    assert second.seen == again.seen == {0: 6, 1: 12, 3: 2}


def test_consistency_begins_with_the_second_round() -> None:
    strict, released = QUICK, replace(QUICK, consistency=False)
    first = [local(method, cil.Learnt(), initial())[1].gan for method in (strict, released)]
    assert same(first[0].critic, first[1].critic)
    known = replace(initial(), classes=(0, 1, 2))
    later = [local(method, cil.Learnt(), known)[1].gan for method in (strict, released)]
    assert not same(later[0].critic, later[1].critic)


def test_an_earlier_generator_is_replayed() -> None:
    fresh = local(QUICK, cil.Learnt(), initial())[1].gan
    other = initial(replace(QUICK)).gan.generator
    replayed = local(QUICK, cil.Learnt(other, {2: 5}), initial())[1].gan
    assert not same(fresh.critic, replayed.critic)


def test_without_consolidation_the_global_model_is_the_mean_by_samples() -> None:
    method = replace(QUICK, server_iterations=0)
    uploads = {
        "b": cil.Upload(Acgan({"g": torch.tensor([4.0])}, {"c": torch.tensor([8.0])}), {2: 30}, {2: 30}),
        "a": cil.Upload(Acgan({"g": torch.tensor([0.0])}, {"c": torch.tensor([0.0])}), {0: 10}, {0: 10, 1: 5}),
    }
    state, downloads = method.aggregate(cil.AggregatorState(), uploads, torch.Generator(), sampler=SAMPLER)
    assert downloads["a"] is downloads["b"]
    assert downloads["a"].gan.generator["g"].item() == 3.0
    assert downloads["a"].task_parameters["c"].item() == 6.0
    assert downloads["a"].classes == (0, 1, 2)
    assert method.download_for(state, "late", initial()) is downloads["a"]
    first = initial()
    assert method.download_for(cil.AggregatorState(), "late", first) is first


def test_consolidation_starts_from_the_mean_and_learns_what_clients_know_now_beside_what_they_knew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New: each client's uploaded generator, of its round's classes. Replay: the one before, of what it had met."""
    sources: dict[float, set[int]] = {}

    def coded(_spec: object, _width: int, generator: Parameters) -> DrawByClass:
        code = float(next(iter(generator.values())))

        def draw(labels: torch.Tensor, _rng: torch.Generator) -> torch.Tensor:
            sources.setdefault(code, set()).update(labels.tolist())
            return torch.full((len(labels), 1, 1, 1), code)

        return draw

    trained: list[tuple[Acgan, list[MiniBatch], tuple[int, ...], AcganSchedule]] = []

    def spy(
        _spec: object,
        start: Acgan,
        batches: Iterable[MiniBatch],
        classes: tuple[int, ...],
        schedule: AcganSchedule,
        _rng: torch.Generator,
    ) -> Acgan:
        trained.append((start, list(batches), classes, schedule))
        return start

    monkeypatch.setattr("replayfleet.federation.methods.fedcil.draw_by_class", coded)
    monkeypatch.setattr("replayfleet.federation.methods.fedcil.train_acgan", spy)
    method = replace(QUICK, server_iterations=40, new_weight=0.3)

    def upload(code: float, now: dict[int, int], seen: dict[int, int]) -> cil.Upload:
        return cil.Upload(Acgan({"g": torch.tensor([code])}, {"c": torch.tensor([code])}), now, seen)

    first = {"a": upload(1.0, {0: 10}, {0: 10}), "b": upload(2.0, {1: 10}, {1: 10})}
    state, _ = method.aggregate(cil.AggregatorState(), first, seeded_generator(0, 0, "aggregator"), sampler=SAMPLER)
    assert all(batch.replay is None for batch in trained[0][1])
    sources.clear()
    second = {"a": upload(5.0, {2: 30}, {0: 10, 2: 30}), "b": upload(9.0, {2: 5, 3: 5}, {1: 10, 2: 5, 3: 5})}
    method.aggregate(state, second, seeded_generator(0, 1, "aggregator"), sampler=SAMPLER)
    start, batches, classes, schedule = trained[1]
    assert start.generator["g"].item() == pytest.approx((30 * 5.0 + 10 * 9.0) / 40)
    assert (len(batches), classes, schedule.new_weight) == (40, (0, 1, 2, 3), 0.3)
    assert sources == {5.0: {2}, 9.0: {2, 3}, 1.0: {0}, 2.0: {1}}
    for batch in batches:
        assert batch.replay is not None
        assert set(batch.new.images.flatten().tolist()) <= {5.0, 9.0}
        assert set(batch.replay.images.flatten().tolist()) <= {1.0, 2.0}
        assert len(batch.new.labels) == len(batch.replay.labels) == method.gan_batch_size


def test_consolidation_depends_on_neither_the_order_of_arrival_nor_anything_but_the_seed() -> None:
    state, _ = run_rounds(QUICK, TWO_CLIENTS[:1])
    uploads = {
        client: local(QUICK, state.clients[client], initial(), seed)[1] for seed, client in enumerate(("a", "b"))
    }
    before = {name: value.clone() for name, value in uploads["a"].gan.critic.items()}
    results = [
        QUICK.aggregate(state, dict(order), seeded_generator(0, 1, "aggregator"), sampler=SAMPLER)[1]["a"].gan
        for order in (sorted(uploads.items()), sorted(uploads.items(), reverse=True))
    ]
    assert same(results[0].critic, results[1].critic)
    assert same(results[0].generator, results[1].generator)
    assert same(uploads["a"].gan.critic, before)
    averaged = replace(QUICK, server_iterations=0).aggregate(state, uploads, torch.Generator(), sampler=SAMPLER)[1]
    assert not same(results[0].critic, averaged["a"].gan.critic)


def test_a_client_that_missed_the_round_gets_the_global_model_too() -> None:
    state, downloads = run_rounds(QUICK, [TWO_CLIENTS[0], {"a": {2: 8, 3: 8}}])
    assert sorted(downloads) == ["a", "b"]
    assert state.clients["a"].seen == {0: 8, 1: 8, 2: 8, 3: 8}
    assert state.clients["b"].seen == {2: 8, 3: 8}


def test_everything_that_travels_or_is_stored_comes_back_to_the_bit() -> None:
    state, downloads = run_rounds(QUICK, TWO_CLIENTS[:1])
    client, upload = local(QUICK, cil.Learnt(), downloads["a"])
    back = cil.AggregatorState.unpack(state.pack())
    assert back.clients["b"].seen == state.clients["b"].seen
    assert same(back.clients["b"].generator, state.clients["b"].generator)
    assert same(back.latest.gan.critic, downloads["a"].gan.critic)
    assert back.latest.classes == (0, 1, 2, 3)
    assert cil.AggregatorState.unpack(cil.AggregatorState().pack()) == cil.AggregatorState()
    assert cil.Learnt.unpack(cil.Learnt().pack()) == cil.Learnt()
    assert same(cil.Learnt.unpack(client.pack()).generator, client.generator)
    sent = cil.Upload.unpack(upload.pack())
    assert (sent.now, sent.seen) == (upload.now, upload.seen)
    assert same(sent.gan.critic, upload.gan.critic)


def test_uploads_of_another_shape_or_with_impossible_counts_are_refused() -> None:
    _, upload = local(QUICK, cil.Learnt(), initial())
    for name, sent in upload.pack().parameter_sets.items():
        layout = QUICK.upload_layout(name)
        assert {key: (value.shape, value.dtype) for key, value in layout.items()} == {
            key: (value.shape, value.dtype) for key, value in sent.items()
        }
    assert QUICK.upload_layout("task") is None
    QUICK.check_upload(upload)
    for wrong in ({"now": {9: 1}}, {"now": {}}, {"seen": {0: 1, 1: 6}}, {"seen": {7: 1}}):
        with pytest.raises(ValueError, match=r"class|samples"):
            QUICK.check_upload(replace(upload, **wrong))
    with pytest.raises(ValueError, match="without uploads"):
        QUICK.aggregate(cil.AggregatorState(), {}, torch.Generator(), sampler=SAMPLER)
    with pytest.raises(ValueError, match="local_iterations"):
        FedCIL(task=TOY, local_iterations=0)


def test_the_critic_of_colour_images_drops_and_normalises_by_the_same_seed() -> None:
    paper = settings_for("fedcil", "paper", 32)
    assert FedCIL(task=TASKS["cifar-10"], **paper).width == 128
    method = FedCIL(task=TASKS["cifar-10"], **{**paper, "width": 2, "local_iterations": 2, "gan_batch_size": 4})
    data = RoundData(torch.rand(6, 3, 32, 32) * 2 - 1, torch.tensor([0, 7] * 3))
    known = replace(initial(method), classes=(1, 7))
    critics = [
        method.local_round(cil.Learnt(), data, known, seeded_generator(seed, 0, "a"), sampler=SAMPLER)[1].gan.critic
        for seed in (0, 0, 1)
    ]
    assert same(critics[0], critics[1])
    assert not same(critics[0], critics[2])
    assert critics[0]["norms.1.running_mean"].abs().sum() > 0


@pytest.mark.learning
def test_it_learns_two_tasks_after_one_another_and_keeps_both() -> None:
    method = replace(QUICK, local_iterations=50, server_iterations=5, gan_batch_size=12, gan_learning_rate=3e-3)
    _, downloads = run_rounds(method, [{"a": {0: 24, 1: 24}}, {"a": {2: 24, 3: 24}}])
    test = toy_data({0: 20, 1: 20, 2: 20, 3: 20}, 99)
    right = method.predictor(downloads["a"])(test.images).argmax(dim=1) == test.labels
    assert right.float().mean() > 0.7
    assert method.predictor(downloads["a"])(test.images[:0]).shape == (0, 4)

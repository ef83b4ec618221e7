from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.mfcl import MFCL, _asked_for
from replayfleet.federation.methods.mfcl_records import AggregatorState, Download
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.synthesis_records import CountedUpload
from replayfleet.models.resnet import ResNet
from tests.support.replay_methods import (
    ONE_STEP,
    SAMPLER,
    SHORT,
    assert_descends,
    old_model,
    random_task_model,
    short_mfcl,
    what_fedavg_remembers,
    what_it_remembers,
)
from tests.support.rng import rng
from tests.support.toy import LEARNING, TOY, toy_data


def test_the_generators_loss_is_the_weighted_sum_of_its_four_terms() -> None:
    method = short_mfcl(content_temperature=7.0, diversity_weight=2.0, batch_norm_weight=3.0, prior_weight=5.0)
    teacher = data_free.frozen_task_model(TOY, random_task_model())
    images = torch.randn(6, 1, 28, 28, generator=rng())
    judged = data_free.observe(teacher, images)
    logits = judged.logits[:, [0, 2]]
    expected = (
        F.cross_entropy(logits / 7, logits.argmax(dim=1))
        + 2 * data_free.information_loss(logits)
        + 3 * data_free.batch_norm_divergence(judged.layers)
        + 5 * F.mse_loss(images, data_free.blurred(images))
    )
    latents = torch.randn(6, method.latent_size, generator=rng(1))
    torch.testing.assert_close(method.generator_loss(teacher, images, torch.tensor([0, 2]), latents), expected)
    by_latents = dataclasses.replace(method, replay_labels="latents")
    asked = (latents[:, 2] > latents[:, 0]).long()
    expected += F.cross_entropy(logits, asked) - F.cross_entropy(logits / 7, logits.argmax(dim=1))
    torch.testing.assert_close(by_latents.generator_loss(teacher, images, torch.tensor([0, 2]), latents), expected)


@pytest.mark.learning
def test_training_lowers_the_generators_loss_and_goes_on_from_where_it_was() -> None:
    method = short_mfcl(generator_steps=6, generator_batch_size=12, generator_width=4)
    average, teacher = old_model(), data_free.frozen_task_model(TOY, old_model())

    def loss(generator: Parameters) -> float:
        module = method._generator(generator, rng()).train()
        latents = torch.randn(12, method.latent_size, generator=rng(9))
        return method.generator_loss(teacher, module(latents), torch.tensor([0, 1]), latents).item()

    untrained = short_mfcl(generator_steps=0, generator_width=4).train_generator({}, average, (0, 1), rng())
    once = method.train_generator({}, average, (0, 1), rng())
    twice = method.train_generator(once, average, (0, 1), rng(1))
    assert loss(untrained) > loss(once) > loss(twice)


def test_without_steps_the_generator_stays_as_it_was() -> None:
    method = short_mfcl(generator_steps=0)
    start = method.train_generator({}, random_task_model(), (0,), rng())
    assert packing.same_bits(method.train_generator(start, random_task_model(1), (0, 1), rng(5)), start)


def test_replay_is_labelled_by_the_old_model_among_seen_classes_alone() -> None:
    method = short_mfcl(synthetic_batch_size=16)
    generator = method.train_generator({}, random_task_model(), (1, 3), rng())
    old = data_free.frozen_task_model(TOY, random_task_model(2))
    images, labels, features = method._replay(generator, old, torch.tensor([1, 3]), rng())()
    assert images.shape == (16, 1, 28, 28)
    logits = old(images)
    assert torch.equal(labels, torch.where(logits[:, 1] >= logits[:, 3], 1, 3))
    torch.testing.assert_close(features, old.features(images))


def test_latents_name_all_seen_classes_where_the_old_model_names_one() -> None:
    """A model that answers one class to everything would have nothing else replayed, for ever."""
    parameters = random_task_model()
    parameters["head.bias"] = torch.tensor([0.0, 0.0, 0.0, 1e3])
    old, seen = data_free.frozen_task_model(TOY, parameters), torch.tensor([0, 2, 3])
    own, by_latents = (short_mfcl(synthetic_batch_size=64, replay_labels=labels) for labels in ("own", "latents"))
    generator = own.train_generator({}, random_task_model(), (0, 2, 3), rng())
    assert own._replay(generator, old, seen, rng())()[1].unique().tolist() == [3]
    images, labels, _ = by_latents._replay(generator, old, seen, rng())()
    assert torch.bincount(labels, minlength=4).tolist()[1] == 0
    assert min(torch.bincount(labels, minlength=4)[seen].tolist()) >= 8
    assert torch.equal(images, own._replay(generator, old, seen, rng())()[0])


def test_a_latent_that_names_a_class_goes_on_naming_it_when_a_lower_one_is_met() -> None:
    latents = torch.tensor([[0.0, 1.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    for seen in (torch.tensor([2, 3]), torch.tensor([0, 1, 2, 3])):
        assert seen[_asked_for(latents, seen)].tolist() == [2, 3]


def test_latents_can_only_name_classes_that_they_have_entries_for() -> None:
    with pytest.raises(ValueError, match="latent_size is 3, expected a whole number of at least 4"):
        short_mfcl(replay_labels="latents", latent_size=3)
    with pytest.raises(ValueError, match="replay_labels"):
        short_mfcl(replay_labels="latent")


class RealReplay(MFCL):
    """Its replay consists of real samples of classes 0 and 1, as a perfect generator's would."""

    def _replay(self, generator: Any, old: Any, seen: Any, rng: torch.Generator) -> Any:
        data = toy_data({0: 24, 1: 24}, seed=7)

        def draw() -> Any:
            batch = torch.randperm(48, generator=rng)[: self.synthetic_batch_size]
            with torch.no_grad():
                return data.images[batch], data.labels[batch], old.features(data.images[batch])

        return draw


@pytest.mark.learning
def test_with_good_replay_it_remembers_what_fedavg_forgets() -> None:
    method = RealReplay(task=TOY, **{**SHORT, **LEARNING, "synthetic_batch_size": 8})
    download = Download(old_model(), {"any": torch.zeros(1)}, seen=(0, 1))
    assert what_fedavg_remembers() <= 0.55
    assert what_it_remembers(method, download) > 0.8


@pytest.mark.parametrize(
    ("logits", "new", "teacher"),
    [("split", [2, 3], {}), ("all", [0, 1, 2, 3], {}), ("split", [2, 3], random_task_model(8))],
)
def test_a_client_descends_eq_9(logits: str, new: list[int], teacher: Parameters) -> None:
    """The closed form, with classes 2 and 3 now and 0 and 1 earlier; within a task, not from what it starts with."""
    start, data, replayed = random_task_model(), toy_data({2: 6, 3: 6}, seed=3), toy_data({0: 24, 1: 24}, seed=7)
    old = data_free.frozen_task_model(TOY, teacher or start)
    images, labels = torch.cat([data.images, replayed.images]), torch.cat([data.labels, replayed.labels])
    earlier, rows = old.features(images), old.head.weight[:2]

    def loss_of(module: ResNet) -> torch.Tensor:
        features = module.features(images)
        places = torch.tensor([new.index(label) for label in data.labels.tolist()])
        current = -module.head(features[:12])[:, new].log_softmax(dim=1)[torch.arange(12), places].mean()
        head = -module.head(features.detach()).log_softmax(dim=1)[torch.arange(60), labels].mean()
        distance = ((features - earlier) @ rows.T).square().sum(dim=1).mean() / 2
        return current + 3 * head + 5 * distance

    weights = {"head_weight": 3.0, "feature_weight": 5.0, "synthetic_batch_size": 48, "logits": logits}
    method = RealReplay(task=TOY, **{**SHORT, **ONE_STEP, **weights})
    assert_descends(method, data, Download(start, {"any": torch.zeros(1)}, seen=(0, 1), teacher=teacher), loss_of)


def test_fedavg_with_the_generator_takes_synthetic_images_for_real_ones() -> None:
    """The last row but one of the paper's Table 5."""
    start, data, replayed = random_task_model(), toy_data({2: 6, 3: 6}, seed=3), toy_data({0: 24, 1: 24}, seed=7)
    images, labels = torch.cat([data.images, replayed.images]), torch.cat([data.labels, replayed.labels])
    method = RealReplay(task=TOY, **{**SHORT, **ONE_STEP, "synthetic_batch_size": 48, "replay": "as-real"})
    download = Download(start, {"any": torch.zeros(1)}, seen=(0, 1))
    assert_descends(method, data, download, lambda module: F.cross_entropy(module(images), labels))
    with pytest.raises(ValueError, match="replay"):
        short_mfcl(replay="as-fake")


def test_teacher_and_generator_are_those_of_the_last_task_that_ended() -> None:
    method = short_mfcl(task_rounds=2, generator_steps=1)

    def after(state: AggregatorState, seed: int, classes: list[int]) -> AggregatorState:
        upload = CountedUpload(random_task_model(seed), dict.fromkeys(classes, 5))
        return method.aggregate(state, {"a": upload}, rng(seed), sampler=SAMPLER)[0]

    first = after(AggregatorState(), 1, [0])
    assert not first.generator, "its task goes on"
    second = after(first, 2, [1])
    assert second.generator
    assert packing.same_bits(second.teacher, second.average)
    third = after(second, 3, [2, 3])
    assert packing.same_bits(third.generator, second.generator), "sent once for a whole task"
    assert packing.same_bits(third.teacher, second.average)
    assert not packing.same_bits(third.average, second.average)
    assert (third.seen, method.download_of(third).seen) == ((0, 1, 2, 3), (0, 1))
    fourth = after(third, 4, [2])
    assert method.download_of(fourth).seen == (0, 1, 2, 3)
    assert not packing.same_bits(fourth.generator, second.generator)

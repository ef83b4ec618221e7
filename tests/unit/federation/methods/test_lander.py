from __future__ import annotations

import math

import pytest
import torch

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.lander import NoisyRound, draw_noise, replay_loss, scales
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.synthesis_records import SynthesisDownload
from replayfleet.models.build import num_features
from replayfleet.models.resnet import ResNet
from tests.support.replay_methods import (
    ONE_STEP,
    SAMPLER,
    answered,
    assert_descends,
    old_model,
    random_task_model,
    real_replay,
    short_lander,
    what_fedavg_remembers,
    what_it_remembers,
)
from tests.support.rng import rng
from tests.support.toy import LEARNING, TOY, toy_data


def test_the_shares_of_current_and_earlier_classes_follow_their_numbers() -> None:
    current, earlier = scales(range(8), range(8, 14))  # C = 14 of which K = 8
    root = math.sqrt(8 / 14)
    assert (current, earlier) == pytest.approx((0.2 * (1 + 1 / 3) / root, 0.4 * 3 * root))
    current, earlier = scales(range(6), [4, 5])  # nothing new
    assert (current, earlier) == pytest.approx((0.2 * 1.5, 0.4 * 2))
    assert scales(range(32), [32, 33])[1] > scales(range(8), [8, 9])[1]
    assert math.isfinite(scales([1], [1])[0])


@pytest.mark.learning
def test_a_first_round_pulls_features_towards_the_anchors_of_their_labels() -> None:
    start, data = random_task_model(), toy_data({0: 12, 1: 12})

    def distance(weight: float) -> float:
        method = short_lander(local_epochs=3, anchor_weight=weight)
        state = method.initial_states()[0]
        _, upload = method.local_round(
            state, data, SynthesisDownload(start), seeded_generator(0, 0, "a"), sampler=SAMPLER
        )
        features, _ = answered(upload.task_parameters, data.images)
        return float(data_free.bounding_loss(features, method.anchors()[data.labels], 0.0))

    assert distance(5.0) < distance(0.0)


@pytest.mark.learning
def test_with_good_replay_it_remembers_what_fedavg_forgets() -> None:
    method = short_lander(**LEARNING, synthetic_batch_size=8)
    download = SynthesisDownload(old_model(), synthetic=real_replay(), seen=(0, 1))
    assert what_fedavg_remembers() <= 0.55
    assert what_it_remembers(method, download) > 0.6


def test_a_client_descends_the_current_and_the_earlier_part_in_their_shares() -> None:
    """The closed form, with two classes now and three earlier, four in all: a = log2(3), b = sqrt(3/4)."""
    start, data = random_task_model(), toy_data({2: 6, 3: 6}, seed=3)
    images = real_replay()["images"][::4]
    pool = data_free.from_bytes(images)
    earlier_features, earlier_logits = answered(start, pool)
    answers, spread, root = (earlier_logits / 2).softmax(dim=1), math.log2(3), math.sqrt(0.75)
    replay = {"synthetic_batch_size": 12, "replay_augmented": False}
    method = short_lander(**ONE_STEP, **replay, anchor_weight=7.0, anchor_radius=0.1)
    anchors = method.anchors()[data.labels]

    def loss_of(module: ResNet) -> torch.Tensor:
        now, earlier = module.features(data.images), module.features(pool)
        real, synthetic = module.head(now), module.head(earlier)
        cross_entropy = -real.log_softmax(dim=1)[torch.arange(12), data.labels].mean()
        bound = (((now - anchors) ** 2).mean(dim=1) - 0.1).clamp_min(0).mean()
        distillation = -(answers * (synthetic / 2).log_softmax(dim=1)).sum(dim=1).mean()
        distance = ((earlier - earlier_features) ** 2).mean()
        current = 0.2 * (1 + 1 / spread) / root * (cross_entropy + 7 * bound)
        return current + 0.4 * spread * root * (distillation + distance)

    assert_descends(method, data, SynthesisDownload(start, synthetic={"images": images}, seen=(0, 1, 2)), loss_of)


def test_the_loss_on_a_pool_is_soft_cross_entropy_and_the_distance_of_features() -> None:
    method = short_lander(synthetic_batch_size=48)
    pool = method._replay(SynthesisDownload(old_model(), synthetic=real_replay(), seen=(0, 1)), rng())
    replayed = pool.draw()
    probabilities = (replayed.by.logits / 2).softmax(dim=1)
    entropy = -(probabilities * probabilities.log()).sum(dim=1).mean()
    assert replayed.images.shape == (48, 1, 28, 28)
    unchanged = replay_loss(replayed, replayed.by.features, replayed.by.logits)
    torch.testing.assert_close(unchanged, entropy, atol=1e-5, rtol=1e-4)
    moved = replay_loss(replayed, replayed.by.features + 2, replayed.by.logits)
    torch.testing.assert_close(moved, unchanged + 4)


def test_a_round_of_synthesis_trains_generator_noise_and_scale() -> None:
    method = short_lander()
    module = method._generator({}, rng()).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    anchors = method.anchors()[torch.tensor([0, 1, 0, 1, 2, 3])]
    source = NoisyRound(method, module, anchors)
    drawn = source.draw()
    teacher = data_free.frozen_task_model(TOY, random_task_model())
    judged = data_free.observe(teacher, source.scaled(drawn))
    expected = 5 * data_free.bounding_loss(judged.features, anchors, 0.015)
    torch.testing.assert_close(source.extra_loss(judged), expected)
    source.descend(source.extra_loss(judged))
    source.finish()
    after = module.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"scale.mean", "scale.std", "noise.0.weight", "noise.2.weight", "decoder.layers.0.weight"} <= moved


def test_noise_layers_are_drawn_anew_for_every_round_of_synthesis() -> None:
    method = short_lander(synthesis_rounds=1, synthesis_steps=1, generator_learning_rate=0.0)
    first, images = method.make_images({}, random_task_model(), (0, 1), rng())
    second, others = method.make_images(first, random_task_model(), (0, 1), rng(1))
    assert not torch.equal(first["noise.0.weight"], second["noise.0.weight"])
    assert torch.equal(first["decoder.layers.0.weight"], second["decoder.layers.0.weight"])
    assert not torch.equal(images, others)


def test_noise_layers_are_unit_normal_without_bias() -> None:
    layer = torch.nn.Linear(128, 64)
    draw_noise(layer, rng())
    assert float(layer.weight.detach().std()) == pytest.approx(1.0, abs=0.03)
    assert float(layer.weight.detach().mean()) == pytest.approx(0.0, abs=0.03)
    assert not layer.bias.any()


def test_images_of_the_warm_up_are_not_kept_and_labels_are_balanced() -> None:
    method = short_lander(synthesis_rounds=2, warm_up_rounds=3)
    _, images = method.make_images({}, random_task_model(), (0, 1), rng())
    assert len(images) == 2 * 6
    assert method.balance_labels


def test_anchors_fit_the_features_of_the_task_model() -> None:
    features, _ = answered(random_task_model(), toy_data({0: 2}).images)
    assert features.shape == (2, num_features(TOY))
    assert short_lander().anchors().shape == (TOY.num_classes, num_features(TOY))
    assert packing.same_bits({"a": short_lander().anchors()}, {"a": short_lander().anchors()})

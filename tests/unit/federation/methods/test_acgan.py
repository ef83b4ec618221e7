from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods.fedcil_gan import (
    Acgan,
    AcganLosses,
    AcganSchedule,
    Labelled,
    MiniBatch,
    Teacher,
    balanced_draw,
    consistency_loss,
    critic_loss,
    divergence,
    draw_by_class,
    generator_loss,
    latents_of,
    train_acgan,
)
from replayfleet.federation.methods.steps.modules import drawn_from, shuffled_batches
from replayfleet.models.acgan import initialised_acgan
from tests.support.rng import rng
from tests.support.toy import TOY

WIDTH = 2
CPU = torch.device("cpu")
SCHEDULE = AcganSchedule(width=WIDTH, learning_rate=1e-3, betas=(0.5, 0.99), weight_decay=0.0)


def pixel_critic(images: Tensor, _dropout: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Its answers stand in the image's first pixels: the score, then the logits."""
    pixels = images.flatten(1)
    return pixels[:, 0], pixels[:, 1:4]


def labelled(values: list[list[float]], labels: list[int]) -> Labelled:
    return Labelled(torch.tensor(values)[:, None, None, :], torch.tensor(labels))


REAL = labelled([[0.5, 2.0, -1.0, 0.0], [-0.3, 0.1, 0.2, 0.3]], [0, 2])
FAKE = labelled([[1.5, 0.0, 1.0, -1.0], [0.0, 0.5, 0.5, 0.5]], [1, 1])


def log_share(values: list[float], index: int) -> float:
    return values[index] - math.log(sum(math.exp(value) for value in values))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_the_critics_loss_is_two_binary_and_two_class_cross_entropies() -> None:
    source = -(log_sigmoid(0.5) + log_sigmoid(-0.3)) / 2 - (log_sigmoid(-1.5) + log_sigmoid(0.0)) / 2
    real = -(log_share([2.0, -1.0, 0.0], 0) + log_share([0.1, 0.2, 0.3], 2)) / 2
    fake = -(log_share([0.0, 1.0, -1.0], 1) + log_share([0.5, 0.5, 0.5], 1)) / 2
    loss = critic_loss(pixel_critic, REAL, FAKE)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(source + real + fake, rel=1e-6)


def test_the_generators_loss_wants_fakes_taken_for_real_and_for_their_class() -> None:
    source = -(log_sigmoid(1.5) + log_sigmoid(0.0)) / 2
    fake = -(log_share([0.0, 1.0, -1.0], 1) + log_share([0.5, 0.5, 0.5], 1)) / 2
    assert generator_loss(pixel_critic, FAKE).item() == pytest.approx(source + fake, rel=1e-6)  # type: ignore[arg-type]


def test_the_generators_gradient_matches_a_finite_difference() -> None:
    images = FAKE.images.double().requires_grad_(True)
    generator_loss(pixel_critic, Labelled(images, FAKE.labels)).backward()  # type: ignore[arg-type]
    assert images.grad is not None
    for index in range(4):
        moved = [FAKE.images.double().clone() for _ in range(2)]
        for step, image in zip((1e-6, -1e-6), moved, strict=True):
            image[0, 0, 0, index] += step
        up, down = (generator_loss(pixel_critic, Labelled(image, FAKE.labels)).item() for image in moved)  # type: ignore[arg-type]
        assert images.grad[0, 0, 0, index].item() == pytest.approx((up - down) / 2e-6, abs=1e-6)


def test_divergence_is_kl_from_target_to_answer_and_zero_for_equal_answers() -> None:
    target, answer = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.5]])
    expected = sum(
        math.exp(log_share(target[0].tolist(), k))
        * (log_share(target[0].tolist(), k) - log_share(answer[0].tolist(), k))
        for k in range(3)
    )
    assert divergence(target, answer).item() == pytest.approx(expected, rel=1e-5)
    assert divergence(target, target + 3.0).item() == pytest.approx(0.0, abs=1e-6)


def test_consistency_is_two_divergences_and_the_class_loss_of_the_global_models_images() -> None:
    alike, own = REAL.images + torch.tensor([0.0, 1.0, 0.0, 0.0]), FAKE.images.flip(0)
    loss = consistency_loss(pixel_critic, REAL, alike, own, FAKE, None)  # type: ignore[arg-type]
    logits = [images.flatten(1)[:, 1:4] for images in (alike, REAL.images, FAKE.images, own)]
    expected = divergence(logits[0], logits[1]) + divergence(logits[2], logits[3])
    assert loss.item() == pytest.approx((expected + F.cross_entropy(logits[2], FAKE.labels)).item(), rel=1e-6)
    same = consistency_loss(pixel_critic, REAL, REAL.images, FAKE.images, FAKE, None)  # type: ignore[arg-type]
    assert same.item() == pytest.approx(F.cross_entropy(logits[2], FAKE.labels).item(), rel=1e-6)


def test_latents_carry_the_class_in_front_of_the_noise() -> None:
    latents = latents_of(torch.tensor([1, 3]), 4, rng())
    assert latents.shape == (2, 104)
    assert torch.equal(latents[:, :4], torch.eye(4)[[1, 3]])
    assert latents[:, 4:].std().item() == pytest.approx(1.0, abs=0.2)


def test_every_pass_of_the_batches_holds_every_sample_once_and_no_batch_is_short() -> None:
    batches = list(shuffled_batches(5, 3, 5, rng()))
    assert [len(batch) for batch in batches] == [3] * 5
    flat = torch.cat(batches)
    assert all(sorted(part.tolist()) == [0, 1, 2, 3, 4] for part in flat.split(5))
    assert [len(batch) for batch in shuffled_batches(1, 4, 2, rng())] == [4, 4]
    assert set(drawn_from([2, 5], 50, rng()).tolist()) == {2, 5}


def coded_draw(code: float, asked: list[set[int]]) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Draws images that say who drew them and of which class; ``asked`` collects the classes."""

    def draw(labels: Tensor, _rng: torch.Generator) -> Tensor:
        asked.append(set(labels.tolist()))
        return (code + labels.to(torch.float32))[:, None, None, None]

    return draw


def test_a_balanced_draw_takes_classes_uniformly_and_each_from_a_generator_that_knows_it() -> None:
    asked: list[set[int]] = []
    first, second = coded_draw(100.0, asked), coded_draw(200.0, asked)
    samples = balanced_draw({0: [first], 1: [first, second], 3: [second]}, 900, rng(), CPU)
    counts = torch.bincount(samples.labels, minlength=4)
    assert counts[2] == 0
    assert all(250 < counts[c] < 350 for c in (0, 1, 3))
    codes = samples.images.flatten() - samples.labels
    assert set(codes[samples.labels == 0].tolist()) == {100.0}
    assert set(codes[samples.labels == 3].tolist()) == {200.0}
    assert 0.4 < float((codes[samples.labels == 1] == 100.0).float().mean()) < 0.6
    assert len(asked) == 2


def start() -> Acgan:
    generator, critic = initialised_acgan(TOY, WIDTH, rng(1))
    return Acgan(generator.state_dict(), critic.state_dict())


def batches_of(count: int, replay: bool) -> list[MiniBatch]:
    draw = draw_by_class(TOY, WIDTH, start().generator)
    batches = []
    for index in range(count):
        new = Labelled(torch.randn(4, 1, 28, 28, generator=rng(index)).clamp(-1, 1), torch.tensor([0, 1, 0, 1]))
        batches.append(MiniBatch(new, balanced_draw({2: [draw]}, 4, rng(index), CPU) if replay else None))
    return batches


def test_training_leaves_its_start_alone_and_depends_on_its_seed_alone() -> None:
    before = start()
    begun = start()
    results = [train_acgan(TOY, begun, batches_of(2, True), [0, 1, 2], SCHEDULE, rng(seed)) for seed in (0, 0, 1)]
    assert all(torch.equal(value, before.critic[name]) for name, value in begun.critic.items())
    assert all(torch.equal(value, before.generator[name]) for name, value in begun.generator.items())
    assert all(torch.equal(value, results[1].critic[name]) for name, value in results[0].critic.items())
    weight = "layers.0.weight"
    assert not torch.equal(results[0].generator[weight], results[2].generator[weight])
    assert not torch.equal(results[0].generator[weight], before.generator[weight])


def pixel_generator(latents: Tensor) -> Tensor:
    """Images whose pixels are the latents' first four entries behind the class."""
    return latents[:, 3:7, None, None].permute(0, 2, 3, 1)


def fakes_of(classes: list[int], count: int, drawn: torch.Generator) -> Labelled:
    labels = drawn_from(classes, count, drawn)
    return Labelled(pixel_generator(latents_of(labels, 3, drawn)), labels)


@pytest.mark.parametrize("taught", [False, True])
def test_the_critic_descends_weighted_new_data_and_replay_and_consistency(taught: bool) -> None:
    replay = labelled([[0.1, -1.0, 2.0, 0.5], [0.4, 0.3, 0.2, 0.1]], [1, 0])
    schedule = AcganSchedule(width=WIDTH, learning_rate=0.0, betas=(0.5, 0.99), weight_decay=0.0, new_weight=0.8)
    teacher = Teacher(lambda labels, drawn: pixel_generator(latents_of(labels, 3, drawn)), (0, 1))
    losses = AcganLosses(3, pixel_generator, pixel_critic, [0, 2], schedule, rng(5))  # type: ignore[arg-type]
    found = losses.critic_loss(MiniBatch(REAL, replay), teacher if taught else None)

    twin = rng(5)
    new = critic_loss(pixel_critic, REAL, fakes_of([0, 2], 2, twin))  # type: ignore[arg-type]
    expected = 0.8 * new + 0.2 * critic_loss(pixel_critic, replay, fakes_of([0, 2], 2, twin))  # type: ignore[arg-type]
    if taught:
        alike = teacher.draw(REAL.labels, twin)
        labels = drawn_from([0, 1], 2, twin)
        images = teacher.draw(labels, twin)
        own = pixel_generator(latents_of(labels, 3, twin))
        expected += consistency_loss(pixel_critic, REAL, alike, own, Labelled(images, labels), None)  # type: ignore[arg-type]
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_without_replay_new_data_count_whole() -> None:
    losses = AcganLosses(3, pixel_generator, pixel_critic, [0, 2], SCHEDULE, rng(5))  # type: ignore[arg-type]
    found = losses.critic_loss(MiniBatch(REAL), None)
    assert found.item() == pytest.approx(critic_loss(pixel_critic, REAL, fakes_of([0, 2], 2, rng(5))).item())  # type: ignore[arg-type]


def test_the_generator_descends_its_loss_on_fresh_fakes() -> None:
    losses = AcganLosses(3, pixel_generator, pixel_critic, [1], SCHEDULE, rng(5))  # type: ignore[arg-type]
    expected = generator_loss(pixel_critic, fakes_of([1], 2, rng(5)))  # type: ignore[arg-type]
    assert losses.generator_loss(MiniBatch(REAL), None).item() == pytest.approx(expected.item())


def test_a_frozen_generator_draws_by_its_seed_and_keeps_its_statistics() -> None:
    begun = start()
    draw = draw_by_class(TOY, WIDTH, begun.generator)
    labels = torch.tensor([1, 3, 0])
    assert torch.equal(draw(labels, rng(4)), draw(labels, rng(4)))
    assert not torch.equal(draw(labels, rng(4)), draw(labels, rng(5)))
    assert draw(labels, rng(4)).shape == (3, 1, 28, 28)
    assert all(torch.equal(value, start().generator[name]) for name, value in begun.generator.items())

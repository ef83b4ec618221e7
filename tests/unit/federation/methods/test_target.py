from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from replayfleet.federation.methods.image_synthesis_method import PASSES
from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.synthesis import Student, StudentTraining, labels_of_round, synthesise
from replayfleet.federation.methods.synthesis_records import SynthesisDownload
from replayfleet.federation.methods.target import FastRound
from replayfleet.models.data_free import TargetGenerator
from replayfleet.models.resnet import ResNet
from tests.support.replay_methods import (
    ONE_STEP,
    answered,
    assert_descends,
    old_model,
    random_task_model,
    real_replay,
    short_target,
    what_fedavg_remembers,
    what_it_remembers,
)
from tests.support.rng import rng
from tests.support.toy import LEARNING, TOY, toy_data

TRAINING = {"local_epochs": 1, "batch_size": 8, "weight_decay": 0.0}


@pytest.mark.learning
def test_with_good_replay_it_remembers_what_fedavg_forgets() -> None:
    method = short_target(**LEARNING, synthetic_batch_size=8, distillation_weight=5.0)
    download = SynthesisDownload(old_model(), synthetic=real_replay(), seen=(0, 1))
    assert what_fedavg_remembers() <= 0.55
    assert what_it_remembers(method, download) > 0.8


@pytest.mark.parametrize(("logits", "new", "old"), [("all", [0, 1, 2, 3], [0, 1, 2, 3]), ("split", [2, 3], [0, 1])])
@pytest.mark.parametrize("passes", PASSES)
def test_a_client_descends_cross_entropy_and_distillation(
    logits: str, new: list[int], old: list[int], passes: str
) -> None:
    """The closed form, with classes 2 and 3 now and 0 and 1 earlier: which logits take part, and which batches."""
    start, data = random_task_model(), toy_data({2: 6, 3: 6}, seed=3)
    images = real_replay()["images"][::4]
    pool = data_free.from_bytes(images)
    answers = (answered(start, pool)[1][:, old] / 2).softmax(dim=1)

    def loss_of(module: ResNet) -> torch.Tensor:
        if passes == "joined":
            real, synthetic = module(torch.cat([data.images, pool])).split(12)
        else:
            real, synthetic = module(data.images), module(pool)
        places = torch.tensor([new.index(label) for label in data.labels.tolist()])
        cross_entropy = -real[:, new].log_softmax(dim=1)[torch.arange(12), places].mean()
        distillation = -(answers * (synthetic[:, old] / 2).log_softmax(dim=1)).sum(dim=1).mean()
        return cross_entropy + 3 * distillation

    replay = {"synthetic_batch_size": 12, "replay_augmented": False, "passes": passes}
    method = short_target(**ONE_STEP, **replay, distillation_weight=3.0, logits=logits)
    assert_descends(method, data, SynthesisDownload(start, synthetic={"images": images}, seen=(0, 1)), loss_of)


def test_each_steps_images_are_shifted_and_mirrored_anew_and_the_average_model_is_asked_about_those() -> None:
    images = real_replay()["images"][::4]
    download = SynthesisDownload(old_model(), synthetic={"images": images}, seen=(0, 1))
    pool = short_target(synthetic_batch_size=12, padding=4)._replay(download, rng())
    first, second = pool.draw(), pool.draw()
    assert not torch.equal(first.images, second.images)
    plain = short_target(synthetic_batch_size=12, replay_augmented=False)._replay(download, rng()).draw()
    assert plain.images.sum() == pytest.approx(float(data_free.from_bytes(images).sum()), rel=1e-5)
    for drawn in (first, second, plain):
        assert float(drawn.images.min()) >= -1
        assert float(drawn.images.max()) <= 1
        features, logits = answered(old_model(), drawn.images)
        torch.testing.assert_close(drawn.by.features, features)
        torch.testing.assert_close(drawn.by.logits, logits)


def test_balanced_labels_go_through_the_classes_in_turn_and_draw_the_rest() -> None:
    labels = labels_of_round(4, 11, rng(), balanced=True)
    assert labels[:8].tolist() == [0, 1, 2, 3] * 2
    assert len(labels) == 11
    assert labels_of_round(12, 11, rng(), balanced=True).max() < 12
    assert labels_of_round(4, 11, rng(), balanced=False).tolist() != labels.tolist()


def test_the_generator_moves_by_the_sum_of_its_copys_gradients() -> None:
    method = short_target()
    module = method._generator({}, rng())
    start = [parameter.detach().clone() for parameter in module.parameters()]
    outer = torch.optim.SGD(module.parameters(), lr=1.0)
    fast = FastRound(method, module, outer, torch.randn(4, 8, generator=rng()), torch.zeros(4))
    sums = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for _ in range(3):
        loss = fast.scaled(fast.draw()).square().mean() + fast.extra_loss(None)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(loss, list(fast._fast.parameters()), retain_graph=True)
        sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
        fast.descend(loss)
    assert all(torch.equal(p, s) for p, s in zip(module.parameters(), start, strict=True))
    fast.finish()
    for parameter, before, total in zip(module.parameters(), start, sums, strict=True):
        torch.testing.assert_close(parameter.detach(), before - total)


class Constant:
    """A source whose step's images are its counter, so that which step was kept can be read off."""

    def __init__(self) -> None:
        self.step = 0

    def draw(self) -> torch.Tensor:
        self.step += 1
        return torch.full((2, 1, 28, 28), self.step / 10)

    def scaled(self, images: torch.Tensor) -> torch.Tensor:
        return 2 * images - 1

    def extra_loss(self, judged: object) -> float:
        return {1: 1e3, 2: 0.0, 3: 2e3}[self.step]

    def descend(self, loss: torch.Tensor) -> None:
        pass

    def finish(self) -> None:
        self.finished = True


def test_each_round_of_synthesis_keeps_the_images_of_its_least_loss() -> None:
    settings = short_target(synthesis_steps=3, synthesis_batch_size=2, padding=0)
    teacher = data_free.frozen_task_model(TOY, random_task_model())
    student = Student(TOY, StudentTraining(), torch.device("cpu"), rng())
    sources = [Constant(), Constant()]
    waiting = iter(sources)
    images, labels = synthesise(teacher, lambda _: next(waiting), (1, 3), settings, student, rng())
    assert len(labels) == 4
    assert set(labels.tolist()) <= {1, 3}
    assert images.dtype == torch.uint8
    assert torch.equal(images, torch.full((4, 1, 28, 28), 51, dtype=torch.uint8))  # 0.2 of 255
    assert all(source.finished for source in sources)


class Watched:
    """A source of flat images, which no mirror changes; it remembers the losses that it is told to descend."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.labels, self.losses = labels, list[torch.Tensor]()
        self.images = torch.linspace(0.1, 0.9, 6)[:, None, None, None].expand(6, 1, 28, 28)

    def draw(self) -> torch.Tensor:
        return self.images

    def scaled(self, images: torch.Tensor) -> torch.Tensor:
        return 2 * images - 1

    def extra_loss(self, judged: data_free.Observation) -> torch.Tensor:
        return judged.features.mean()

    def descend(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())

    def finish(self) -> None:
        pass


def test_synthesis_descends_the_weighted_sum_of_its_terms() -> None:
    """The adversarial one from the second round after the warm-up, the history of statistics from the second."""
    changes = {"batch_norm_weight": 0.3, "label_weight": 0.7, "adversarial_weight": 1.9, "batch_norm_momentum": 0.6}
    method = short_target(**changes, synthesis_rounds=2, synthesis_steps=1, padding=0, warm_up_rounds=0)
    teacher = data_free.frozen_task_model(TOY, random_task_model())
    student = Student(TOY, StudentTraining(), torch.device("cpu"), rng(7))
    settings = replace(method, synthesis_batch_size=6, student_steps=0)
    sources: list[Watched] = []

    def opened(labels: torch.Tensor) -> Watched:
        sources.append(Watched(labels))
        return sources[-1]

    synthesise(teacher, opened, (1, 3), settings, student, rng())
    images = 2 * sources[0].images - 1
    judged = data_free.observe(teacher, images)
    logits = judged.logits[:, [1, 3]]
    # Both rounds see the same images, so their moving average is the batch itself.
    distance = sum(
        (layer.running_mean - layer.mean).norm() + (layer.running_variance - layer.variance).norm()
        for layer in judged.layers
    )
    adversarial = data_free.adversarial_loss(logits, student.logits(images)[:, [1, 3]], "agree")
    assert adversarial < 0
    for source, extra in zip(sources, (0.0, 1.9 * adversarial), strict=True):
        places = (source.labels == 3).long()
        labels = -logits.log_softmax(dim=1)[torch.arange(6), places].mean()
        expected = 0.3 * distance + 0.7 * labels + extra + judged.features.mean()
        torch.testing.assert_close(source.losses[0], expected.detach())


def test_images_are_labelled_among_the_classes_that_are_given() -> None:
    changes = {"batch_norm_weight": 0.0, "label_weight": 1.0, "adversarial_weight": 0.0}
    method = short_target(**changes, synthesis_rounds=1, synthesis_steps=1, padding=0)
    teacher = data_free.frozen_task_model(TOY, random_task_model())
    student = Student(TOY, StudentTraining(), torch.device("cpu"), rng(7))
    sources: list[Watched] = []

    def opened(labels: torch.Tensor) -> Watched:
        sources.append(Watched(labels))
        return sources[-1]

    settings = replace(method, synthesis_batch_size=6)
    _, shown = synthesise(teacher, opened, (1, 3), settings, student, rng(), among=(0, 1, 3))
    [source] = sources
    judged = data_free.observe(teacher, 2 * source.images - 1)
    logs = judged.logits[:, [0, 1, 3]].log_softmax(dim=1)
    expected = -logs[torch.arange(6), torch.where(source.labels == 3, 2, 1)].mean() + judged.features.mean()
    assert shown.tolist() == source.labels.tolist()
    assert set(shown.tolist()) <= {1, 3}
    torch.testing.assert_close(source.losses, [expected.detach()])


def test_a_students_first_step_is_the_gradient_of_its_distillation() -> None:
    parameters = random_task_model()
    parameters["head.bias"] = torch.tensor([4.0, -4.0, 0.0, 0.0])  # sure of itself, or no temperature would matter
    teacher = data_free.frozen_task_model(TOY, parameters)
    training = StudentTraining(learning_rate=1.0, weight_decay=0.0, temperature=3.0)
    student = Student(TOY, training, torch.device("cpu"), rng(7))
    pool, known = real_replay()["images"][::4], [0, 1]
    images = data_free.from_bytes(pool)
    target = (teacher(images)[:, known] / 3).softmax(dim=1)
    module = copy.deepcopy(student._module).train()
    answer = (module(images)[:, known] / 3).softmax(dim=1)
    loss = 9 * (target * (target / answer).log()).sum(dim=1).mean()
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(module.parameters()))])
    start = torch.cat([part.detach().flatten().clone() for part in student._module.parameters()])
    student.learn(teacher, pool, torch.tensor(known), 1, len(pool))
    taken = start - torch.cat([part.detach().flatten() for part in student._module.parameters()])
    assert (taken - expected).norm() < 0.02 * expected.norm()


@pytest.mark.learning
def test_images_come_closer_to_the_statistics_and_labels_they_are_made_for() -> None:
    method = short_target(synthesis_steps=12, synthesis_batch_size=16, generator_width=4, batch_norm_weight=1.0)
    teacher = data_free.frozen_task_model(TOY, old_model())

    def distance(images: torch.Tensor) -> float:
        return float(data_free.batch_norm_distance(data_free.observe(teacher, images).layers, (), 0.0))

    _, images = method.make_images({}, old_model(), (0, 1), rng())
    module = method._generator({}, rng()).train()
    untrained = 2 * module(torch.randn(16, 8, generator=rng())).detach() - 1
    assert images.shape == (32, 1, 28, 28)
    assert distance(data_free.from_bytes(images[:16])) < distance(untrained)


@pytest.mark.learning
def test_a_student_that_is_warmed_up_changes_the_images() -> None:
    average = random_task_model()
    without = short_target(synthesis_rounds=3).make_images({}, average, (0, 1), rng())[1]
    changed = []
    for where in data_free.AGREEMENTS:
        method = short_target(synthesis_rounds=3, warm_up_rounds=0, student_steps=1, adversarial_where=where)
        images = method.make_images({}, average, (0, 1), rng())[1]
        assert torch.equal(images[:6], without[:6])
        changed.append(not torch.equal(images[6:], without[6:]))
    assert any(changed)  # an image counts under exactly one of the two


@pytest.mark.learning
def test_a_student_comes_closer_to_its_teacher_and_leaves_it_alone() -> None:
    teacher = data_free.frozen_task_model(TOY, old_model())
    student = Student(TOY, StudentTraining(learning_rate=0.01), torch.device("cpu"), rng())
    pool = real_replay()["images"]
    known, images = torch.tensor([0, 1]), data_free.from_bytes(pool)

    @torch.no_grad()
    def distance() -> float:
        # In training mode: BatchNorm's running statistics need more steps than this test takes.
        answers = (student._module.train()(images)[:, known] / 10).log_softmax(dim=1)
        target = (teacher(images)[:, known] / 10).softmax(dim=1)
        return float(torch.nn.functional.kl_div(answers, target, reduction="batchmean"))

    before = distance()
    student.learn(teacher, pool, known, 30, 16)
    assert distance() < before / 3
    assert packing.same_bits(dict(teacher.state_dict()), old_model())


def test_the_generator_draws_from_unit_latents_in_the_range_of_real_images() -> None:
    method = short_target()
    generator, images = method.make_images({}, random_task_model(), (0, 2), rng())
    assert set(generator) == set(TargetGenerator(1, 28, 8, 2).state_dict())
    assert images.shape == (12, 1, 28, 28)

from __future__ import annotations

import pytest
import torch

from federation.methods import packing
from federation.methods.steps import data_free
from federation.methods.steps.synthesis import Student, StudentTraining, synthesise
from federation.methods.synthesis_records import SynthesisDownload
from federation.methods.target import FastRound
from models.data_free import TargetGenerator
from models.resnet import ResNet20
from tests.support.replay_methods import (
    LEARNING,
    ONE_STEP,
    assert_descends,
    old_model,
    random_task_model,
    real_replay,
    short_target,
    what_fedavg_remembers,
    what_it_remembers,
)
from tests.support.toy import TOY, toy_data

TRAINING = {"local_epochs": 1, "batch_size": 8, "weight_decay": 0.0}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_with_good_replay_it_remembers_what_fedavg_forgets() -> None:
    method = short_target(**LEARNING, synthetic_batch_size=8, distillation_weight=5.0)
    download = SynthesisDownload(old_model(), synthetic=real_replay(), seen=(0, 1))
    assert what_fedavg_remembers() <= 0.55
    assert what_it_remembers(method, download) > 0.6


@pytest.mark.parametrize(("logits", "new", "old"), [("all", [0, 1, 2, 3], [0, 1, 2, 3]), ("split", [2, 3], [0, 1])])
def test_a_client_descends_cross_entropy_and_distillation(logits: str, new: list[int], old: list[int]) -> None:
    """The closed form, with classes 2 and 3 now and 0 and 1 earlier: which logits take part is all that differs."""
    start, data = random_task_model(), toy_data({2: 6, 3: 6}, seed=3)
    images = real_replay()["images"][::4]
    pool = data_free.from_bytes(images)
    answers = (data_free.answers(TOY, start, pool).logits[:, old] / 2).softmax(dim=1)

    def loss_of(module: ResNet20) -> torch.Tensor:
        real, synthetic = module(torch.cat([data.images, pool])).split(12)
        places = torch.tensor([new.index(label) for label in data.labels.tolist()])
        cross_entropy = -real[:, new].log_softmax(dim=1)[torch.arange(12), places].mean()
        distillation = -(answers * (synthetic[:, old] / 2).log_softmax(dim=1)).sum(dim=1).mean()
        return cross_entropy + 3 * distillation

    method = short_target(**ONE_STEP, synthetic_batch_size=12, distillation_weight=3.0, logits=logits)
    assert_descends(method, data, SynthesisDownload(start, synthetic={"images": images}, seen=(0, 1)), loss_of)


def test_the_generator_moves_by_the_sum_of_its_copys_gradients() -> None:
    method = short_target()
    module = method._generator({}, rng())
    start = [parameter.detach().clone() for parameter in module.parameters()]
    outer = torch.optim.SGD(module.parameters(), lr=1.0)
    fast = FastRound(method, module, outer, torch.randn(4, 8, generator=rng()))
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
    settings = short_target(synthesis_steps=3, synthesis_batch_size=2, padding=0)._synthesis()
    teacher = data_free.frozen_task_model(TOY, random_task_model())
    student = Student(TOY, StudentTraining(), torch.device("cpu"), rng())
    sources = [Constant(), Constant()]
    waiting = iter(sources)
    images = synthesise(teacher, lambda _: next(waiting), (0, 1), settings, student, rng())
    assert images.dtype == torch.uint8
    assert torch.equal(images, torch.full((4, 1, 28, 28), 51, dtype=torch.uint8))  # 0.2 of 255
    assert all(source.finished for source in sources)


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
    student.learn(teacher, pool, known, 10, 16)
    assert distance() < before / 3
    assert packing.same_bits(dict(teacher.state_dict()), old_model())


def test_the_generator_draws_from_unit_latents_in_the_range_of_real_images() -> None:
    method = short_target()
    generator, images = method.make_images({}, random_task_model(), (0, 2), rng())
    assert set(generator) == set(TargetGenerator(1, 28, 8, 2).state_dict())
    assert images.shape == (12, 1, 28, 28)

"""Sub-generators trained together: each as if it had trained alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from replayfleet.federation.methods.steps.sub_generators.grouped_gan import SubGeneratorJob, train_sub_generators
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import (
    GanSchedule,
    SubGenerator,
    new_sub_generator,
    train_sub_generator,
)
from replayfleet.models.specs import TaskSpec

SPEC = TaskSpec(1, 28, ("a", "b", "c"), "cifar", 4)
SCHEDULE = GanSchedule(
    num_epochs=2, batch_size=8, learning_rate=1e-4, betas=(0.5, 0.9), critic_steps_per_generator_step=2
)


def doubled(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in parameters.items()}


def jobs(sizes: Sequence[int], *, critics: bool = True, dtype: torch.dtype = torch.float64) -> list[SubGeneratorJob]:
    rng = torch.Generator().manual_seed(3)
    made = []
    for index, size in enumerate(sizes):
        start = new_sub_generator(SPEC, rng)
        critic = start.critic if critics else {}
        if dtype == torch.float64:
            start = SubGenerator(doubled(start.generator), doubled(critic))
        images = (torch.rand(size, 1, 28, 28, generator=rng, dtype=dtype) * 2 - 1).clone()
        made.append(SubGeneratorJob(start, images, torch.Generator().manual_seed(index)))
    return made


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Make random numbers float64 too, so that only real differences remain."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("sizes", [(12, 12, 12), (12, 9), (16,)])
def test_training_together_equals_training_one_by_one(sizes: tuple[int, ...], in_float64: None):
    together = train_sub_generators(SPEC, jobs(sizes), SCHEDULE)
    for job, found in zip(jobs(sizes), together, strict=True):
        expected = train_sub_generator(SPEC, job.start, job.images, SCHEDULE, job.rng)
        for part in ("generator", "critic"):
            left, right = getattr(found, part), getattr(expected, part)
            assert left.keys() == right.keys()
            for name, tensor in right.items():
                assert left[name].shape == tensor.shape
                assert left[name].dtype == tensor.dtype
                torch.testing.assert_close(left[name], tensor, rtol=1e-6, atol=1e-9, msg=f"{part} {name}")


def test_the_inputs_stay_untouched_and_the_same_seeds_give_the_same_bits():
    first, again = jobs((10, 10), dtype=torch.float32), jobs((10, 10), dtype=torch.float32)
    before = [{name: tensor.clone() for name, tensor in job.start.generator.items()} for job in first]
    left, right = (train_sub_generators(SPEC, made, SCHEDULE) for made in (first, again))
    for job, kept in zip(first, before, strict=True):
        assert all(torch.equal(job.start.generator[name], tensor) for name, tensor in kept.items())
    for one, other in zip(left, right, strict=True):
        assert all(torch.equal(one.generator[name], tensor) for name, tensor in other.generator.items())
        assert not torch.equal(one.generator["layers.0.weight"], first[0].start.generator["layers.0.weight"])


def test_a_missing_critic_is_made_anew():
    made = jobs((8, 8), critics=False, dtype=torch.float32)
    made = [SubGeneratorJob(SubGenerator(job.start.generator, {}), job.images, job.rng) for job in made]
    trained = train_sub_generators(SPEC, made, SCHEDULE)
    assert all(result.critic for result in trained)


def test_a_class_without_images_is_refused():
    with pytest.raises(ValueError, match="at least one image"):
        train_sub_generators(SPEC, jobs((4, 0)), SCHEDULE)

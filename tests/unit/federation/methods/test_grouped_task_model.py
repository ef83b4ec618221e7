"""Task models trained together: each as if it had trained alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob, train_task_models
from replayfleet.federation.methods.steps.task_model import Alignment, Optimisation, train_task_model
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec

SPECS = [TaskSpec(1, 28, ("a", "b", "c"), "cifar", 4), TaskSpec(3, 64, ("a", "b", "c"), "imagenet", 2)]
SCHEDULE = Optimisation(
    num_epochs=2, batch_size=4, learning_rate=0.01, momentum=0.9, weight_decay=0.01, schedule="cosine"
)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Make parameters and images float64, so that only real differences remain."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def jobs(spec: TaskSpec, sizes: Sequence[int], *, aligned: bool = False) -> list[TaskModelJob]:
    rng = torch.Generator().manual_seed(5)
    made = []
    for index, size in enumerate(sizes):
        start = initialise(build_task_model(spec), rng).to(torch.get_default_dtype()).state_dict()
        images = torch.rand(size, *spec.image_shape, generator=rng) * 2 - 1
        labels = torch.randint(0, 3, (size,), generator=rng)
        alignment = None
        if aligned:
            alignment = Alignment(torch.arange(size) % 2 == 0, torch.randn(size, 3, generator=rng), 0.3)
        made.append(TaskModelJob(start, images, labels, torch.Generator().manual_seed(index), alignment))
    return made


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.image_size}px")
def test_training_together_equals_training_one_by_one(spec: TaskSpec, aligned: bool, in_float64: None) -> None:
    sizes = (9, 9, 6)
    together = train_task_models(spec, jobs(spec, sizes, aligned=aligned), SCHEDULE)
    for job, found in zip(jobs(spec, sizes, aligned=aligned), together, strict=True):
        expected = train_task_model(spec, job.start, job.images, job.labels, SCHEDULE, job.rng, alignment=job.alignment)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9, msg=name)


def test_the_start_stays_untouched_and_the_same_seeds_give_the_same_bits() -> None:
    made = jobs(SPECS[0], (6, 6))
    before = [{name: tensor.clone() for name, tensor in job.start.items()} for job in made]
    first = train_task_models(SPECS[0], made, SCHEDULE)
    again = train_task_models(SPECS[0], jobs(SPECS[0], (6, 6)), SCHEDULE)
    for job, kept, one, other in zip(made, before, first, again, strict=True):
        assert all(torch.equal(job.start[name], tensor) for name, tensor in kept.items())
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
        assert not torch.equal(one["head.weight"], job.start["head.weight"])


def test_a_client_with_a_single_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        train_task_models(SPECS[0], jobs(SPECS[0], (4, 1)), SCHEDULE)

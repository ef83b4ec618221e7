"""Training several sub-generators, or several clients' task models, as one network, against one after the other.

Both run the same schedule from the same start on the same random numbers, alternately in one process; that their
results agree is a test's matter (``test_methods_grouped_gan.py`` and ``test_methods_grouped_task_model.py``).

    python -m benchmarks.simulation.grouped_training [--device cuda] [--out benchmarks/results/grouped_training.json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import in_turns, paired_ratio, run
from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob, train_task_models
from replayfleet.federation.methods.steps.sub_generators.grouped_gan import SubGeneratorJob, train_sub_generators
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import (
    GanSchedule,
    SubGenerator,
    new_sub_generator,
    train_sub_generator,
)
from replayfleet.federation.methods.steps.task_model import Optimisation, train_task_model
from replayfleet.federation.streams.datasets import task_for
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec

NUM_IMAGES, BATCH_SIZE, NUM_EPOCHS = 200, 64, 10
"""The paper's images of a class in a round, its batch, and enough epochs to time (40 critic steps)."""

NUM_SAMPLES, TASK_EPOCHS = 400, 2
"""A client's samples of a round, two classes, and enough epochs to time (14 steps)."""

GAN = GanSchedule(
    num_epochs=NUM_EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=1e-4,
    betas=(0.5, 0.9),
    critic_steps_per_generator_step=5,
)
SGD = Optimisation(num_epochs=TASK_EPOCHS, batch_size=BATCH_SIZE, learning_rate=0.01, momentum=0.9, weight_decay=0.01)


def sub_generators(spec: TaskSpec, num: int, device: torch.device) -> list[SubGeneratorJob]:
    """Return sub-generators to train on noise: what the images show changes no time."""
    rng = torch.Generator().manual_seed(0)
    made = []
    for index in range(num):
        start = new_sub_generator(spec, rng)
        halves = (
            {name: tensor.to(device) for name, tensor in half.items()} for half in (start.generator, start.critic)
        )
        images = torch.rand(NUM_IMAGES, *spec.image_shape, generator=rng) * 2 - 1
        made.append(SubGeneratorJob(SubGenerator(*halves), images.to(device), torch.Generator().manual_seed(index)))
    return made


def task_models(spec: TaskSpec, num: int, device: torch.device) -> list[TaskModelJob]:
    """Return task models to train on noise."""
    rng = torch.Generator().manual_seed(0)
    made = []
    for index in range(num):
        start = initialise(build_task_model(spec), rng).to(device).state_dict()
        images = torch.rand(NUM_SAMPLES, *spec.image_shape, generator=rng) * 2 - 1
        labels = torch.randint(0, spec.num_classes, (NUM_SAMPLES,), generator=rng)
        made.append(TaskModelJob(start, images.to(device), labels.to(device), torch.Generator().manual_seed(index)))
    return made


def both_ways(kind: str, spec: TaskSpec, num: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return what trains ``num`` networks of a kind one by one, and as one."""
    if kind == "sub-generators":
        return {
            "one by one": lambda: [
                train_sub_generator(spec, job.start, job.images, GAN, job.rng)
                for job in sub_generators(spec, num, device)
            ],
            "grouped": lambda: train_sub_generators(spec, sub_generators(spec, num, device), GAN),
        }
    return {
        "one by one": lambda: [
            train_task_model(spec, job.start, job.images, job.labels, SGD, job.rng)
            for job in task_models(spec, num, device)
        ],
        "grouped": lambda: train_task_models(spec, task_models(spec, num, device), SGD),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    wait = torch.cuda.synchronize if device.type == "cuda" else int  # what was queued on a GPU counts too
    result: dict[str, Any] = {"device": options.device, "threads": options.threads, "runs": []}
    for dataset in options.datasets:
        for num in options.networks:
            for kind in options.kinds:
                ways = both_ways(kind, task_for(dataset), num, device)
                times = in_turns(ways, options.repeats, warm_ups=1, after=wait)
                ratio = paired_ratio(*times.values())
                result["runs"].append(
                    {"dataset": dataset, "kind": kind, "networks": num, "seconds": times, "ratio": ratio}
                )
                medians = ", ".join(f"{name} {statistics.median(values):.2f} s" for name, values in times.items())
                print(f"{dataset}, {num} {kind}: {medians}, {ratio:.2f}x as fast", flush=True)
    return result


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        device=("cpu", "torch device"),
        networks=([1, 2, 10], "how many"),
        kinds=(["sub-generators", "task-models"], "of networks"),
        datasets=(["fashion-mnist"], "whose image size and width"),
        repeats=3,
        threads=1,
    )

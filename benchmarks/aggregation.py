"""Personalised aggregation (Eq. 3 of pFedGRP) for 10 clients: ours against a plain loop over state dicts.

Ten clients hold task models that were trained on two classes of Fashion-MNIST each; each client's replay is 64 images
of its classes. The plain loop is Eq. 3 as one would write it down: for every client and step it builds the mixed state
dict key by key, calls the task model with it, and runs all of the paper's 20 epochs. PyTorch cannot differentiate
BatchNorm with respect to running statistics, so the plain loop leaves them out of the gradient, which spares it work
that ours does. Ours mixes one stacked matrix, folds BatchNorm into the convolutions, stops when epochs make no
progress, and takes the mean of its last epochs' weights, which allows a larger step. In bfloat16 it pays where the
processor multiplies that. The mean loss of each is printed: a faster answer that is worse would not count.

Then all epochs once more, in CPU seconds for a client whose model is mixed with its nearest, ten in all, of 10, 100 and
1,000: the ten models, and others that differ from them by noise. What is done once for a fleet isn't in it.

    python -m benchmarks.aggregation [--solved 10] [--out benchmarks/results/aggregation.json]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.harness import circulating, in_turns, paired_ratio, run
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.steps.averaging import project_to_simplex, weighted_average
from replayfleet.federation.methods.steps.personalisation.mixtures import nearest, personalise_all
from replayfleet.federation.methods.steps.personalisation.personalise import StackedParameters, WeightSearch
from replayfleet.federation.methods.steps.precision import PRECISIONS
from replayfleet.federation.methods.steps.replay import Replay
from replayfleet.federation.methods.steps.task_model import Optimisation, judge_with, train_task_model
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec

NUM_CLIENTS = 10
REPLAY_SIZE = 64
EPOCHS, BATCH_SIZE, LEARNING_RATE, MOMENTUM = 20, 32, 0.01, 0.9
"""Epochs, step size and momentum are the paper's (appendix B.2)."""

PRESET_STEP, PRESET_MOMENTUM = 0.07, 0.8
"""Those of the presets ``demo`` and ``small``."""

FLEETS = (10, 100, 1000)
NEAREST = 10

Problem = tuple[TaskSpec, list[Parameters], list[tuple[int, Replay]]]


def plain_loop(problem: Problem, rng: torch.Generator) -> list[Tensor]:
    """Solve Eq. 3 for each client by mixing state dicts key by key."""
    spec, models, replays = problem
    module = build_task_model(spec, device="meta").eval()
    names = [name for name, tensor in models[0].items() if tensor.is_floating_point()]
    found = []
    for _, replay in replays:
        order = split_generator(rng)
        weights = torch.full((len(models),), 1 / len(models))
        velocity = torch.zeros(len(models))
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(replay.labels), generator=order).split(BATCH_SIZE):
                variable = weights.clone().requires_grad_(True)
                mixed = {}
                for name in names:
                    shares = weights if "running" in name else variable
                    mixed[name] = sum(shares[index] * model[name] for index, model in enumerate(models))
                loss = F.cross_entropy(functional_call(module, mixed, (replay.images[batch],)), replay.labels[batch])
                (gradient,) = torch.autograd.grad(loss, variable)
                velocity = MOMENTUM * velocity + gradient
                weights = project_to_simplex(weights - LEARNING_RATE * velocity)
        found.append(weights)
    return found


def ours(problem: Problem, rng: torch.Generator, **search: Any) -> list[Tensor]:
    """Solve Eq. 3 as the aggregator does."""
    spec, models, replays = problem
    given = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, **search}
    wanted = WeightSearch(num_epochs=EPOCHS, batch_size=BATCH_SIZE, **given)
    return [mixture.weights for mixture in personalise_all(spec, StackedParameters(models), replays, wanted, rng)]


def make_problem(dataset: Dataset) -> Problem:
    """Train ten task models on two classes each; the images of the next round stand for a perfect replay."""
    stream = circulating(dataset, num_clients=NUM_CLIENTS, num_rounds=6, samples_per_class=100)
    start = initialise(build_task_model(dataset.task), torch.Generator().manual_seed(0)).state_dict()
    schedule = Optimisation(num_epochs=4, batch_size=32, learning_rate=0.01, momentum=0.9, weight_decay=0.001)
    models: list[Parameters] = []
    replays = []
    for client in range(NUM_CLIENTS):
        data = round_data(dataset.train, stream.train_indices(client, 0))
        rng = torch.Generator().manual_seed(client)
        models.append(train_task_model(dataset.task, start, data.images, data.labels, schedule, rng))
        later = round_data(dataset.train, stream.train_indices(client, 5))
        chosen = torch.randperm(len(later.labels), generator=rng)[:REPLAY_SIZE]
        replays.append((client, Replay(later.images[chosen], later.labels[chosen], REPLAY_SIZE, 0)))
    return dataset.task, models, replays


def mean_loss(problem: Problem, weights: list[Tensor]) -> float:
    """Return the mean over clients of the mixed model's cross-entropy on the client's replay."""
    spec, models, replays = problem
    losses = []
    for own, (_, replay) in zip(weights, replays, strict=True):
        exact = own.to(torch.float64)
        mixed = weighted_average(models, exact / exact.sum())
        losses.append(float(F.cross_entropy(judge_with(spec, mixed)(replay.images), replay.labels)))
    return statistics.mean(losses)


def cpu_s_of_a_client(problem: Problem, fleet: int, precision: str) -> float:
    """Return CPU seconds of Eq. 3 for a client that is mixed with the nearest of a fleet, all epochs long."""
    spec, models, replays = problem
    rng = torch.Generator().manual_seed(3)
    crowd = [*models]
    while len(crowd) < fleet:
        like = models[len(crowd) % len(models)]
        crowd.append({name: nearby(tensor, rng) for name, tensor in like.items()})
    counts = [{class_id % 10: 50, (class_id + 1) % 10: 50} for class_id in range(fleet)]
    search = WeightSearch(
        num_epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        learning_rate=PRESET_STEP,
        momentum=PRESET_MOMENTUM,
        precision=precision,
    )
    asked = replays[: min(3, len(replays))]
    near, stacked = nearest(counts, NEAREST - 1), StackedParameters(crowd)
    began = time.process_time()
    personalise_all(spec, stacked, asked, search, rng, near=near)
    return (time.process_time() - began) / len(asked)


def nearby(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """Return a tensor that differs by noise; counters are those that they were."""
    return tensor + 1e-4 * torch.randn(tensor.shape, generator=rng) if tensor.is_floating_point() else tensor


def measure(options: argparse.Namespace) -> dict[str, Any]:
    spec, models, replays = make_problem(load_dataset("fashion-mnist", data_root=options.data_root))
    problem = spec, models, replays[: options.solved]
    step = {"learning_rate": PRESET_STEP, "momentum": PRESET_MOMENTUM}
    ways: dict[str, Callable[[torch.Generator], list[Tensor]]] = {
        "plain loop": lambda rng: plain_loop(problem, rng),
        "stacked, all epochs": lambda rng: ours(problem, rng, patience=0),
        "stacked, patience 2": lambda rng: ours(problem, rng, patience=2),
        f"stacked, patience 2, step {PRESET_STEP}, momentum {PRESET_MOMENTUM}": lambda rng: ours(
            problem, rng, patience=2, **step
        ),
        "the same, bfloat16": lambda rng: ours(problem, rng, patience=2, precision="bfloat16", **step),
    }
    found: dict[str, list[Tensor]] = {}

    def solved(name: str) -> None:
        found[name] = ways[name](torch.Generator().manual_seed(7))

    times = in_turns({name: functools.partial(solved, name) for name in ways}, options.repeats)
    losses = {name: mean_loss(problem, weights) for name, weights in found.items()}
    ratios = {name: paired_ratio(times["plain loop"], values) for name, values in times.items()}
    for name, values in times.items():
        print(
            f"Eq. 3 for {options.solved} of {NUM_CLIENTS} clients, {name}: {statistics.median(values):.2f} s, "
            f"{ratios[name]:.2f}x as fast as the plain loop, mean loss {losses[name]:.4f}"
        )
    of_a_client = {
        precision: {str(fleet): cpu_s_of_a_client(problem, fleet, precision) for fleet in FLEETS}
        for precision in PRECISIONS
    }
    for precision, seconds in of_a_client.items():
        said = ", ".join(f"{cpu_s:.2f} of {fleet}" for fleet, cpu_s in seconds.items())
        print(f"CPU seconds for a client, {EPOCHS * REPLAY_SIZE // BATCH_SIZE} steps, {precision}: {said}")
    settings = {
        "clients": NUM_CLIENTS,
        "solved": options.solved,
        "epochs": EPOCHS,
        "replay": REPLAY_SIZE,
        "batch_size": BATCH_SIZE,
    }
    return {
        "settings": {**settings, "threads": options.threads},
        "seconds": times,
        "ratios": ratios,
        "mean_losses": losses,
        "cpu_s_of_a_client": of_a_client,
    }


if __name__ == "__main__":
    run(
        measure, __doc__, solved=(NUM_CLIENTS, "clients that Eq. 3 is solved for"), repeats=2, threads=2, data_root=None
    )

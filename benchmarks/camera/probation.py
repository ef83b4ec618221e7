"""How often probation's comparison sends a good model away, and a broken one.

The task model learns Fashion-MNIST two classes at a time, once with replay of the earlier classes and once without,
which forgets them all: the worst that a device may be sent on purpose. Each model is compared with its predecessor on
streams of test pictures, as in a client. Broken models are made from the good ones.

    python -m benchmarks.camera.probation [--per-class 200] [--out benchmarks/results/probation.json]
"""

from __future__ import annotations

import argparse
import collections
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.harness import run
from replayfleet.edge_client.flow import Answers, Inputs, classified
from replayfleet.edge_client.serving.probation.comparison import WINDOW, Compared, Comparisons
from replayfleet.export.parity import eager_run
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.streams.labelled_images import LabelledImages, normalise
from replayfleet.models.build import build_task_model, initialise

SPEC = TASKS["fashion-mnist"]
STAGES = [range(first, first + 2) for first in range(0, 10, 2)]
EPOCHS = 2
BATCH = 16


def learn(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, rng: torch.Generator) -> nn.Module:
    """Return a copy that learned the samples."""
    model = copy.deepcopy(model).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(images), generator=rng).split(BATCH):
            if len(chosen) > 1:
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
                optimiser.step()
    return model


def sequence(train: LabelledImages, per_class: int, *, replay: bool) -> Iterator[nn.Module]:
    """Yield the model after each stage."""
    rng = torch.Generator().manual_seed(0)
    model: nn.Module = initialise(build_task_model(SPEC), rng)
    for number, stage in enumerate(STAGES):
        classes = [*(range(stage.start) if replay and number else ()), *stage]
        chosen = np.concatenate([np.flatnonzero(train.labels == each)[:per_class] for each in classes])
        images = torch.from_numpy(normalise(train.images[chosen]))
        model = learn(model, images, torch.from_numpy(train.labels[chosen].astype(np.int64)), rng)
        yield model


def pictures(test: LabelledImages, classes: list[int]) -> NDArray[np.float32]:
    """Return ``WINDOW`` pictures of these classes, as a camera might meet them."""
    chosen = np.flatnonzero(np.isin(test.labels, classes))
    return normalise(test.images[np.random.default_rng(0).permutation(chosen)[:WINDOW]])


def answers(model: nn.Module, images: NDArray[np.float32]) -> list[Answers]:
    """Return one answer per picture, as a client has them."""
    logits = eager_run(model)(images)
    return [classified(logits[i : i + 1], Inputs(images[i : i + 1])) for i in range(len(images))]


def verdict(new: nn.Module, before: nn.Module, images: NDArray[np.float32]) -> str:
    """Return what probation says of ``new``, at whichever picture it says it first."""
    compared = Comparisons()
    for this, that in zip(answers(new, images), answers(before, images), strict=True):
        compared.add(Compared(this, that, 0.001, 0.001))
        if drift := compared.drift():
            return drift
    return ""


def streams(stage: range) -> dict[str, list[list[int]]]:
    """Return what a camera may see during a stage."""
    met = list(range(stage.stop))
    return {
        "all classes met": [met],
        "the new classes": [list(stage)],
        "one new class": [[each] for each in stage],
        "the earlier classes": [met[: stage.start]],
        "one earlier class": [[each] for each in met[: stage.start]],
    }


def broken_models(stage: range) -> Iterator[tuple[str, Callable[[nn.Module, nn.Linear], object]]]:
    """Yield what is done to a model and its last layer, and its name."""
    for class_id in (*range(stage.stop), 9):
        name = "always one class never met" if class_id == 9 else "always one class that was met"
        yield name, lambda _, last, chosen=class_id: last.bias[chosen].add_(100)
    yield "dead features", lambda _, last: last.weight.zero_()
    yield "all parameters zero", lambda model, _: [parameter.zero_() for parameter in model.parameters()]


def broken(model: nn.Module, change: Callable[[nn.Module, nn.Linear], object]) -> nn.Module:
    """Return a changed copy."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        change(model, next(module for module in reversed(list(model.modules())) if isinstance(module, nn.Linear)))
    return model


def sent_away(train: LabelledImages, test: LabelledImages, per_class: int) -> dict[str, Any]:
    """Return by kind of model and stream: how many were compared, how many were sent away."""
    table: dict[str, dict[str, dict[str, int]]] = {}

    def count(kind: str, stream: str, said: str) -> None:
        entry = table.setdefault(kind, {}).setdefault(stream, collections.Counter(compared=0, sent_away=0))
        entry["compared"] += 1
        entry["sent_away"] += bool(said)

    for kind, replay in (("with replay", True), ("without replay, forgets", False)):
        models = list(sequence(train, per_class, replay=replay))
        for number in range(1, len(STAGES)):
            before, new = models[number - 1], models[number]
            for stream, cases in streams(STAGES[number]).items():
                for classes in cases:
                    count(kind, stream, verdict(new, before, pictures(test, classes)))
            if replay and number < len(STAGES) - 1:
                for name, change in broken_models(STAGES[number]):
                    met = pictures(test, list(range(STAGES[number].stop)))
                    count(name, "all classes met", verdict(broken(new, change), new, met))
    return table


def measure(options: argparse.Namespace) -> dict[str, Any]:
    data = load_dataset("fashion-mnist", data_root=options.data_root)
    table = sent_away(data.train, data.test, options.per_class)
    for kind, row in table.items():
        for stream, counts in row.items():
            print(f"{kind:30} {stream:20} {counts['sent_away']:3} of {counts['compared']:3} sent away")
    return {"per_class": options.per_class, "table": table}


if __name__ == "__main__":
    run(measure, __doc__, per_class=(200, "training samples of a class"), threads=1, data_root=None)

"""iCaRL in a federation: clients keep the samples that stand best for each class, and what earlier models said.

Rebuffi et al. 2017, "iCaRL: Incremental Classifier and Representation Learning", Algorithms 3 to 5; "iCaRL + FL" in the
tables of SDD (Liu et al. 2025). Real samples stay on the client.
Differences from the papers: ``docs/methods/icarl.md``.

Axes: B batch, S samples kept, D features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.packing import CLASS_IDS, OneSet, Record
from replayfleet.federation.methods.kit.records import Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.incremental import soft_cross_entropy
from replayfleet.federation.methods.steps.kept_samples import IMAGES, LABELS, as_bytes, as_met, digests_of
from replayfleet.federation.methods.steps.task_model import loss_of, portions
from replayfleet.federation.methods.task_method import AveragingMethod
from replayfleet.models.specs import TaskSpec


def herded(features: Tensor, count: int) -> Tensor:
    """Return the rows of ``min(count, B)`` samples, each chosen so that the mean of all chosen is next to the class's.

    iCaRL, Algorithm 4: a set cut short at any place is what a smaller ``count`` would have chosen.

    Args:
        features: (B, D) of one class, each of length 1.
        count: at least 0.
    """
    mean, chosen = features.mean(dim=0), torch.zeros_like(features[0])
    left = torch.ones(len(features), dtype=torch.bool, device=features.device)
    rows = []
    for size in range(1, min(count, len(features)) + 1):
        distances = (mean - (features + chosen) / size).norm(dim=1)
        row = int(distances.where(left, torch.inf).argmin())
        left[row] = False
        chosen = chosen + features[row]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Exemplars(Record):
    """Real samples that a client keeps.

    Attributes:
        samples: ``images`` (S, C, H, W), ``as_bytes`` if they can be, and ``labels`` (S,), those of a class in the
            order in which they were chosen; empty before the first round.
        met: classes that it met so far, in rising order.
    """

    samples: Annotated[Mapping[str, Tensor], OneSet("exemplars")] = field(default_factory=dict)
    met: Annotated[tuple[int, ...], CLASS_IDS] = ()

    def joined(self, data: RoundData) -> RoundData:
        """Return a round's samples with those kept behind them; a sample that is both counts once."""
        if not self.samples:
            return data
        now, device = set(digests_of(data.images)), data.images.device
        kept = as_met(self.samples[IMAGES])
        rows = [row for row, digest in enumerate(digests_of(kept)) if digest not in now]
        images, labels = (each[rows].to(device) for each in (kept, self.samples[LABELS]))
        return RoundData(torch.cat([data.images, images]), torch.cat([data.labels, labels]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ICaRL(AveragingMethod):
    """The client's half and its settings; the aggregator's, and the other settings, are those of FedAvg.

    Attributes:
        buffer_size: K, most samples that a client keeps; each class that it met has an equal share.
        distillation_weight: of what the downloaded model says, beside the cross-entropy.
        temperature: of the distillation.
    """

    name: ClassVar[str] = "icarl"
    stores_data: ClassVar[bool] = True
    ClientState: ClassVar[type[Any]] = Exemplars

    task: TaskSpec
    buffer_size: int = 200
    distillation_weight: float = 1.0
    temperature: float = 2.0

    def __post_init__(self) -> None:
        AveragingMethod.__post_init__(self)
        checks.at_least(2, self, ["buffer_size"])
        checks.within(0.0, math.inf, self, ["distillation_weight"])
        checks.within(1e-3, 1e9, self, ["temperature"])

    def local_work(
        self, state: Exemplars, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[Exemplars, TaskUpload]]:
        """Learn new and kept samples beside what the downloaded model says of earlier classes, then choose anew."""
        everything = state.joined(data)
        earlier = torch.tensor(sorted(set(state.met) - data.counts().keys()), device=data.images.device)
        teacher = data_free.frozen_task_model(self.task, download.task_parameters) if len(earlier) else None

        def batch_loss(module: nn.Module, batch: Tensor) -> Tensor:
            images = everything.images[batch]
            if teacher is None or self.distillation_weight == 0.0:
                return loss_of(self.task, module, images, everything.labels[batch])
            logits = module(images)
            with torch.no_grad():
                said = teacher(images)
            told = soft_cross_entropy(logits[:, earlier], said[:, earlier], self.temperature)
            return F.cross_entropy(logits, everything.labels[batch]) + self.distillation_weight * told

        parameters = yield self.descending(download.task_parameters, len(everything.labels), rng, batch_loss)
        return self.chosen(state, data, parameters), TaskUpload(parameters, len(data.labels))

    def chosen(self, state: Exemplars, data: RoundData, parameters: Parameters) -> Exemplars:
        """Return the samples to keep: this round's classes chosen by the trained model, the others' cut short."""
        everything = state.joined(data)
        met = tuple(sorted({*state.met, *data.counts()}))
        share, model, now = max(1, self.buffer_size // len(met)), None, data.counts()
        images, labels = [], []
        for class_id in met:
            own = everything.images[everything.labels == class_id]
            if class_id in now:
                model = model or data_free.frozen_task_model(self.task, parameters)
                own = own[herded(_features(model, own), share).to(own.device)]
            images.append(own[:share])
            labels.append(torch.full((len(images[-1]),), class_id, dtype=torch.int64, device=own.device))
        chosen, named = (torch.cat(each)[: self.buffer_size] for each in (images, labels))
        return Exemplars({IMAGES: as_bytes(chosen), LABELS: named}, met)


@torch.no_grad()
def _features(model: Any, images: Tensor) -> Tensor:
    return F.normalize(torch.cat([model.features(part) for part in portions(images)]), dim=1)

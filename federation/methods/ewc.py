"""EWC in a federation: clients are held to the model of the task before, each parameter by its Fisher information.

Kirkpatrick et al. 2017, "Overcoming catastrophic forgetting in neural networks", Eq. 3, per client; the information of
several tasks is added up. With ``weighting = "even"`` every parameter counts alike: FedProx+ of MFCL (Babakniya et al.
2023, section 4.1).
Differences from the papers: ``docs/methods/ewc.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from replayfleet.federation.methods.fedcurv import diagonal_fisher
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.packing import CLASS_IDS, OneSet, Record
from replayfleet.federation.methods.kit.records import Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.task_model import loss_of
from replayfleet.federation.methods.task_method import AveragingMethod
from replayfleet.models.specs import TaskSpec

WEIGHTINGS = ("fisher", "even")
"""By what a parameter is held: its Fisher information, or like every other."""


@dataclass(frozen=True, slots=True)
class Consolidated(Record):
    """What a client remembers of earlier tasks; no sample.

    Attributes:
        anchor: the downloaded model with which this task began; empty in the first one.
        fisher: the information of the tasks before, by parameter name; empty in the first one.
        latest: that of the last round.
        met: classes that it met so far, in rising order.
    """

    anchor: Annotated[Parameters, OneSet("anchor")] = field(default_factory=dict)
    fisher: Annotated[Parameters, OneSet("fisher")] = field(default_factory=dict)
    latest: Annotated[Parameters, OneSet("latest")] = field(default_factory=dict)
    met: Annotated[tuple[int, ...], CLASS_IDS] = ()


def held_back(module: nn.Module, anchor: Parameters, fisher: Parameters) -> Tensor:
    """Return ``sum F (w - w_old)^2 / 2`` over a module's parameters (Eq. 3 without lambda); without F it is even.

    Returns:
        Scalar, differentiable with respect to the module's parameters.
    """
    parts = []
    for name, parameter in module.named_parameters():
        squared = (parameter - anchor[name]).square()
        parts.append((fisher[name] * squared if fisher else squared).sum())
    return torch.stack(parts).sum() / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class EWC(AveragingMethod):
    """The client's half and its settings; the aggregator's, and the other settings, are those of FedAvg.

    Attributes:
        importance: lambda.
        weighting: one of ``WEIGHTINGS``.
        fisher_cap: the most information that a parameter counts with.
        fisher_batch_size: samples of one gradient in ``diagonal_fisher``.
    """

    name: ClassVar[str] = "ewc"
    ClientState: ClassVar[type[Any]] = Consolidated

    task: TaskSpec
    importance: float = 1000.0
    weighting: str = "fisher"
    fisher_cap: float = 1e-4
    fisher_batch_size: int = 32

    def __post_init__(self) -> None:
        AveragingMethod.__post_init__(self)
        checks.within(0.0, math.inf, self, ["importance", "fisher_cap"])
        checks.one_of(WEIGHTINGS, self, "weighting")
        checks.at_least(1, self, ["fisher_batch_size"])

    def local_work(
        self, state: Consolidated, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[Consolidated, TaskUpload]]:
        """Minimise ``L(w) + lambda held_back`` (Eq. 3), then look how sharp the loss is on this round's samples."""
        counts, start = data.counts(), download.task_parameters
        anchor, fisher = state.anchor, state.fisher
        if state.met and not set(counts) <= set(state.met):  # a class never met before begins a new task
            anchor, fisher = start, self._added(state.fisher, state.latest)

        def batch_loss(module: nn.Module, batch: Tensor) -> Tensor:
            loss = loss_of(self.task, module, data.images[batch], data.labels[batch])
            return loss + self.importance * held_back(module, anchor, fisher) if anchor and self.importance else loss

        parameters = yield self.descending(start, len(data.labels), rng, batch_loss)
        latest: Parameters = {}
        if self.weighting == "fisher":
            latest = self._added(
                diagonal_fisher(self.task, parameters, data.images, data.labels, self.fisher_batch_size), {}
            )
        met = tuple(sorted({*state.met, *counts}))
        return Consolidated(anchor, fisher, latest, met), TaskUpload(parameters, len(data.labels))

    def _added(self, fisher: Parameters, latest: Parameters) -> Parameters:
        """Return the sum, no entry above the cap."""
        total = {name: tensor + latest[name] for name, tensor in fisher.items()} if fisher and latest else None
        return {name: tensor.clamp(max=self.fisher_cap) for name, tensor in (total or fisher or latest).items()}

"""FedProx: FedAvg with a proximal term that keeps clients near the average model.

Li et al. 2020, "Federated Optimization in Heterogeneous Networks", Algorithm 2. With ``mu = 0`` this is FedAvg.
Differences from the paper: ``docs/methods/fedprox.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.task_model import loss_of
from replayfleet.federation.methods.task_method import AveragingMethod


def squared_distance(module: nn.Module, reference: Parameters) -> Tensor:
    """Return ``|w - w_t|^2`` between a module's parameters and those of the same names in ``reference``.

    Returns:
        Scalar, differentiable with respect to the module's parameters.
    """
    parts = [(parameter - reference[name]).square().sum() for name, parameter in module.named_parameters()]
    return torch.stack(parts).sum()


DISTANCES = ("squared", "norm")
"""What mu weighs: the paper's squared distance, or the sum of the parameters' own distances, as in MFCL's code."""


def distance(module: nn.Module, reference: Parameters, kind: str) -> Tensor:
    """Return ``squared_distance``, or the sum over parameters of ``|w_j - w_t,j|``; ``kind`` is one of ``DISTANCES``.

    Where a parameter hasn't moved, its own distance has gradient 0.
    """
    if kind == "squared":
        return squared_distance(module, reference)
    parts = [torch.linalg.vector_norm(each - reference[name]) for name, each in module.named_parameters()]
    return torch.stack(parts).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class FedProx(AveragingMethod):
    """The client's half and its setting; the aggregator's, and the other settings, are those of FedAvg.

    Attributes:
        mu: weight of the proximal term; the paper tries 0.001, 0.01, 0.1 and 1. 0 is FedAvg.
        distance: one of ``DISTANCES``.
    """

    name: ClassVar[str] = "fedprox"

    mu: float = 0.01
    distance: str = "squared"

    def __post_init__(self) -> None:
        AveragingMethod.__post_init__(self)
        checks.within(0.0, math.inf, self, ["mu"])
        checks.one_of(DISTANCES, self, "distance")

    def local_work(
        self, state: NoState, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, TaskUpload]]:
        """Minimise ``F_k(w) + mu/2 |w - w_t|^2`` from ``w_t`` on this round's data alone (Eq. 2)."""
        start = download.task_parameters

        def batch_loss(module: nn.Module, batch: Tensor) -> Tensor:
            loss = loss_of(self.task, module, data.images[batch], data.labels[batch])
            held = self.mu / 2 * distance(module, start, self.distance) if self.mu > 0 else 0.0
            return loss + held  # h_k of Eq. 2

        parameters = yield self.descending(start, len(data.labels), rng, batch_loss)
        return state, TaskUpload(parameters, len(data.labels))

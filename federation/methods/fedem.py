"""FedEM: every client's data is a mixture of a few distributions, and each distribution has its learner.

Marfoq et al. 2021, "Federated Multi-Task Learning under a Mixture of Distributions", Algorithm 1.
Differences from the paper: ``docs/methods/fedem.md``.

The prediction mixes all learners, so no device serves it; only the simulator runs this method.

Axes: B batch, K classes, M learners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods import fedem_records as em
from replayfleet.federation.methods.kit import checks, packing
from replayfleet.federation.methods.kit.records import ClientId, Judge, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.methods.task_method import TaskMethod, in_order_with_shares
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.resnet import ResNet
from replayfleet.models.specs import TaskSpec


def responsibilities(losses: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the E-step: ``q_m(z) = pi_m exp(-loss_m) / sum_j pi_j exp(-loss_j)`` per sample.

    Args:
        losses: (M, B) each learner's cross-entropy on each sample.
        shares: M, pi; a learner with share 0 stays out, and so does one that diverged unless all have.

    Returns:
        (M, B) float64, columns sum to 1.
    """
    prior = torch.tensor(shares, dtype=torch.float64, device=losses.device).log()
    explained = losses.to(torch.float64).nan_to_num(torch.finfo(torch.float64).max)
    return torch.softmax(prior[:, None] - explained, dim=0)  # Algorithm 1, E-step


def mixture_logits(logits: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return ``log sum_m pi_m softmax(logits_m)``: what the mixture predicts, as logits.

    Args:
        logits: M tensors (B, K).
        shares: M, pi; what a learner with share 0 says is left out, and so is NaN, of one that diverged.
    """
    stacked = torch.stack(list(logits)).log_softmax(dim=2)  # (M, B, K)
    prior = torch.tensor(shares, dtype=stacked.dtype, device=stacked.device).log()[:, None, None]
    return torch.logsumexp((stacked + prior).nan_to_num(-torch.inf, neginf=-torch.inf), dim=0)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum_B weights * CE / B``: what an M-step descends.

    Args:
        logits: (B, K).
        labels: (B,) int64.
        weights: (B,) the learner's responsibilities.
    """
    return (weights * F.cross_entropy(logits, labels, reduction="none")).mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class FedEM(TaskMethod):
    """Both halves of the method; the other settings are those of ``TaskMethod``, for each learner.

    Attributes:
        num_learners: M, mixture components.
    """

    name: ClassVar[str] = "fedem"
    deployable: ClassVar[bool] = False
    Upload: ClassVar[type[Any]] = em.Upload
    Download: ClassVar[type[Any]] = em.Download
    AggregatorState: ClassVar[type[Any]] = em.AggregatorState

    task: TaskSpec
    num_learners: int = 3

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.at_least(1, self, ["num_learners"])

    def initial_download(self, rng: torch.Generator) -> em.Download:
        """Return M different random task models in equal shares."""
        learners = tuple(initialise(build_task_model(self.task), rng).state_dict() for _ in range(self.num_learners))
        return em.Download(learners, em.uniform_shares(self.num_learners))

    def download_for(self, state: em.AggregatorState, client_id: ClientId, initial: em.Download) -> em.Download:
        if not state.learners:
            return initial
        return em.Download(state.learners, state.clients.get(client_id) or em.uniform_shares(len(state.learners)))

    def upload_layout(self, name: str) -> Parameters | None:
        place = packing.place_of(em.Upload, name)
        return self.task_layout() if place and 0 <= place[1] < self.num_learners else None

    def check_upload(self, upload: em.Upload) -> None:
        TaskMethod.check_upload(self, upload)
        if len(upload.learners) != self.num_learners:
            raise ValueError(f"got {len(upload.learners)} learners, expected {self.num_learners}")
        em.check_shares(upload.shares, self.num_learners)

    def predictor(self, download: em.Download) -> Judge:
        judges = [judge_with(self.task, learner) for learner in download.learners]
        return lambda images: mixture_logits([judge(images) for judge in judges], download.shares)

    def local_work(
        self, state: NoState, data: RoundData, download: em.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, em.Upload]]:
        """Estimate responsibilities and pi, then train each learner on its share of every sample (Algorithm 1)."""
        judges = [judge_with(self.task, learner) for learner in download.learners]
        losses = [F.cross_entropy(judge(data.images), data.labels, reduction="none") for judge in judges]
        responsible = responsibilities(torch.stack(losses), download.shares)  # (M, B)
        shares = tuple(responsible.mean(dim=1).tolist())  # Algorithm 1, M-step: pi
        learners = []
        for learner, weights in zip(download.learners, responsible.to(torch.float32), strict=True):

            def m_step(module: ResNet, batch: Tensor, weights: Tensor = weights) -> Tensor:
                return weighted_cross_entropy(module(data.images[batch]), data.labels[batch], weights[batch])

            learners.append((yield self.descending(learner, len(data.labels), rng, m_step)))
        return state, em.Upload(tuple(learners), shares, len(data.labels))

    def aggregate(
        self,
        state: em.AggregatorState,
        uploads: Mapping[ClientId, em.Upload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[em.AggregatorState, dict[ClientId, em.Download]]:
        """Average each learner over the clients, by the number of samples behind each upload."""
        ordered, volumes = in_order_with_shares(uploads)
        learners = tuple(
            weighted_average(versions, volumes)
            for versions in zip(*(upload.learners for upload in ordered), strict=True)
        )
        latest = {client_id: upload.shares for client_id, upload in uploads.items()}
        clients = dict(sorted({**state.clients, **latest}.items()))
        return em.AggregatorState(learners, clients), {c: em.Download(learners, s) for c, s in clients.items()}

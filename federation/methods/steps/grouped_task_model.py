"""Training several clients' task models in one go, with the results of one by one.

The mathematics is that of ``task_model.train_task_model``, for N networks that run as one (``models.grouped_task``). A
GPU is idle between the calls of one small network; N of them in one call take hardly longer. Each network keeps its own
order of samples, statistics and gradients, so the results differ from one by one in rounding alone.

Axes: N networks, B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods.kit.each import by_groups
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.precision import computing_in
from replayfleet.federation.methods.steps.task_model import Alignment, Optimisation
from replayfleet.models import grouped
from replayfleet.models.build import build_task_model
from replayfleet.models.grouped_task import task_logits
from replayfleet.models.specs import TaskSpec


@dataclass(frozen=True, slots=True)
class TaskModelJob:
    """One task model to train; see ``task_model.train_task_model``.

    Attributes:
        start: parameters where training starts, left untouched.
        images: (B, C, H, W) float32 in [-1, 1], at least two.
        labels: (B,) int64; for detection, which is trained one by one, (B, M, 5) float32.
        rng: draws the order of samples.
        alignment: second term of Eq. 2 of pFedGRP.
        prior: (K,) added to the logits that the cross-entropy sees; None for nothing.
    """

    start: Parameters
    images: Tensor
    labels: Tensor
    rng: torch.Generator
    alignment: Alignment | None = None
    prior: Tensor | None = None


def train_task_models(
    spec: TaskSpec, jobs: Sequence[TaskModelJob], optimisation: Optimisation
) -> list[dict[str, Tensor]]:
    """Return the parameters after training, in the order of the jobs.

    Jobs with equally many samples run together; others would need batches of different sizes.

    Raises:
        ValueError: A job has fewer than two samples, which BatchNorm can't be trained on.
    """
    short = [len(job.images) for job in jobs if len(job.images) < 2]
    if short:
        raise ValueError(f"training needs at least 2 samples, got {short[0]}")
    return by_groups(jobs, lambda job: len(job.images), lambda alike: _train_together(spec, alike, optimisation))


def _train_together(
    spec: TaskSpec, jobs: Sequence[TaskModelJob], optimisation: Optimisation
) -> list[dict[str, Tensor]]:
    device = jobs[0].images.device
    module = build_task_model(spec, device="meta")
    learnt_names = {name for name, _ in module.named_parameters()}
    joined = {
        name: _own(tensor.detach().to(device), requires_grad=name in learnt_names)
        for name, tensor in grouped.join([job.start for job in jobs]).items()
    }
    optimiser = torch.optim.SGD(
        [joined[name] for name in joined if name in learnt_names],
        lr=optimisation.learning_rate,
        momentum=optimisation.momentum,
        weight_decay=optimisation.weight_decay,
    )
    for epoch in range(optimisation.num_epochs):
        optimisation.begin(epoch, optimiser)
        orders = [torch.randperm(len(job.images), generator=job.rng).to(device) for job in jobs]
        for batches in zip(*(order.split(optimisation.batch_size) for order in orders), strict=True):
            if len(batches[0]) < 2:
                continue
            images = torch.cat([job.images[batch] for job, batch in zip(jobs, batches, strict=True)], dim=1)
            with computing_in(optimisation.precision, device):
                logits = task_logits(module, joined, len(jobs), images.contiguous(memory_format=torch.channels_last))
                losses = [
                    _loss(job, batch, logits[:, n]) for n, (job, batch) in enumerate(zip(jobs, batches, strict=True))
                ]
            optimiser.zero_grad(set_to_none=True)
            torch.stack(losses).sum().backward()
            optimiser.step()
    return [grouped.part(joined, index, job.start) for index, job in enumerate(jobs)]


def _loss(job: TaskModelJob, batch: Tensor, logits: Tensor) -> Tensor:
    """Return Eq. 2 of one network, as ``task_model.aligned_loss``; ``logits``: (B, K)."""
    labels = job.labels[batch]
    loss = F.cross_entropy(logits if job.prior is None else logits + job.prior, labels)
    if job.alignment is None or job.alignment.weight == 0.0:
        return loss
    squares = (logits - job.alignment.logits[batch]).square().mean(dim=1)
    distance = torch.where(job.alignment.mask[batch], squares, 0.0).sum()  # no branch: a GPU would have to wait
    return loss + job.alignment.weight * distance / len(labels)  # Eq. 2


def _own(tensor: Tensor, *, requires_grad: bool) -> Tensor:
    copy = tensor.clone()
    if copy.ndim == 4:
        copy = copy.contiguous(memory_format=torch.channels_last)
    return copy.requires_grad_(requires_grad)

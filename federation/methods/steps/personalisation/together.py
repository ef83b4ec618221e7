"""Eq. 3 for several clients at once, with the results of one by one.

The mathematics is that of ``personalise.personalised_weights``, for M clients whose mixed models run as one (vmap). A
GPU is idle between the calls of one small network; M of them in one call take hardly longer. Each client keeps its own
order of samples, its own end and its own gradient, so the results differ from one by one in rounding alone.

Axes: M clients that are mixed for, N models that each mixes, B batch, K classes, S steps, P entries of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

from replayfleet.federation.methods.steps.averaging import project_to_simplex
from replayfleet.federation.methods.steps.personalisation.personalise import (
    MIN_IMPROVEMENT,
    TAIL_EPOCHS,
    Mixture,
    StackedParameters,
    WeightSearch,
    best_of,
)
from replayfleet.federation.methods.steps.precision import computing_in
from replayfleet.federation.methods.steps.replay import Replay
from replayfleet.federation.methods.steps.task_model import portions
from replayfleet.models.folding import folded
from replayfleet.models.specs import TaskSpec


@dataclass(frozen=True, slots=True)
class MixtureJob:
    """One client to find a mixture for; see ``personalise.personalised_weights``.

    Attributes:
        members: the N models to mix.
        own_index: which of them is the client's own.
        replay: labelled images that stand for its distribution, at least one.
        rng: draws the order of samples.
    """

    members: StackedParameters
    own_index: int
    replay: Replay
    rng: torch.Generator


def mixtures_together(spec: TaskSpec, jobs: Sequence[MixtureJob], search: WeightSearch) -> list[Mixture]:
    """Return the mixture of each job; all have equally many members and samples.

    Raises:
        ValueError: A replay is empty.
    """
    if len(jobs[0].replay.labels) == 0:
        raise ValueError("personalised weights need at least one replayed sample")
    clients = _Clients(spec, jobs)
    num_samples, num_sets = len(jobs[0].replay.labels), len(jobs[0].members)
    weights = clients.uniform
    velocity, best, idle = (
        torch.zeros_like(weights),
        torch.full_like(weights[:, 0], math.inf),
        weights.new_zeros(len(jobs)),
    )
    going, taken = torch.ones_like(idle, dtype=torch.bool), torch.zeros_like(idle)
    trail: list[Tensor] = []
    for _ in range(search.num_epochs if num_sets > 1 else 0):
        total = torch.zeros_like(best)
        orders = torch.stack([torch.randperm(num_samples, generator=job.rng) for job in jobs])
        for batch in orders.to(weights.device).split(search.batch_size, dim=1):
            variable = weights.clone().requires_grad_(True)
            losses = clients.losses(variable, batch, search.precision)
            (gradient,) = torch.autograd.grad(losses.sum(), variable)
            velocity = search.momentum * velocity + gradient
            point = weights - search.learning_rate * velocity
            going = going & point.isfinite().all(dim=1)
            total += losses.detach() * batch.shape[1]
            ahead = torch.where(going[:, None], point, weights)
            weights = torch.where(going[:, None], project_to_simplex(ahead), weights)  # Eq. 3: w >= 0, sum w = 1
            trail.append(weights)
            taken += going
        idle = torch.where(total < best * (1 - MIN_IMPROVEMENT), 0, idle + 1)
        best = torch.minimum(best, total)
        if search.patience:
            going = going & (idle < search.patience)
        if not bool(going.any()):  # the one thing in an epoch that a GPU is waited for
            break
    tail = TAIL_EPOCHS * math.ceil(num_samples / search.batch_size)
    points = torch.stack([_mean_of_last(trail, taken, tail, clients.uniform), clients.own, clients.uniform], dim=1)
    whole = torch.stack([clients.total_losses(points[:, place]) for place in range(points.shape[1])], dim=1)
    return [best_of(own_points, own) for own_points, own in zip(points.cpu(), whole.tolist(), strict=True)]


class _Clients:
    """The models and replays of M clients as one."""

    def __init__(self, spec: TaskSpec, jobs: Sequence[MixtureJob]) -> None:
        first = jobs[0].members
        alike = all(job.members is first for job in jobs)
        self._matrices = first.matrix if alike else _stack([job.members for job in jobs])
        self._members = first
        self._images = torch.stack([job.replay.images for job in jobs])
        self._labels = torch.stack([job.replay.labels for job in jobs])
        self._places = torch.arange(len(jobs), device=self._images.device)[:, None]
        self._module, self._parameters_of = folded(spec)
        shape = (len(jobs), len(first))
        self.uniform = self._matrices.new_full(shape, 1 / len(first))
        self.own = F.one_hot(torch.tensor([job.own_index for job in jobs]), len(first)).to(self.uniform)

    def losses(self, weights: Tensor, batch: Tensor, precision: str = "float32") -> Tensor:
        """Return each client's cross-entropy of its mixed model, (M,), on its samples ``batch``, (M, B)."""

        def loss_of(flat: Tensor, images: Tensor, labels: Tensor) -> Tensor:
            mixed = self._parameters_of({**self._members.integers, **self._members.named(flat)})
            with computing_in(precision, images.device, vmapped=True):
                logits = functional_call(self._module, mixed, (images,))  # f(sum_u w_u theta_u; x)
                return F.cross_entropy(logits, labels)

        flat = (weights[:, None] @ self._matrices)[:, 0]
        found: Tensor = vmap(loss_of)(flat, self._images[self._places, batch], self._labels[self._places, batch])
        return found

    @torch.no_grad()
    def total_losses(self, weights: Tensor) -> Tensor:
        """Return each client's mean loss on its whole replay, (M,)."""
        everything = torch.arange(self._labels.shape[1], device=weights.device)
        parts = [part.expand(len(weights), -1) for part in portions(everything)]
        sums = [self.losses(weights, part) * part.shape[1] for part in parts]
        return torch.stack(sums).sum(dim=0) / len(everything)


def _stack(members: Sequence[StackedParameters]) -> Tensor:
    """Return all their matrices, (M, N, P), of which one at a time is held twice."""
    first = members[0].rows()
    stacked = first.new_empty(len(members), *first.shape)
    for place, one in enumerate(members):
        stacked[place] = first if place == 0 else one.rows()
    return stacked


def _mean_of_last(trail: Sequence[Tensor], taken: Tensor, tail: int, otherwise: Tensor) -> Tensor:
    """Return the mean of each client's last ``tail`` points among those that it took, (M, N)."""
    if not trail:
        return otherwise
    steps = torch.arange(len(trail), device=taken.device)[:, None]
    counts = (steps < taken) & (steps >= taken - tail)  # (S, M)
    mean = (torch.stack(list(trail)) * counts[:, :, None]).sum(dim=0) / counts.sum(dim=0)[:, None].clamp_min(1)
    return torch.where(taken[:, None] > 0, mean, otherwise)

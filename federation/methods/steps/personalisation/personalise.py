"""Personalised aggregation: one set of mixing weights per client (Eq. 3 of pFedGRP).

Axes: N clients that mix, M clients that are mixed for, B batch, K classes, P entries of all floating tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.averaging import check_equal_layouts, project_to_simplex
from replayfleet.federation.methods.steps.precision import computing_in
from replayfleet.federation.methods.steps.replay import Replay
from replayfleet.federation.methods.steps.task_model import portions
from replayfleet.models.folding import folded
from replayfleet.models.specs import TaskSpec

MIN_IMPROVEMENT = 0.01
"""Share of the best epoch's loss by which an epoch must be better to count as progress."""

CANDIDATES = ("optimised", "own", "average")
"""Where the descent ended, a client's own model and everybody's average: the best of them is the answer."""

TAIL_EPOCHS = 3
"""Epochs at the descent's end whose points are averaged: one mini-batch's noise weighs less in their mean."""


class StackedParameters:
    """N parameter sets as one (N, P) matrix, so that mixing them is one product with the weights.

    The matrix is made when it is asked for: of a thousand sets a few are mixed at a time. Integer buffers have no place
    in a mixture.

    Attributes:
        integers: those of the first set, by name.

    Raises:
        ValueError: The sets disagree on keys, shapes or dtypes.
    """

    def __init__(self, parameter_sets: Sequence[Parameters]) -> None:
        check_equal_layouts(parameter_sets)
        first = parameter_sets[0]
        self._shapes = {name: tensor.shape for name, tensor in first.items() if tensor.is_floating_point()}
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self._sets = parameter_sets
        self.integers = {name: tensor for name, tensor in first.items() if name not in self._shapes}

    def __len__(self) -> int:
        return len(self._sets)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the matrix out: another process makes its own of the sets."""
        return {name: value for name, value in vars(self).items() if name != "matrix"}

    @property
    def num_bytes(self) -> int:
        """Of a row of the matrix."""
        return 4 * sum(self._sizes)

    @functools.cached_property
    def matrix(self) -> Tensor:
        return self.rows()

    def rows(self) -> Tensor:
        """Return the matrix, made anew."""
        return torch.stack([torch.cat([own[name].flatten() for name in self._shapes]) for own in self._sets])

    def only(self, places: Sequence[int]) -> StackedParameters:
        """Return those of these places; itself, if they are all."""
        return self if len(places) == len(self) else StackedParameters([self._sets[place] for place in places])

    def mix(self, weights: Tensor) -> dict[str, Tensor]:
        """Return ``sum_n weights[n] * parameters[n]`` as views of one vector; differentiable. ``weights``: (N,)."""
        return self.named(weights @ self.matrix)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return one row of the matrix, or a mixture of rows, as parameters: views of it. ``flat``: (P,)."""
        pieces = flat.split(self._sizes)
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSearch:
    """Projected gradient descent with momentum on the simplex.

    Attributes:
        num_epochs: passes over a client's replay.
        batch_size: samples per step.
        learning_rate: step size on the weights.
        momentum: of the step.
        patience: stop after this many epochs in a row without ``MIN_IMPROVEMENT``; 0 runs all epochs.
        precision: of the descent, one of ``precision.PRECISIONS``; candidates are compared in float32 always.
    """

    num_epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    patience: int = 0
    precision: str = "float32"


@dataclass(frozen=True, slots=True)
class Mixture:
    """The outcome of Eq. 3 for one client.

    Attributes:
        weights: (N,) float32, non-negative, summing to 1; on the CPU.
        loss: cross-entropy of the mixed model on the whole replay.
        chosen: which candidate won: ``optimised``, ``own`` or ``average``.
    """

    weights: Tensor
    loss: float
    chosen: str


def personalised_weights(
    spec: TaskSpec,
    stacked: StackedParameters,
    own_index: int,
    replay: Replay,
    search: WeightSearch,
    rng: torch.Generator,
) -> Mixture:
    """Return the weights on the simplex that minimise the task loss of the mixed parameters on one client's replay.

    ``argmin_w  sum_(x,y) CE(f(sum_u w_u theta_u; x), y)`` subject to ``w >= 0, sum w = 1`` (Eq. 3), by projected
    gradient descent from the uniform weights. BatchNorm statistics are mixed with the same weights and the model
    is evaluated in eval mode. The descent takes mini-batches, so its last point need not be its best: the answer is the
    point of least loss on the whole replay among the mean of its last ``TAIL_EPOCHS`` epochs (Polyak and Juditsky 1992,
    "Acceleration of Stochastic Approximation by Averaging"), the client's own model and the average. A step that
    isn't finite, from a model or replay that isn't or that answers with huge numbers, ends the descent.

    Args:
        spec: the task.
        stacked: the N models to mix.
        own_index: which of them is the client's own.
        replay: labelled images that stand for the client's distribution.
        search: length and step size of the descent.
        rng: draws the order of samples.

    Raises:
        ValueError: The replay is empty.
    """
    if len(replay.labels) == 0:
        raise ValueError("personalised weights need at least one replayed sample")
    module, parameters_of = folded(spec)
    num_sets, device = len(stacked.matrix), stacked.matrix.device

    def loss_of(weights: Tensor, images: Tensor, labels: Tensor, precision: str = "float32") -> Tensor:
        mixed = parameters_of({**stacked.integers, **stacked.mix(weights)})
        with computing_in(precision, device):
            logits = functional_call(module, mixed, (images,))  # f(sum_u w_u theta_u; x)
            return F.cross_entropy(logits, labels)

    images = _channels_last(replay.images)
    uniform = torch.full((num_sets,), 1 / num_sets, device=device)
    weights, velocity = uniform.clone(), torch.zeros_like(uniform)
    trail: list[Tensor] = []
    best, epochs_without_progress = math.inf, 0
    for _ in range(search.num_epochs if num_sets > 1 else 0):
        total = 0.0
        for batch in torch.randperm(len(replay.labels), generator=rng).to(device).split(search.batch_size):
            variable = weights.clone().requires_grad_(True)
            loss = loss_of(variable, images[batch], replay.labels[batch], search.precision)
            (gradient,) = torch.autograd.grad(loss, variable)
            velocity = search.momentum * velocity + gradient
            point = weights - search.learning_rate * velocity
            if not bool(point.isfinite().all()):
                total = math.nan
                break
            total += loss.item() * len(batch)
            weights = project_to_simplex(point)  # Eq. 3: w >= 0, sum w = 1
            trail.append(weights)
        if math.isnan(total):
            break
        epochs_without_progress = 0 if total < best * (1 - MIN_IMPROVEMENT) else epochs_without_progress + 1
        best = min(best, total)
        if epochs_without_progress == search.patience > 0:
            break
    own = F.one_hot(torch.tensor(own_index), num_sets).to(uniform)
    tail = TAIL_EPOCHS * math.ceil(len(replay.labels) / search.batch_size)
    optimised = torch.stack(trail[-tail:]).mean(dim=0) if trail else uniform
    points = (optimised, own, uniform)
    return best_of([point.cpu() for point in points], [_total_loss(loss_of, point, replay) for point in points])


def best_of(points: Iterable[Tensor], losses: Sequence[float]) -> Mixture:
    """Return the best of ``CANDIDATES``, from the weights and the loss of each."""
    found = (Mixture(weights, loss, name) for weights, loss, name in zip(points, losses, CANDIDATES, strict=True))
    return min(found, key=lambda one: (not math.isfinite(one.loss), one.loss))


def _channels_last(images: Tensor) -> Tensor:
    """Return (B, C, H, W) laid out channels last, those of one channel too: all layers then keep to it."""
    return images.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


@torch.no_grad()
def _total_loss(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], weights: Tensor, replay: Replay) -> float:
    total = 0.0
    pairs = zip(portions(replay.images), portions(replay.labels), strict=True)
    for images, labels in pairs:
        total += float(loss_of(weights, images, labels)) * len(labels)
    return total / len(replay.labels)

"""Which of several models a client would serve by its own evidence: labelled samples held out, and replay.

Axes: N samples of evidence, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.models.specs import TaskSpec

CLEAR = 1.0
"""Standard errors that a gain must exceed before a model is swapped."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a client can judge models on.

    Attributes:
        images: (N, C, H, W), real ones that nothing was trained on and replayed ones.
        labels: (N,) int64.
        seen: class id -> samples met so far: what a class counts for.
    """

    images: Tensor
    labels: Tensor
    seen: Mapping[int, int]

    def weights(self) -> Tensor:
        """Return what each sample counts for, (N,) float64 that sum to 1; a class without evidence has no part."""
        counts = torch.bincount(self.labels, minlength=max(self.seen) + 1)
        shares = torch.zeros(len(counts), dtype=torch.float64)
        for class_id, count in self.seen.items():
            shares[class_id] = count if counts[class_id] else 0
        shares = shares / shares.sum()
        return (shares / counts.clamp(min=1))[self.labels]


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, and why.

    Attributes:
        name: of the candidate.
        scores: candidate -> share of the evidence that it answers rightly, classes weighted by what was seen of them.
        gain: score of the best less that of the one served before.
        error: standard error of that gain.
    """

    name: str
    scores: Mapping[str, float]
    gain: float
    error: float


def best_served(spec: TaskSpec, candidates: Mapping[str, Parameters], before: str, evidence: Evidence) -> Served:
    """Return the best candidate, or ``before``, the one that is served, if no other is clearly better.

    Raises:
        ValueError: There is no evidence, or ``before`` is no candidate.
    """
    if not len(evidence.labels) or before not in candidates:
        raise ValueError(f"{before!r} of {sorted(candidates)} on {len(evidence.labels)} samples, expected some of both")
    weights = evidence.weights()
    right = {
        name: (judge_with(spec, parameters)(evidence.images).argmax(dim=1) == evidence.labels).to(torch.float64)
        for name, parameters in candidates.items()
    }
    scores = {name: float((weights * own).sum()) for name, own in right.items()}
    best = max(candidates, key=lambda name: (scores[name], name == before))  # of equally good ones the first
    apart = right[best] - right[before]
    gain = float((weights * apart).sum())
    error = math.sqrt(float((weights.square() * (apart - apart.mean()).square()).sum()))
    return Served(best if gain > CLEAR * error else before, scores, gain, error)

"""Points on the probability simplex."""

from __future__ import annotations

import torch
from torch import Tensor


def project_to_simplex(points: Tensor) -> Tensor:
    """Return the nearest points (Euclidean) with non-negative entries that sum to 1, row by row.

    Duchi et al. 2008, "Efficient Projections onto the l1-Ball", Algorithm 1: sort, find the threshold, clip.

    Args:
        points: (..., N), finite.
    """
    ordered, _ = points.sort(dim=-1, descending=True)
    excess = ordered.cumsum(dim=-1) - 1
    ranks = torch.arange(1, points.shape[-1] + 1, device=points.device, dtype=points.dtype)
    support = (ordered - excess / ranks > 0).sum(dim=-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support.to(points.dtype)
    return (points - threshold).clamp_min(0)

"""What a client of class-incremental learning descends: this round's classes, and what the model before it knew.

Axes: B batch, K classes, D features.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional as F

LOGITS = ("split", "all")
"""How the head is used where all K logits exist from the start.

``split``, the papers' way for a head that grows: cross-entropy of real samples leaves out the logits of absent classes,
distillation takes those of seen classes alone. ``all``: every logit takes part in both, so that old and new classes
are compared on real and on synthetic images.
"""


def absent_classes(seen: Collection[int], now: Collection[int], logits: str = "split") -> tuple[int, ...]:
    """Return the classes that were met before this round and that the round's own data lack, in rising order.

    Args:
        seen: classes that any client met in earlier rounds.
        now: classes of this client's round.
        logits: one of ``LOGITS``; with ``all`` no class counts as absent.
    """
    return tuple(sorted(set(seen) - set(now))) if logits == "split" else ()


def distilled_classes(seen: Collection[int], num_classes: int, logits: str = "split") -> tuple[int, ...]:
    """Return the classes whose logits are distilled: those seen, or with ``logits = "all"`` all ``num_classes``."""
    return tuple(sorted(seen)) if logits == "split" else tuple(range(num_classes))


def current_loss(logits: Tensor, labels: Tensor, absent: Collection[int]) -> Tensor:
    """Return cross-entropy in which the logits of ``absent`` classes take no part.

    Real samples of this round then can't push down classes of which it has none. With nothing absent it is plain
    cross-entropy.

    Args:
        logits: (B, K).
        labels: (B,) int64, none of them absent.
        absent: class ids.
    """
    if not absent:
        return F.cross_entropy(logits, labels)
    hidden = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    hidden[list(absent)] = True
    return F.cross_entropy(logits.masked_fill(hidden, -torch.inf), labels)


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return ``-mean_B sum_K softmax(teacher / T) log softmax(student / T)``, without the factor ``T^2``.

    Args:
        student: (B, K) logits.
        teacher: (B, K) logits.
        temperature: T.
    """
    targets = (teacher / temperature).softmax(dim=1)
    return -(targets * (student / temperature).log_softmax(dim=1)).sum(dim=1).mean()


def head_weighted_distance(features: Tensor, earlier: Tensor, head: Tensor) -> Tensor:
    """Return ``mean_B |W f - W f_old|^2 / K``: features may move where the old head doesn't look (MFCL's Eq. 8).

    Args:
        features: (B, D) of the model in training.
        earlier: (B, D) of the model before.
        head: (K, D), the earlier model's rows of the K classes met so far.
    """
    return ((features - earlier) @ head.T).square().sum(dim=1).mean() / len(head)

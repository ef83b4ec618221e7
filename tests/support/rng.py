"""Random numbers of tests."""

from __future__ import annotations

import torch


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

"""Which of a round's samples a client keeps from training, to judge models by. Needs NumPy only, as a device has."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

ONE_OF = 10
"""Samples of which one is held out."""


def held_out(labels: NDArray[Any], run_seed: int, round_index: int, client_id: str) -> NDArray[np.bool_]:
    """Return which samples are held out, (N,), of each class about as many; equal arguments give equal samples.

    Args:
        labels: (N,) class ids.
        run_seed: of the fleet.
        round_index: which round.
        client_id: whose samples.
    """
    seed = hashlib.sha256(f"{run_seed}/{round_index}/{client_id}/held-out".encode()).digest()
    order = np.random.default_rng(int.from_bytes(seed[:8], "big")).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    chosen = np.zeros(len(labels), dtype=np.bool_)
    chosen[by_class[ONE_OF - 1 :: ONE_OF]] = True
    return chosen

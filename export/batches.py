"""How many inputs at once an export is tried with: of large pictures few, for many would take gigabytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

BATCHES = (1, 2, 64)

_MAX_VALUES = 2**24
"""Of one batch: 13 pictures of 640 x 640 in colour. A detector's first layers take ten times as much."""


def batches_for(input_shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``BATCHES``, without those too large for inputs of this shape; two at once are always among them."""
    most = max(2, _MAX_VALUES // max(1, math.prod(input_shape)))
    return tuple(sorted({min(size, most) for size in BATCHES}))

"""Arrays that were rounded to whole steps from others, or to float16."""

from __future__ import annotations

from typing import Any

import numpy as np

from replayfleet.federation.wire.protocol.packed import counted, from_steps
from replayfleet.federation.wire.protocol.tensors import encode_arrays

Arrays = dict[str, "np.ndarray[Any, Any]"]


def some_arrays(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": rng.normal(size=(16, 8, 3, 3)).astype(np.float32),
        "norm.running_var": rng.uniform(1e-3, 1, 16).astype(np.float32),
        "norm.num_batches_tracked": np.array(7 + seed, np.int64),
        "head.weight": rng.normal(size=(10, 16)).astype(np.float32),
    }


def a_difference(seed: int = 1) -> tuple[bytes, bytes, dict[str, float]]:
    """Return (a blob, its base, the steps of its matrices)."""
    base, changes = some_arrays(), some_arrays(seed)
    made, steps = dict(changes), {}
    for name in ("conv.weight", "head.weight"):
        exact = base[name] + np.float32(0.01) * changes[name]
        steps[name], counts = counted(exact, base[name])
        made[name] = from_steps(base[name], steps[name], counts)
    return encode_arrays(made), encode_arrays(base), steps


def halves(seed: int = 2) -> bytes:
    """Return a blob all of whose floats are float16's."""
    return encode_arrays(
        {
            name: array.astype(np.float16).astype(np.float32) if array.dtype == np.float32 else array
            for name, array in some_arrays(seed).items()
        }
    )

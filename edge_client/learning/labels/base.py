"""What every source of labels offers.

Axes: B inputs of one picture.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Shown

UNKNOWN = -1
"""In the place of a class id: nobody knows, so it isn't trained on."""


class Labeller(Protocol):
    """Says what the inputs of a picture show."""

    def labels(self, shown: Shown) -> NDArray[np.int64]:
        """Return (B,) class ids of the task, ``UNKNOWN`` where there is no telling."""


def unknown(shown: Shown) -> NDArray[np.int64]:
    """Return "no telling" for every input of a picture."""
    return np.full(len(shown.inputs.images), UNKNOWN, np.int64)

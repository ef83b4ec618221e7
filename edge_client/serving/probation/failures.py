"""What happens to a frame that the served model failed on: asked again, or the model is rolled back."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.serving.slot import ModelLost, ModelSlot, ServedModel
from replayfleet.federation.errors import Reason
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

FAILURES_BEFORE_ROLLBACK = 3
"""Frames in a row that a model may fail on before the previous one takes over; on probation, frames in all."""

DEATHS_BEFORE_ROLLBACK = 3
"""Deaths of its process within ``DEATHS_WITHIN_S`` that a confirmed model survives, the last one not."""
DEATHS_WITHIN_S = 60.0

STARVED_S = 300.0
"""So long a model on probation may find no memory for frames that its predecessor answers: what else needs it for a
while has ended by then, and the probation hasn't."""


class Failures:
    """Counts what goes wrong; used by the serving thread alone.

    Args:
        slot: whose active model fails.
        clock: ``time.monotonic``.
    """

    def __init__(self, slot: ModelSlot, clock: Callable[[], float] = time.monotonic) -> None:
        self._slot = slot
        self._clock = clock
        self._version = -1
        self._in_a_row = self._in_all = 0
        self._told = False  # one line for frames that fail in a row
        self._starved_at = math.inf  # when it found no memory first since it answered
        self._deaths: collections.deque[float] = collections.deque(maxlen=DEATHS_BEFORE_ROLLBACK)

    def answered(self, served: ServedModel) -> None:
        """Take who answered a frame: the active model, or the one before it in its place."""
        self._in_a_row = 0
        self._told = False
        trial = self._slot.on_probation
        if trial is None or trial is served:
            self._starved_at = math.inf
        elif trial.version == self._version and self._clock() - self._starved_at >= STARVED_S:
            why = f"in {STARVED_S:.0f} s it found no memory for frames that its predecessor answered"
            self._roll_back(trial, Reason.FAILING, MemoryError(why))

    def next_after(
        self, served: ServedModel, error: Exception, outputs: NDArray[np.float32] | None
    ) -> ServedModel | None:
        """Return who is to answer the frame instead, perhaps the same model again; None if the frame failed.

        Args:
            served: what failed.
            error: how.
            outputs: what it said, if it said something.
        """
        active, successor = self._slot.active, None
        if isinstance(error, OSError):  # no process or no memory is to be had, which may be no model's doing
            if self._slot.on_probation is served:
                self._meet(served)
                self._starved_at = min(self._starved_at, self._clock())
                successor = self._slot.previous  # its process is there
        elif active is not served:
            return active  # swapped in the middle of this frame
        else:
            self._meet(served)
            self._in_a_row += 1
            self._in_all += 1
            successor = self._successor(served, error, outputs)
        if successor is None and not self._told:
            self._told = True
            log.warning("frame failed", version=served.version, error=error)
        return successor

    def _successor(
        self, served: ServedModel, error: Exception, outputs: NDArray[np.float32] | None
    ) -> ServedModel | None:
        on_probation = self._slot.on_probation is served
        if isinstance(error, ModelLost):
            return self._after_a_loss(served, error, on_probation)
        if on_probation and outputs is not None and not np.isfinite(outputs).all():
            return self._roll_back(served, Reason.NOT_FINITE, error)
        if (self._in_all if on_probation else self._in_a_row) >= FAILURES_BEFORE_ROLLBACK:
            return self._roll_back(served, Reason.FAILING, error)
        return None

    def _meet(self, served: ServedModel) -> None:
        if served.version != self._version:
            self._version, self._in_a_row, self._in_all, self._told = served.version, 0, 0, False
            self._deaths.clear()
            self._starved_at = math.inf

    def _after_a_loss(self, served: ServedModel, error: ModelLost, on_probation: bool) -> ServedModel | None:
        """On probation one loss is too many. Later, a new process of the same model is asked first."""
        now = self._clock()
        self._deaths.append(now)
        often = len(self._deaths) == DEATHS_BEFORE_ROLLBACK and now - self._deaths[0] <= DEATHS_WITHIN_S
        if on_probation or often:
            back = self._roll_back(served, Reason.HUNG if error.hung else Reason.CRASHED, error)
            if back is not None:
                return back
        return served if self._in_a_row == 1 else None

    def _roll_back(self, served: ServedModel, reason: Reason, error: Exception) -> ServedModel | None:
        back = self._slot.roll_back(served.version, reason, " ".join(str(error).split())[:300])
        if back is not None:
            self._in_a_row = 0
        return back

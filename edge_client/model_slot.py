"""The model that serves frames, and how another takes its place while frames flow.

load -> warm up -> probe against the manifest's golden vector -> swap one reference -> keep the previous -> roll back.
Whoever answers a frame reads ``active`` once, so every answer comes from exactly one version.

Axes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from federation.errors import ArtefactRejected, Reason

Model: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""(B, C, H, W) float32 in [-1, 1] -> logits (B, K) float32; safe to call from several threads."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A verified download that wants to be served.

    Attributes:
        version: of its manifest.
        round: of its manifest.
        image_shape: (C, H, W) of a frame.
        load: builds the model; slow, and may raise anything.
        check: raises ArtefactRejected unless the model reproduces the manifest's golden vector.
    """

    version: int
    round: int
    image_shape: tuple[int, ...]
    load: Callable[[], Model]
    check: Callable[[Model], object]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that passed its probe.

    Attributes:
        version: of its manifest.
        round: of its manifest.
        model: what answers.
        prove: warms another runtime of the same version up and checks it; raises ArtefactRejected.
    """

    version: int
    round: int
    model: Model
    prove: Callable[[Model], object] = field(repr=False, compare=False, default=lambda model: None)


class ModelSlot:
    """One active model, the one before it, and the rule that versions only rise.

    ``active`` may be read from any thread; changes are serialised.
    """

    def __init__(self) -> None:
        self._active: ServedModel | None = None
        self._previous: ServedModel | None = None
        self._newest_seen = -1
        self._changing = threading.Lock()
        self.num_swaps = 0
        self.num_rollbacks = 0

    @property
    def active(self) -> ServedModel | None:
        """The model that answers frames now; None before the first."""
        return self._active

    @property
    def previous(self) -> ServedModel | None:
        """The model that ``roll_back`` returns to."""
        return self._previous

    def install(self, candidate: Candidate) -> ServedModel:
        """Serve the candidate from the next frame on; the active model answers until it passed every check.

        Installing the active version again changes nothing.

        Raises:
            ArtefactRejected: Older than, or rolled back as, a version this slot has seen; doesn't load; or doesn't
                reproduce the golden vector. The active model stays.
        """
        with self._changing:
            active = self._active
            if active is not None and active.version == candidate.version:
                return active
            if candidate.version <= self._newest_seen:
                serving = "nothing" if active is None else f"version {active.version}"
                raise ArtefactRejected(
                    Reason.STALE_VERSION,
                    f"version {candidate.version} is not newer than {self._newest_seen}; still serving {serving}",
                )
            fresh = _proven(candidate)
            self._previous, self._active = active, fresh
            self._newest_seen = candidate.version
            self.num_swaps += 1
            return fresh

    def upgrade(self, version: int, model: Model) -> bool:
        """Let another runtime of the active version answer from the next frame on. Not a swap: the answers stay.

        Args:
            version: which version ``model`` runs.
            model: say, an engine that was built while a slower runtime served.

        Returns:
            Whether it serves; False if ``version`` isn't active (any more), or isn't when the checks are through.

        Raises:
            ArtefactRejected: ``model`` fails, or doesn't reproduce the golden vector. The active model stays.
        """
        active = self._active
        if active is None or active.version != version:
            return False
        _checked(version, lambda: active.prove(model))  # without the lock: a roll-back waits for nobody's engine
        with self._changing:
            if self._active is None or self._active.version != version:
                return False
            self._active = replace(self._active, model=model)
            return True

    def roll_back(self, failed_version: int) -> ServedModel | None:
        """Return to the previous model, for good: the failed version isn't installed again.

        Returns:
            The model that serves now, or None if ``failed_version`` isn't active or nothing precedes it.
        """
        with self._changing:
            if self._active is None or self._active.version != failed_version or self._previous is None:
                return None
            self._active, self._previous = self._previous, None
            self.num_rollbacks += 1
            return self._active

    def clear(self) -> None:
        """Serve nothing: the fleet agreed on another task. Versions still only rise."""
        with self._changing:
            self._active = self._previous = None


def _proven(candidate: Candidate) -> ServedModel:
    """Build the model and prove it; the proof is kept for other runtimes of the same version."""

    def prove(model: Model) -> None:
        """Warm up at batch 1, the size that frames come in, and compare with the golden vector."""
        model(np.zeros((1, *candidate.image_shape), np.float32))
        candidate.check(model)

    def build() -> Model:
        model = candidate.load()
        prove(model)
        return model

    return ServedModel(candidate.version, candidate.round, _checked(candidate.version, build), prove)


def _checked(version: int, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; whatever it raises becomes ArtefactRejected."""
    try:
        return work()
    except ArtefactRejected:
        raise
    except Exception as error:  # runtimes share no exception class
        reason = " ".join(str(error).split())[:300]
        raise ArtefactRejected(Reason.LOAD_FAILED, f"version {version}: {reason}") from error

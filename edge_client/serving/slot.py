"""The model that serves frames, and how another takes its place while frames flow.

load -> warm up -> probe against the manifest's golden vector -> swap one reference
-> probation -> confirm or roll back.
Whoever answers a frame reads ``active`` once, so every answer comes from exactly one version.

Axes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

Model: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""(B, C, H, W) float32 in [-1, 1] -> logits (B, K) float32; safe to call from several threads."""


T = TypeVar("T")


class ModelLost(RuntimeError):
    """The process that runs a model died, hung or was let go: there is no answer, and it says nothing of the images.

    Args:
        detail: what became of the process.
        hung: it was killed because it was silent.
    """

    def __init__(self, detail: str, *, hung: bool = False) -> None:
        super().__init__(detail)
        self.hung = hung


@runtime_checkable
class Held(Protocol):
    """A model that holds a process."""

    def rest(self) -> None:
        """Let it go after the calls in progress; the next call brings it back."""

    def close(self) -> None:
        """Let it go after the calls in progress, for good: other calls raise ``ModelLost``."""


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


@dataclass(frozen=True, slots=True)
class RollBack:
    """A version that served and won't again.

    Attributes:
        version: of its manifest.
        round: of its manifest.
        reason: what it did.
        detail: one line.
    """

    version: int
    round: int
    reason: Reason
    detail: str


class ModelSlot:
    """One active model, the one that a roll-back returns to, and the rule that versions only rise.

    A model that takes another's place is on probation until it is confirmed. Until then the one that was confirmed last
    stays ready; one that nobody confirmed is never returned to. ``active`` may be read from any thread; changes are
    serialised.
    """

    def __init__(self) -> None:
        self._active: ServedModel | None = None
        self._previous: ServedModel | None = None
        self._on_probation = False
        self._newest_seen = -1
        self._num_cleared = 0
        self._changing = threading.Lock()
        self.num_swaps = 0
        self.num_rollbacks = 0
        self.last_rollback: RollBack | None = None

    @property
    def active(self) -> ServedModel | None:
        """The model that answers frames now; None before the first."""
        return self._active

    @property
    def previous(self) -> ServedModel | None:
        """The model that ``roll_back`` returns to."""
        return self._previous

    @property
    def on_probation(self) -> ServedModel | None:
        """The active model while it is on probation."""
        with self._changing:
            return self._active if self._on_probation else None

    def install(self, candidate: Candidate) -> ServedModel:
        """Serve the candidate from the next frame on; the active model answers until it passed every check.

        Installing the active version again changes nothing. The first model is confirmed at once: nothing precedes it.

        Raises:
            ArtefactRejected: Older than, or rolled back as, a version this slot has seen; doesn't load; or doesn't
                reproduce the golden vector. The active model stays.
        """
        with self._changing:
            active, num_cleared = self._active, self._num_cleared
            if active is not None and active.version == candidate.version:
                return active
            if candidate.version <= self._newest_seen:
                serving = "nothing" if active is None else f"version {active.version}"
                raise ArtefactRejected(
                    Reason.STALE_VERSION,
                    f"version {candidate.version} is not newer than {self._newest_seen}; still serving {serving}",
                )
        fresh = _proven(candidate)  # without the lock: a roll-back waits for nobody's candidate
        with self._changing:
            active = self._active
            if candidate.version <= self._newest_seen or num_cleared != self._num_cleared:
                _let_go(fresh)
                raise ArtefactRejected(Reason.STALE_VERSION, f"version {candidate.version} was overtaken")
            confirmed, dropped = (self._previous, active) if self._on_probation else (active, self._previous)
            self._previous, self._active = confirmed, fresh
            self._on_probation = confirmed is not None
            self._newest_seen = candidate.version
            self.num_swaps += 1
        _let_go(dropped)
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
        served = self._active
        if served is None or served.version != version:
            return False
        prove = served.prove
        _checked(version, lambda: prove(model))  # without the lock: a roll-back waits for nobody's engine
        with self._changing:
            active = self._active
            if active is None or active.version != version:
                return False
            self._active = replace(active, model=model)
        if active.model is not model:
            _let_go(active)
        return True

    def confirm(self, version: int) -> bool:
        """End the active model's probation: it is the one to return to from now on. Its predecessor may rest.

        Returns:
            False if ``version`` isn't on probation (any more).
        """
        with self._changing:
            if not self._on_probation or self._active is None or self._active.version != version:
                return False
            self._on_probation = False
            previous = self._previous
        held = None if previous is None else _held(previous.model)
        if held is not None:
            held.rest()
        return True

    def roll_back(self, failed_version: int, reason: Reason = Reason.FAILING, detail: str = "") -> ServedModel | None:
        """Return to the previous model, for good: the failed version isn't installed again.

        Returns:
            The model that serves now, or None if ``failed_version`` isn't active or nothing precedes it.
        """
        with self._changing:
            failed = self._active
            if failed is None or failed.version != failed_version or self._previous is None:
                return None
            self._active, self._previous = self._previous, None
            self._on_probation = False
            self.num_rollbacks += 1
            self.last_rollback = RollBack(failed_version, failed.round, reason, detail)
            now_serving = self._active
        _let_go(failed)
        log.error(
            "model rolled back",
            failed_version=failed_version,
            version=now_serving.version,
            reason=reason.value,
            detail=detail,
        )
        return now_serving

    def clear(self) -> None:
        """Serve nothing: the fleet agreed on another task, or the client stops. Versions still only rise."""
        with self._changing:
            self._num_cleared += 1
            dropped = (self._active, self._previous)
            self._active = self._previous = None
            self._on_probation = False
        for each in dropped:
            held = None if each is None else _held(each.model)
            if held is not None:
                held.close()


def _let_go(dropped: ServedModel | None) -> None:
    """End what a dropped model holds; a thread of its own waits for its last calls."""
    held = None if dropped is None else _held(dropped.model)
    if held is None:
        return
    try:
        threading.Thread(target=held.close, name="let-go", daemon=True).start()
    except RuntimeError:  # no thread is left: it is waited for here, or its process would stay for good
        held.close()


def _held(model: object) -> Held | None:
    return model if isinstance(model, Held) else None


def _proven(candidate: Candidate) -> ServedModel:
    """Build the model and prove it; the proof is kept for other runtimes of the same version."""

    def prove(model: Model) -> None:
        """Warm up at batch 1, the size that frames come in, and compare with the golden vector."""
        model(np.zeros((1, *candidate.image_shape), np.float32))
        candidate.check(model)

    def build() -> Model:
        model = candidate.load()
        try:
            prove(model)
        except Exception:
            held = _held(model)
            if held is not None:
                held.close()
            raise
        return model

    return ServedModel(candidate.version, candidate.round, _checked(candidate.version, build), prove)


def _checked(version: int, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; whatever it raises becomes ArtefactRejected, but for what the machine refuses."""
    try:
        return work()
    except (ArtefactRejected, OSError):
        raise
    except ModelLost as lost:  # not always the model's doing
        raise ArtefactRejected(Reason.HUNG if lost.hung else Reason.CRASHED, f"version {version}: {lost}") from lost
    except Exception as error:  # runtimes share no exception class
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ArtefactRejected(Reason.LOAD_FAILED, f"version {version}: {reason}") from error

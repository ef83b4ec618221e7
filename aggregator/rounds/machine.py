"""When a round opens, closes and ends: decisions only, no clocks, no I/O.

``open`` takes uploads until the quorum or the deadline; ``aggregating`` takes none; committing a round opens the next
one, or finishes the run. Which uploads count depends on neither their order nor on how often they arrive.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from replayfleet.aggregator.rounds.opening import Opening, Signs
from replayfleet.federation.errors import SettingsError

MAX_LATE_ROUNDS = 15
"""Uploads are remembered for one round more, so that none counts twice."""


class Phase(str, enum.Enum):
    """What the aggregator does right now; the values are those of ``Announcement.state``."""

    OPEN = "open"
    AGGREGATING = "aggregating"
    FINISHED = "finished"


class Course(str, enum.Enum):
    """Whether rounds go on; an operator says so."""

    RUNNING = "running"
    DRAINING = "draining"
    """Paused once the round is committed."""
    PAUSED = "paused"
    """The open round takes uploads, and nobody begins to train; it doesn't close, and its deadline stands still."""


class Decision(str, enum.Enum):
    """What the clock or an upload made of an open round."""

    WAIT = "wait"
    CLOSE_QUORUM = "quorum"
    CLOSE_DEADLINE = "deadline"
    CLOSE_OPERATOR = "operator"
    EXTEND = "extended"
    BEGIN = "due"
    """The round that waited for its time begins."""


@dataclass(frozen=True, slots=True)
class RoundRules:
    """When rounds close.

    Attributes:
        num_clients: of the planned fleet: a round closes at once with uploads from this many clients, or from fewer
            where members take no part. None: from all members that train.
        min_clients: at its deadline a round closes with at least this many, else it is extended.
        deadline_s: seconds that a round stays open, and by which it is extended.
        num_rounds: the run is finished after this many; None runs for ever.
        interval_s: from the beginning of a round to that of the next, at least; until then nobody trains, and deadlines
            stand still. 0 begins at once. A restart begins at once too.
        opening: what every round waits for besides, the first one too, also over restarts; None: for nothing.
        late_rounds: a round takes uploads that were trained for so many rounds before it too.
    """

    num_clients: int | None = None
    min_clients: int = 1
    deadline_s: float = 600.0
    num_rounds: int | None = None
    interval_s: float = 0.0
    opening: Opening | None = None
    late_rounds: int = 0

    def __post_init__(self) -> None:
        if self.num_clients is not None and self.num_clients < 1:
            raise SettingsError(f"clients is {self.num_clients}, expected at least 1")
        if not 1 <= self.min_clients <= (self.num_clients or self.min_clients):
            raise SettingsError(f"min_clients is {self.min_clients}, expected 1 to clients ({self.num_clients})")
        if not 0 < self.deadline_s <= 30 * 86400:
            raise SettingsError(f"deadline_s is {self.deadline_s}, expected more than 0 and at most 30 days")
        if not 0 <= self.interval_s <= 30 * 86400:
            raise SettingsError(f"round_interval_s is {self.interval_s}, expected 0 to 30 days")
        if not 0 <= self.late_rounds <= MAX_LATE_ROUNDS:
            raise SettingsError(f"late_rounds is {self.late_rounds}, expected 0 to {MAX_LATE_ROUNDS}")
        if self.num_rounds is not None and self.num_rounds < 1:
            raise SettingsError(f"rounds is {self.num_rounds}, expected at least 1")


class Rounds:
    """The round machine of one run; ``now`` is any clock that never runs backwards, in seconds.

    Args:
        rules: when rounds close.
        now: the present; the current round's deadline counts from here, also after a restart.
        index: the current round.
        accepted: clients whose upload for it is durable.
        closed: it was closed before a restart, and awaits its aggregation.
        begun: it began before a restart; else it may have to wait for ``rules.opening``.

    Attributes:
        signs: what ``rules.opening`` decides by; whoever turns the machine keeps it up to date.
        expected: a round closes at once with so many uploads, unless the rules ask for more at least.
        num_extensions: how often the round's deadline came with too few.
    """

    def __init__(
        self,
        rules: RoundRules,
        now: float,
        *,
        index: int = 0,
        accepted: Iterable[str] = (),
        closed: bool = False,
        begun: bool = False,
    ) -> None:
        self.course = Course.RUNNING
        self.num_extensions = 0
        self._extension_s = 0.0
        self._left_s = rules.deadline_s
        self._began, self._due_at = now, now
        self._rests = rules.opening is not None and not (begun or closed)
        self.signs = Signs()
        self.rules = rules
        self.expected = rules.num_clients or 0
        self.index = index
        self._accepted = set(accepted)
        self._deadline = now + rules.deadline_s
        self.phase = Phase.AGGREGATING if closed else Phase.OPEN
        self._finish_if_last()

    @property
    def accepted(self) -> tuple[str, ...]:
        """Clients that this round counts, sorted."""
        return tuple(sorted(self._accepted))

    def counts(self, client_id: str) -> bool:
        """Whether the round has a client's upload."""
        return client_id in self._accepted

    def takes(self, trained_for: int) -> bool:
        """Whether an upload that was trained for this round may count in the current one, once that is open."""
        return self.index - self.rules.late_rounds <= trained_for <= self.index

    @property
    def num_accepted(self) -> int:
        """How many uploads the round has."""
        return len(self._accepted)

    @property
    def quorum(self) -> int:
        """With how many uploads the round closes at once."""
        return max(self.expected, self.rules.min_clients)

    @property
    def is_open(self) -> bool:
        return self.phase is Phase.OPEN

    @property
    def takes_downloads(self) -> bool:
        """Whether a download made now would still be the newest when it is done."""
        return self.phase is not Phase.AGGREGATING

    def begin_again(self, now: float) -> None:
        """Count the open round's deadline from here: nobody could upload before."""
        self._left_s = self.rules.deadline_s + self._extension_s
        self._deadline = now + self._left_s

    def steer(self, course: Course, now: float) -> None:
        """Let rounds go on, or not; while they don't the deadline stands still."""
        was_paused, self.course = self.is_paused, course
        if self.is_paused and not was_paused:
            self._left_s = max(0.0, self._deadline - now)
        elif was_paused and not self.is_paused:
            self._deadline = now + self._left_s

    @property
    def is_paused(self) -> bool:
        """Whether nobody is to begin to train: an operator says so, or the round isn't due."""
        return self.course is Course.PAUSED or self._rests

    def rests_s(self, now: float) -> float:
        """Seconds until the round begins, infinite where no clock says when; 0 if none rests, or an operator paused.

        One that is due and hasn't begun, as where the disk takes nothing, begins within a second.
        """
        return max(1.0, self._left_to_rest_s(now)) if self.rests and self.course is not Course.PAUSED else 0.0

    @property
    def rests(self) -> bool:
        """Whether the open round hasn't begun."""
        return self._rests and self.is_open

    def awaits(self, now: float) -> str:
        """When the round that rests begins, in words that follow "it begins"; empty if none rests."""
        if not self.rests:
            return ""
        opening, due_s = self.rules.opening, self._due_at - now
        if opening is not None and opening.left_s(self.signs) >= due_s:
            return opening.awaits(self.signs)
        return f"in {max(0.0, due_s):.0f} s"

    def open(self, now: float) -> None:
        """Begin the round that rests, whatever it waits for.

        Raises:
            ValueError: None rests.
        """
        if not self.rests:
            raise ValueError(f"round {self.index} doesn't wait to begin")
        self._begin(now, began=now)

    def extend(self, by_s: float, now: float) -> None:
        """Move the open round's deadline; one that has passed counts from now."""
        self._extension_s += by_s
        self._left_s += by_s
        self._deadline = max(self._deadline, now) + by_s

    def close(self) -> None:
        """Close the open round with what there is.

        Raises:
            ValueError: It isn't open, or has fewer uploads than the least.
        """
        if not self.is_open or len(self._accepted) < self.rules.min_clients:
            raise ValueError(f"round {self.index} is {self.phase.value}, with {len(self._accepted)} uploads")
        self.phase = Phase.AGGREGATING

    def remaining_s(self, now: float) -> float:
        """Seconds to the deadline; 0 unless open."""
        if not self.is_open:
            return 0.0
        return self._left_s if self.is_paused else max(0.0, self._deadline - now)

    def accept(self, client_id: str) -> bool:
        """Count a client's upload; False if it was counted before.

        Raises:
            ValueError: The round isn't open.
        """
        if not self.is_open:
            raise ValueError(f"round {self.index} is {self.phase.value}, it takes no uploads")
        if client_id in self._accepted:
            return False
        self._accepted.add(client_id)
        return True

    def withdraw(self, client_id: str) -> None:
        """Count a client's upload no more, if the round is open."""
        if self.is_open:
            self._accepted.discard(client_id)

    def decide(self, now: float) -> Decision:
        """Close or extend the open round if it is time; call after uploads and regularly."""
        if self.rests and not self._left_to_rest_s(now):
            self._begin(now, began=self._due_at if self.rules.opening is None else now)
            return Decision.BEGIN
        if not self.is_open or self.is_paused:
            return Decision.WAIT
        if len(self._accepted) >= self.quorum:
            self.phase = Phase.AGGREGATING
            return Decision.CLOSE_QUORUM
        if now < self._deadline:
            return Decision.WAIT
        if len(self._accepted) >= self.rules.min_clients:
            self.phase = Phase.AGGREGATING
            return Decision.CLOSE_DEADLINE
        self._deadline = now + self.rules.deadline_s
        self.num_extensions += 1
        return Decision.EXTEND

    def committed(self, now: float) -> None:
        """The aggregated round is durable: open the next one, or finish.

        Raises:
            ValueError: No round was closed.
        """
        if self.phase is not Phase.AGGREGATING:
            raise ValueError(f"round {self.index} is {self.phase.value}, it can't be committed")
        self.index += 1
        self._accepted.clear()
        self._extension_s, self.num_extensions = 0.0, 0
        self.signs = Signs()  # those that let the last round begin say nothing of the next
        self.begin_again(now)
        self._due_at = self._began + self.rules.interval_s
        self._rests = self._due_at > now or self.rules.opening is not None
        self._began = max(self._due_at, now)
        if self.course is Course.DRAINING:
            self.course = Course.PAUSED
        self.phase = Phase.OPEN
        self._finish_if_last()

    def _left_to_rest_s(self, now: float) -> float:
        opening = self.rules.opening
        return max(0.0, self._due_at - now, opening.left_s(self.signs) if opening is not None else 0.0)

    def _begin(self, now: float, *, began: float) -> None:
        self._rests, self._began = False, began
        if not self.is_paused:
            self._deadline = now + self._left_s

    def _finish_if_last(self) -> None:
        if self.rules.num_rounds is not None and self.index >= self.rules.num_rounds:
            self.phase = Phase.FINISHED

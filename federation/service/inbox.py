"""What waits for a service's loop: its own work, and messages, of which anybody may send too many.

Every client has a lane of its own, known by its topics before anything is decoded. Token buckets say how much of a lane
comes in, a bound in bytes how much waits, deficit round robin whose turn it is. What a message costs is known when it
was dealt with, for a few bytes may have a whole bundle decoded: so the seconds that a lane takes are charged to it too,
where ``work`` says so. Whoever sends too much takes its own place alone. What is dropped comes again: offers and
progress are repeated until they are answered, presences for ever. A device's feedback, which nobody repeats, has a lane
beside the client's.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from replayfleet.federation.service.quotas import TokenBucket
from replayfleet.federation.wire.protocol.codec import is_block
from replayfleet.federation.wire.protocol.limits import EVERYBODY

MAX_WAITING_BYTES = 64 << 20
OVERHEAD_BYTES = 1 << 10
"""What a message costs beside its payload, in memory and in work."""
QUANTUM_BYTES = 64 << 10
"""A lane's share of one turn."""
LARGE_BYTES = 64 << 10
NUM_STRANGER_LANES = 16
"""Clients that nobody knows share these, however many there are."""
STRANGERS = "unknown clients"
_STRANGER = "?"  # no client's id begins so
_SHARED = (_STRANGER, EVERYBODY)
FEEDBACK_LANE = "/feedback"
"""How the name of a lane of feedback ends."""


class Rate(NamedTuple):
    """A token bucket's numbers, in bytes; each message costs ``overhead`` more."""

    per_s: float
    burst: float
    overhead: int


MESSAGES = Rate(256 << 10, 4 << 20, 5 << 10)
"""50 small messages a second after a burst of 800; of the largest offers, which take 30 ms to decode, one in 4 s."""
NEWCOMERS = Rate(128 << 10, 320 << 10, 5 << 10)
"""Of one lane of clients that nobody knows, who say little more than that they are there: 64 at once, 25 a second."""
FEEDBACK = Rate(256 << 10, 16 << 20, 5 << 10)
"""A word about each frame that a device keeps at once: 3,200 small ones, 2,100 with fifty boxes each."""
BLOCKS = Rate(128 << 20, 128 << 20, 16 << 10)
"""What a gigabit link brings; those that belong to no transfer cost little."""
WORK = (0.5, 5.0)
"""CPU seconds of the loop that one lane's messages may take, a second and at once. An honest client's take 3 s for an
upload of 1 GiB, which is 8 s on its way. Where they take longer, on a slow board, it goes on after a pause: blocks that
came are kept."""
WORN = 1000
"""Messages sent in vain that going beyond it counts as."""


class Message(NamedTuple):
    """What came from the network."""

    topic: str
    payload: bytes


class Work(NamedTuple):
    """What the service gave itself to do; ``guarded`` as messages are."""

    what: str
    guarded: bool
    run: Callable[[float], None]


@dataclass(slots=True)
class _Lane:
    messages: deque[Message] = field(default_factory=deque)
    size_bytes: int = 0
    deficit: int = 0


class FairInbox:
    """Thread-safe: network threads put, the loop gets. The messages of one client keep their order.

    Args:
        members: clients with a lane of their own; may be replaced at any time.
        max_bytes: of all messages that wait. Beyond it the fullest lane loses its newest; own work always fits.
        messages: how much a lane may bring of everything but blocks.
        newcomers: the same of a lane of clients that aren't members.
        blocks: how much of blocks.
        work: CPU seconds a second and at once that the messages of one lane may take; None: as many as they need.

    Attributes:
        num_dropped: messages, since the start.
    """

    def __init__(
        self,
        members: frozenset[str] = frozenset(),
        *,
        max_bytes: int = MAX_WAITING_BYTES,
        messages: Rate = MESSAGES,
        newcomers: Rate = NEWCOMERS,
        blocks: Rate = BLOCKS,
        work: tuple[float, float] | None = None,
    ) -> None:
        self._members = members
        self._max_bytes = max_bytes
        self._messages, self._newcomers, self._blocks = messages, newcomers, blocks
        self._work = work
        self._worked: dict[str, TokenBucket] = {}
        self._changed = threading.Condition()
        self._own: deque[Work] = deque()
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()  # those in which something waits, the next one first
        self._buckets: dict[tuple[str, bool], TokenBucket] = {}
        self._size_bytes = 0
        self._dropped: Counter[str] = Counter()
        self._waste: Counter[str] = Counter()
        self.num_dropped = 0

    def put_own(self, work: Work) -> None:
        """Add the service's own work."""
        with self._changed:
            self._own.append(work)
            self._changed.notify()

    def put(self, topic: str, payload: bytes, now: float) -> None:
        """Add a message, unless its sender has had too much; ``now`` in seconds."""
        with self._changed:
            name = self._lane_of(topic)
            if not (self._has_work_left(name, now) and self._admits(name, payload, now)):
                self._count(name, payload)
                return
            lane = self._lanes.setdefault(name, _Lane())
            message = Message(topic, payload)
            lane.messages.append(message)
            self._resize(lane, message, 1)
            while self._size_bytes > self._max_bytes:
                self._drop_newest(max(self._lanes, key=lambda lane: self._lanes[lane].size_bytes))
            self._changed.notify()

    def get(self, wait_s: float) -> Message | Work | None:
        """Return what is next, after at most ``wait_s``; None if nothing came. Own work goes first."""
        with self._changed:
            if not self._own and not self._lanes and wait_s > 0:
                self._changed.wait(wait_s)
            if self._own:
                return self._own.popleft()
            return self._next() if self._lanes else None

    def senders(self) -> frozenset[str]:
        """Return of which members something waits."""
        with self._changed:
            return frozenset(self._lanes)

    def charge(self, topic: str, seconds: float, now: float) -> None:
        """Say what a message of this topic took; a lane that took too much loses all that waits in it."""
        if self._work is None:
            return
        with self._changed:
            name = self._lane_of(topic)
            if self._worked.setdefault(name, TokenBucket(*self._work)).charge(seconds, now):
                return
            self._waste[_sender(name)] += WORN
            while name in self._lanes:
                self._drop_newest(name)

    def set_members(self, members: frozenset[str]) -> None:
        """Say who has a lane of its own; what waits elsewhere stays there."""
        if members != self._members:
            with self._changed:
                self._members = members
                self._buckets = {key: bucket for key, bucket in self._buckets.items() if self._stays(key[0])}
                self._worked = {name: bucket for name, bucket in self._worked.items() if self._stays(name)}

    def take_dropped(self) -> Counter[str]:
        """Return whose messages were dropped, and how many, since the last call."""
        with self._changed:
            dropped, self._dropped = self._dropped, Counter()
            return dropped

    def blame(self, sender: str, count: int) -> None:
        """Count messages that were let in and were of no use."""
        with self._changed:
            self._waste[sender] += count

    def take_waste(self) -> Counter[str]:
        """Return how much each sent in vain since the last call: messages, of large ones each ``LARGE_BYTES``."""
        with self._changed:
            waste, self._waste = self._waste, Counter()
            return waste

    def _lane_of(self, topic: str) -> str:
        match topic.split("/", 5):
            case [_, _, _, "clients", client, rest]:
                lane = client + FEEDBACK_LANE if rest == "feedback" else client
                return lane if client in self._members else f"{_STRANGER}{hash(client) % NUM_STRANGER_LANES}"
        return EVERYBODY

    def _stays(self, name: str) -> bool:
        return name.removesuffix(FEEDBACK_LANE) in self._members or name.startswith(_SHARED)

    def _has_work_left(self, name: str, now: float) -> bool:
        bucket = self._worked.get(name)
        return bucket is None or bucket.take(0, now)

    def _admits(self, name: str, payload: bytes, now: float) -> bool:
        kind = is_block(payload)
        others = FEEDBACK if name.endswith(FEEDBACK_LANE) else self._messages
        rate = self._blocks if kind else self._newcomers if name.startswith(_STRANGER) else others
        bucket = self._buckets.setdefault((name, kind), TokenBucket(rate.per_s, rate.burst))
        return bucket.take(len(payload) + rate.overhead, now)

    def _next(self) -> Message:
        """Deficit round robin (Shreedhar and Varghese 1995): who must wait saves its share for its next turn."""
        while True:
            name, lane = next(iter(self._lanes.items()))
            message = lane.messages[0]
            if lane.deficit >= _size(message):
                lane.deficit -= _size(message)
                lane.messages.popleft()
                self._resize(lane, message, -1)
                if not lane.messages:
                    del self._lanes[name]
                return message
            lane.deficit += QUANTUM_BYTES
            self._lanes.move_to_end(name)

    def _drop_newest(self, name: str) -> None:
        lane = self._lanes[name]
        message = lane.messages.pop()
        self._resize(lane, message, -1)
        if not lane.messages:
            del self._lanes[name]
        self._count(name, message.payload)

    def _resize(self, lane: _Lane, message: Message, sign: int) -> None:
        lane.size_bytes += sign * _size(message)
        self._size_bytes += sign * _size(message)

    def _count(self, name: str, payload: bytes) -> None:
        self.num_dropped += 1
        sender = _sender(name)
        self._dropped[sender] += 1
        self._waste[sender] += 1 if is_block(payload) else 1 + len(payload) // LARGE_BYTES


def _sender(name: str) -> str:
    return STRANGERS if name.startswith(_STRANGER) else name


def _size(message: Message) -> int:
    return len(message.payload) + len(message.topic) + OVERHEAD_BYTES

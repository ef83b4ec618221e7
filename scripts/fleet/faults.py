"""What goes wrong in a simulated fleet, and when: decided from the round that is open and the time, without I/O."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from replayfleet.federation.errors import SettingsError, nearest

KILL_CLIENT = "kill-client"
RESTART_BROKER = "restart-broker"
BAD_LINE = "bad-line"
FAULTS = (KILL_CLIENT, RESTART_BROKER, BAD_LINE)

AFTER_S = 1.0
"""From the opening of a round to what goes wrong in it."""

DOWN_S = 2.0
"""Until what was killed is started again."""


class Acts(Protocol):
    """What can be done to a fleet."""

    def kill_client(self, name: str) -> bool:
        """End a client with SIGKILL; False if it isn't running."""

    def start_client(self, name: str) -> None:
        """Start it again, with the data dir that it left."""

    def kill_broker(self) -> None:
        """End the broker with SIGKILL: all that it held is gone."""

    def start_broker(self) -> None:
        """Start it again, at the same port."""


def check_faults(faults: Sequence[str]) -> tuple[str, ...]:
    """Return the faults that were asked for, each once.

    Raises:
        SettingsError: One is unknown; names the nearest.
    """
    for fault in faults:
        if fault not in FAULTS:
            raise SettingsError(f"unknown fault {fault!r}{nearest(fault, FAULTS)}; known are {', '.join(FAULTS)}")
    return tuple(dict.fromkeys(faults))


class Faults:
    """In every round but the first one client is killed; in the middle round, the broker. A single round gets both.

    Args:
        faults: of ``FAULTS``.
        clients: their names.
        num_rounds: of the fleet.
        acts: what is done.
        rng: chooses clients.
        clock: ``time.monotonic``.
    """

    def __init__(
        self,
        faults: Sequence[str],
        clients: Sequence[str],
        num_rounds: int,
        acts: Acts,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._faults = faults
        self._clients = tuple(clients)
        self._first = min(1, num_rounds - 1)
        self._broker_round = max(self._first, num_rounds // 2)
        self._acts = acts
        self._rng = rng
        self._clock = clock
        self._seen: set[int] = set()
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        self.num_kills: dict[str, int] = dict.fromkeys(self._clients, 0)
        self.num_broker_restarts = 0

    @property
    def pending(self) -> bool:
        """Whether something waits to be done, above all a client to be started again."""
        return bool(self._waiting)

    def step(self, open_round: int | None) -> None:
        """Do what is due; call it often.

        Args:
            open_round: the newest round; None before the first.
        """
        now = self._clock()
        if open_round is not None and open_round not in self._seen:
            self._seen.add(open_round)
            self._plan(open_round, now + AFTER_S)
        due = [act for at, act in self._waiting if at <= now]
        self._waiting = [(at, act) for at, act in self._waiting if at > now]
        for act in due:
            act()

    def _plan(self, round_index: int, at: float) -> None:
        if KILL_CLIENT in self._faults and round_index >= self._first:
            name = self._rng.choice(self._clients)
            self._waiting.append((at, lambda: self._kill(name)))
        if RESTART_BROKER in self._faults and round_index == self._broker_round:
            self._waiting.append((at, self._kill_broker))

    def _kill(self, name: str) -> None:
        if self._acts.kill_client(name):
            self.num_kills[name] += 1
            self._waiting.append((self._clock() + DOWN_S, lambda: self._acts.start_client(name)))

    def _kill_broker(self) -> None:
        self._acts.kill_broker()
        self.num_broker_restarts += 1
        self._waiting.append((self._clock() + DOWN_S, self._acts.start_broker))

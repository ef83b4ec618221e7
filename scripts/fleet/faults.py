"""What goes wrong in a simulated fleet, and when: decided from the round that is open and the time, without I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence

from replayfleet.federation.errors import SettingsError, nearest

KILL_CLIENT = "kill-client"
RESTART_BROKER = "restart-broker"
BAD_LINE = "bad-line"
FAULTS = (KILL_CLIENT, RESTART_BROKER, BAD_LINE)

AFTER_S = 1.0
"""From the opening of a round to what goes wrong in it."""

DOWN_S = 2.0
"""Until what was killed is started again."""


BROKER = "broker"
"""Beside the clients' names, what can be killed."""


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
        rng: chooses clients.
    """

    def __init__(self, faults: Sequence[str], clients: Sequence[str], num_rounds: int, rng: random.Random) -> None:
        self._faults = faults
        self._clients = tuple(clients)
        self._first = min(1, num_rounds - 1)
        self._broker_round = max(self._first, num_rounds // 2)
        self._rng = rng
        self._rounds_seen: set[int] = set()
        self._kills: list[tuple[float, str]] = []
        self._starts: list[tuple[float, str]] = []
        self.num_kills: dict[str, int] = dict.fromkeys((*self._clients, BROKER), 0)

    def due_kills(self, open_round: int | None, now: float) -> list[str]:
        """Return who is to be killed now; ``open_round`` is the newest round, None before the first."""
        if open_round is not None and open_round not in self._rounds_seen:
            self._rounds_seen.add(open_round)
            if KILL_CLIENT in self._faults and open_round >= self._first:
                self._kills.append((now + AFTER_S, self._rng.choice(self._clients)))
            if RESTART_BROKER in self._faults and open_round == self._broker_round:
                self._kills.append((now + AFTER_S, BROKER))
        return _taken(self._kills, now)

    def was_killed(self, name: str, now: float) -> None:
        """Count a kill, and see to it that what was killed is started again."""
        self.num_kills[name] += 1
        self._starts.append((now + DOWN_S, name))

    def due_starts(self, now: float) -> list[str]:
        """Return who is to be started again now."""
        return _taken(self._starts, now)


def _taken(waiting: list[tuple[float, str]], now: float) -> list[str]:
    due = [name for at, name in waiting if at <= now]
    waiting[:] = [(at, name) for at, name in waiting if at > now]
    return due

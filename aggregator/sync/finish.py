"""When a finished run may end: everybody who is there has the final download, or had time enough."""

from __future__ import annotations

from collections.abc import Mapping

from replayfleet.aggregator.presence import PresenceTable
from replayfleet.aggregator.rounds.machine import Phase, Rounds
from replayfleet.aggregator.store import AggregatorStore

GRACE_S = 30.0
SETTLE_S = 1.0
"""After a restart it takes this long until retained presences have told who is there."""


class Finish:
    """Watches a finished run; ``reported`` holds the newest version each client has reported on."""

    def __init__(
        self, rounds: Rounds, presence: PresenceTable, store: AggregatorStore, reported: Mapping[str, int]
    ) -> None:
        self._rounds = rounds
        self._presence = presence
        self._store = store
        self._reported = reported
        self._since: float | None = None
        self.grace_s = GRACE_S

    def waiting_for(self, now: float) -> list[str]:
        """Clients that are there, or were a moment ago, and didn't confirm and report on their final download yet."""
        waiting = []
        for client_id in self._presence.lately(now):
            if self._store.roll.excludes(client_id):
                continue
            manifest = self._store.download(client_id)
            done = min(self._store.confirmed_version(client_id), self._reported.get(client_id, -1))
            if manifest is None or manifest.round != self._rounds.index or done < manifest.version:
                waiting.append(client_id)
        return waiting

    def over(self, now: float) -> bool:
        """Whether the process may end."""
        if self._rounds.phase is not Phase.FINISHED:
            return False
        if self._since is None:
            self._since = now
        waited_s = now - self._since
        return waited_s >= self.grace_s or (waited_s >= SETTLE_S and not self.waiting_for(now))

"""When a finished run may end: everybody who is there has the final download, or had time enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from replayfleet.aggregator.presence import PresenceTable
from replayfleet.aggregator.rounds.machine import Phase, Rounds
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.wire.protocol.limits import EVERYBODY

GRACE_S = 45.0
"""Without anybody receiving anything; a block takes 33 s at 64 kbit/s."""
MAX_GRACE_S = 900.0
SETTLE_S = 1.0
"""After a restart it takes this long until retained presences have told who is there."""


class Finish:
    """Watches a finished run.

    Args:
        rounds: whose end it is.
        presence: who is there.
        store: knows every client's download.
        reported: the newest version each client has reported on.
        advanced_at: when a client, or ``"*"``, last said that it received something new.
    """

    def __init__(
        self,
        rounds: Rounds,
        presence: PresenceTable,
        store: AggregatorStore,
        reported: Mapping[str, int],
        advanced_at: Callable[[str], float],
    ) -> None:
        self._rounds = rounds
        self._presence = presence
        self._store = store
        self._reported = reported
        self._advanced_at = advanced_at
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
        if waited_s < min(SETTLE_S, self.grace_s):
            return False
        waiting = self.waiting_for(now)
        received_at = max(map(self._advanced_at, (*waiting, EVERYBODY)))
        if received_at > self._since + SETTLE_S and waited_s < MAX_GRACE_S:  # not only just offered
            waited_s = now - received_at
        return not waiting or waited_s >= self.grace_s

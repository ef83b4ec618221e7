"""``aggregator status``: where a run stands, read from its data dir beside a running service or after it."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayfleet.aggregator.operator.journal import last_event
from replayfleet.aggregator.rounds.machine import Course, Phase
from replayfleet.aggregator.store import DATABASE, AggregatorStore
from replayfleet.devices.profiles import FP32
from replayfleet.federation.errors import UNREADABLE, SettingsError
from replayfleet.federation.service.disk import disk_errno
from replayfleet.federation.service.fleet.presets import stores_data
from replayfleet.federation.service.words import count_of, visible
from replayfleet.federation.wire.protocol.messages import spoken


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One client as the store knows it."""

    client: str
    download_round: int
    version: int
    confirmed_version: int
    quarantined_round: int = -1
    quarantined_because: str = ""
    precision: str = FP32
    notice: str = ""
    stands: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """A run as the store knows it; ``last_event`` is from the journal.

    ``stores_data``: its method keeps real samples on the clients.
    """

    fleet: str
    method: str
    stores_data: bool
    seed: int
    round: int
    phase: str
    uploads: tuple[str, ...]
    clients: tuple[ClientStatus, ...]
    last_event: dict[str, Any]
    course: str = Course.RUNNING.value

    def lines(self) -> list[str]:
        """What a person reads."""
        uploads = ", ".join(self.uploads) or "none yet"
        storing = ", clients keep real samples" if self.stores_data else ""
        lines = [
            f"fleet {self.fleet}: {self.method}, seed {self.seed}{storing}",
            f"{self.phase} after {count_of(self.round, 'round')}"
            if self.phase == Phase.FINISHED.value
            else f"round {self.round}: {self.phase}, uploads: {uploads}",
        ]
        if self.course != Course.RUNNING.value and self.phase != Phase.FINISHED.value:
            lines.append(f"{self.course}; `aggregator resume` lets rounds go on")
        for client in self.clients:
            state = "confirmed" if client.confirmed_version == client.version > 0 else "not confirmed"
            version = spoken(client.version)
            rounded = "" if client.precision == FP32 else f", {client.precision}"
            stands = f", {client.stands}" if client.stands else ""
            download = f"download for round {client.download_round}, v{version}{rounded}, {state}"
            lines.append(f"{client.client}: {download if client.version else 'no download yet'}{stands}")
            if client.quarantined_because:
                lines.append(f"  upload of round {client.quarantined_round} not used: {client.quarantined_because}")
            elif client.notice:
                lines.append(f"  {client.notice}")
        if self.last_event:
            reason = self.last_event.get("reason")
            lines.append(f"last event: {self.last_event.get('event')}" + (f": {reason}" if reason else ""))
        return [visible(line) for line in lines]


def read_status(folder: Path) -> Status:
    """Return the status of the run in ``folder``.

    Raises:
        SettingsError: There is no run, or its database is damaged.
    """
    if not (folder / DATABASE).is_file():
        raise SettingsError(f"data dir {folder}: no aggregator has run here; expected {DATABASE}")
    store = AggregatorStore(folder, read_only=True)
    try:
        spec = store.spec()
        if spec is None:
            raise SettingsError(f"data dir {folder}: its run has not begun yet")
        record, num_rounds = store.round(), store.num_rounds()
        finished, course = num_rounds is not None and record.index >= num_rounds, store.course().value
        clients, quarantined = [], store.quarantined()
        with contextlib.suppress(sqlite3.OperationalError):  # one of an earlier version has no members
            store.roll.refresh()
        for client_id in store.clients():
            manifest = store.download(client_id)
            version, for_round = (manifest.version, manifest.round) if manifest else (0, -1)
            confirmed = store.confirmed_version(client_id)
            left_out = quarantined.get(client_id, (-1, ""))
            serving, notice = (manifest.serving, manifest.notice) if manifest else (None, "")
            precision = serving.precision if serving else FP32
            why = store.shut_out(client_id) or "is excluded" * store.roll.excludes(client_id)
            stands = why.partition(";")[0]
            clients.append(ClientStatus(client_id, for_round, version, confirmed, *left_out, precision, notice, stands))
    except (sqlite3.Error, *UNREADABLE) as error:
        if disk_errno(error) is not None:  # WAL mode has to write even to read
            raise SettingsError(
                f"data dir {folder}: {DATABASE} can't be read, for the disk refuses ({error})"
            ) from error
        raise SettingsError(f"data dir {folder}: {DATABASE} is damaged ({error}); bring it back from a copy") from error
    finally:
        store.close()
    return Status(
        fleet=spec.fleet,
        method=spec.method,
        stores_data=stores_data(spec.method),
        seed=spec.run_seed,
        round=record.index,
        phase=(Phase.FINISHED if finished else record.phase).value,
        uploads=record.accepted,
        clients=tuple(clients),
        last_event=last_event(folder),
        course=course,
    )

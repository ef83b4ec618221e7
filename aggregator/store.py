"""What survives ``kill -9``: the fleet, its rounds, accepted uploads, the committed state, every client's download.

SQLite with WAL and ``synchronous=FULL``, but for what clients say again; tensors lie in the blob store, and every blob
is on disk before a row refers to it. One thread uses the store. Each writing method is one transaction.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from replayfleet.aggregator.records.database import transaction
from replayfleet.aggregator.records.deeds import DEEDS_TABLE, Deed, Deeds
from replayfleet.aggregator.records.roll import Exclusion, Roll, make_members_table
from replayfleet.aggregator.records.versions import VERSIONS_TABLE, Versions
from replayfleet.aggregator.rounds.machine import MAX_LATE_ROUNDS, Course, Phase
from replayfleet.federation.atomic import open_file
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.service.data_dir import aggregators, read_owner
from replayfleet.federation.service.disk import disk_errno, is_damage
from replayfleet.federation.wire.protocol.limits import MAX_EPOCH
from replayfleet.federation.wire.protocol.messages import COUNTER_BITS, BlobEntry, FleetSpec, Manifest, epoch_of

DATABASE = "aggregator.sqlite"
KEEP_ROUNDS = MAX_LATE_ROUNDS + 1
"""Manifests of uploads are kept for this many rounds, so that a late repeat gets its verdict again."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, phase TEXT NOT NULL, opened_at REAL NOT NULL, closed_at REAL, committed_at REAL);
CREATE TABLE IF NOT EXISTS uploads (
    round INTEGER, client TEXT, manifest BLOB NOT NULL, bytes_on_wire INTEGER NOT NULL,
    PRIMARY KEY (round, client)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS clients (
    client TEXT PRIMARY KEY, version INTEGER NOT NULL DEFAULT 0, download BLOB,
    confirmed_version INTEGER NOT NULL DEFAULT 0, holdings BLOB NOT NULL DEFAULT x'90') WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS signing_keys (
    client TEXT PRIMARY KEY, key BLOB NOT NULL, enrolled INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quarantine (
    client TEXT PRIMARY KEY, round INTEGER NOT NULL, reason TEXT NOT NULL) WITHOUT ROWID;
"""

_TABLES = _SCHEMA + VERSIONS_TABLE + DEEDS_TABLE

_COMMITTED = "committed"
_T = TypeVar("_T")


class StoredArtefacts(msgspec.Struct, frozen=True):
    """Artefacts by reference.

    Attributes:
        blobs: one per parameter set.
        facts: digest of the blob that holds the facts.
    """

    blobs: tuple[BlobEntry, ...]
    facts: str

    def digests(self) -> set[str]:
        """Every blob that it consists of."""
        return {entry.digest for entry in self.blobs} | {self.facts}


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The current round as the store knows it."""

    index: int
    phase: Phase
    accepted: tuple[str, ...]
    opened_at: float


class AggregatorStore:
    """The aggregator's database.

    Args:
        folder: a claimed data dir.
        read_only: for ``aggregator status`` beside a running service.

    Attributes:
        roll: its members.
        deeds: what operators did.
        versions: downloads to which clients can go back.

    Raises:
        SettingsError: The database is damaged, or, to be read only, isn't there; or the data dir is of another format.
        ReplayfleetError: The disk doesn't let it be opened.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        if folder.is_dir():
            read_owner(folder, aggregators(None))
        path = folder / DATABASE
        is_new = not (read_only or path.exists())
        try:
            mode = "ro" if read_only else "rwc"
            if is_new:
                with contextlib.suppress(OSError):  # SQLite says why it can't be there
                    os.close(open_file(path, 0o644))
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.executescript(_TABLES)
                make_members_table(self._db)
            elif not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
                self._db.close()
                raise SettingsError(
                    f"{path} is damaged; restore a backup: it holds nothing of a fleet. If this fleet never began, "
                    "move it away"
                )
            else:
                self._db.executescript(_not_there_yet(self._db))
                make_members_table(self._db, read_only=True)
        except sqlite3.Error as error:
            passes = disk_errno(error) is not None and (path.is_file() or not (read_only or os.path.lexists(path)))
            kind = ReplayfleetError if passes else SettingsError
            closed = ": can't be opened now; is the disk full?" if passes else ": can't be opened"
            what = " is damaged; restore a backup" if is_damage(error) else closed
            if is_new and passes:  # half made, the next start would take it for one that was lost
                with contextlib.suppress(AttributeError):
                    self._db.close()
                for half in ("", "-wal", "-shm"):
                    path.with_name(f"{DATABASE}{half}").unlink(missing_ok=True)
            raise kind(f"{path}{what} ({error})") from error
        self._newest: dict[str, tuple[int, Manifest | None]] = {}
        self.roll, self.deeds, self.versions = Roll(self._db), Deeds(self._db), Versions(self._db)
        if not read_only:
            self.roll.refresh()

    def close(self) -> None:
        """Close the database; an unfinished transaction is undone. Idempotent."""
        self._db.close()

    def spec(self) -> FleetSpec | None:
        """The fleet that this store belongs to; None in a new one."""
        return self._fact("spec", FleetSpec)

    def found(self, spec: FleetSpec, at: float, initial: BlobEntry | None = None) -> None:
        """Begin a fleet: keep its spec, and the model that everybody begins with if one is given; open round 0."""
        with transaction(self._db):
            self._set_fact("spec", spec)
            self._set_fact("initial", initial)
            self._set_fact("home", secrets.token_hex(4))
            self._db.execute("INSERT INTO rounds (round, phase, opened_at) VALUES (0, ?, ?)", (Phase.OPEN.value, at))

    def founded_at(self) -> float | None:
        """Unix time at which the fleet began, in a copy of the store too; None in a new one."""
        row = self._db.execute("SELECT opened_at FROM rounds WHERE round = 0").fetchone()
        return None if row is None else float(row[0])

    def added_classes(self) -> tuple[str, ...]:
        """Classes that the fleet learns beside those that it was founded with."""
        return self._fact("added_classes", tuple[str, ...]) or ()

    def grow(self, spec: FleetSpec, added: tuple[str, ...], initial: BlobEntry, state: StoredArtefacts | None) -> None:
        """Go on with more classes, in another epoch: the open round begins anew, all models are of the new layout.

        Raises:
            SettingsError: There are no more epochs.
        """
        with transaction(self._db):
            self._set_fact("spec", spec)
            self._set_fact("added_classes", (*self.added_classes(), *added))
            self._set_fact("initial", initial)
            self._set_fact("state", state)
            self._set_fact("graphs", ())
            index = self.round().index
            self._db.execute("DELETE FROM uploads WHERE round = ?", (index,))
            self._db.execute("UPDATE rounds SET phase = ?, closed_at = NULL WHERE round = ?", (Phase.OPEN.value, index))
            for client_id in self.clients():
                self.versions.forget(client_id)
            self._db.execute("UPDATE clients SET download = NULL")
            self.raise_epoch(self.epoch() + 1)

    def initial(self) -> BlobEntry | None:
        """The task model that the run began with; None if it was a random one."""
        return self._fact("initial", BlobEntry)

    def epoch(self) -> int:
        """Which life of the fleet's store this is: 0 as it was founded, more after a restore or a takeover."""
        return self._fact("epoch", int) or 0

    def home(self) -> str:
        """Names this store among all that ever served the fleet; a restored copy is another one."""
        return self._fact("home", str) or ""

    def move(self, *, above: int | None = None) -> None:
        """Become another store than the one this is a copy of; in an epoch above this one, it leads at once."""
        with transaction(self._db):
            self._set_fact("home", secrets.token_hex(4))
        if above is not None:
            self.raise_epoch(above + 1)

    def raise_epoch(self, epoch: int) -> None:
        """Begin another epoch: every client's download becomes newer than all that earlier epochs ever sent.

        Raises:
            SettingsError: ``epoch`` isn't higher than the store's, or is beyond what versions can carry.
        """
        if not self.epoch() < epoch <= MAX_EPOCH:
            raise SettingsError(f"epoch {epoch}, expected more than {self.epoch()} and at most {MAX_EPOCH}")
        with transaction(self._db):
            self._set_fact("epoch", epoch)
            for client_id in self.clients():
                download = self.download(client_id)
                if download is not None:
                    self._write_download(download)

    def outpace(self, client_id: str, version: int) -> bool:
        """Make one client's download newer than ``version``, which this store never sent; False if it did.

        The store is older than what the client holds. Only this client's versions rise, so one that lies harms itself.
        """
        download = self.download(client_id)
        if download is None or version <= download.version or epoch_of(version) >= MAX_EPOCH:
            return False
        with transaction(self._db):
            base = (epoch_of(version) + 1) << COUNTER_BITS
            self._db.execute("UPDATE clients SET version = ? WHERE client = ?", (base, client_id))
            self._write_download(download)
        return True

    def graphs(self) -> tuple[BlobEntry, ...]:
        """The exported graphs; empty until ``set_graphs``."""
        return self._fact("graphs", tuple[BlobEntry, ...]) or ()

    def set_graphs(self, graphs: tuple[BlobEntry, ...]) -> None:
        """Keep the exported graphs."""
        with transaction(self._db):
            self._set_fact("graphs", graphs)

    def num_rounds(self) -> int | None:
        """After how many rounds the run is finished, as the last start of the aggregator had it; None for never."""
        return self._fact("num_rounds", int)

    def set_num_rounds(self, num_rounds: int | None) -> None:
        """Remember when the run is finished, for those who look at it while no aggregator runs."""
        with transaction(self._db):
            self._set_fact("num_rounds", num_rounds)

    def num_in_vain(self) -> int:
        """How many rounds ended with none of their uploads used."""
        return self._fact("in_vain", int) or 0

    def state(self) -> StoredArtefacts | None:
        """The method's state after the last committed round; None before the first."""
        return self._fact("state", StoredArtefacts)

    def round(self) -> RoundRecord:
        """The current round: the newest one, always open or closed, never committed."""
        index, phase, opened_at = self._db.execute(
            "SELECT round, phase, opened_at FROM rounds ORDER BY round DESC LIMIT 1"
        ).fetchone()
        # Asked every second, and manifests are long.
        accepted = self._db.execute("SELECT client FROM uploads WHERE round = ? ORDER BY client", (index,))
        return RoundRecord(index, Phase(phase), tuple(client for (client,) in accepted), opened_at)

    def close_round(self, index: int, at: float) -> None:
        """Fix the set of uploads of an open round; closing it again changes nothing."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE rounds SET phase = ?, closed_at = ? WHERE round = ? AND phase = ?",
                (Phase.AGGREGATING.value, at, index, Phase.OPEN.value),
            )

    def accept_upload(self, manifest: Manifest, bytes_on_wire: int, index: int) -> bool:
        """Make an upload count in round ``index``; False if that isn't open or this client already has one.

        The client evidently holds what it sent, so that is remembered too.
        """
        with transaction(self._db):
            row = self._db.execute("SELECT phase FROM rounds WHERE round = ?", (index,)).fetchone()
            if row is None or row[0] != Phase.OPEN.value:
                return False
            cursor = self._db.execute(
                "INSERT OR IGNORE INTO uploads (round, client, manifest, bytes_on_wire) VALUES (?, ?, ?, ?)",
                (index, manifest.client_id, msgspec.msgpack.encode(manifest), bytes_on_wire),
            )
            if cursor.rowcount != 1:
                return False
            self._meet(manifest.client_id)
            sent = set[str]().union(*(digests_of(kept.manifest) for kept in self.versions.of(manifest.client_id)))
            # Of what it held, what it was sent lately: one that trains and can serve no download confirms nothing.
            self._hold(manifest.client_id, self.holdings(manifest.client_id) & sent | digests_of(manifest))
            return True

    def uploads(self, index: int) -> dict[str, Manifest]:
        """Accepted uploads of a round by client, clients sorted."""
        rows = self._db.execute("SELECT client, manifest FROM uploads WHERE round = ? ORDER BY client", (index,))
        return {client: msgspec.msgpack.decode(manifest, type=Manifest) for client, manifest in rows}

    def counts_in(self, client_id: str, manifest: Manifest, newest: int) -> int | None:
        """The round, up to ``newest`` and not long past, in which this very upload counts; None if it doesn't."""
        question = "SELECT manifest FROM uploads WHERE round = ? AND client = ?"
        for index in range(max(newest - KEEP_ROUNDS, manifest.round), newest + 1):  # each by the table's key
            row = self._db.execute(question, (index, client_id)).fetchone()
            if row is not None and msgspec.msgpack.decode(row[0], type=Manifest).mark == manifest.mark:
                return index
        return None

    def commit_round(
        self,
        index: int,
        state: StoredArtefacts,
        drafts: Mapping[str, Manifest],
        at: float,
        quarantined: Mapping[str, str] | None = None,
        in_vain: bool = False,
    ) -> bool:
        """End a closed round: state, all downloads and the next round, all or nothing.

        Args:
            index: the round.
            state: the method's state after it.
            drafts: a download for each client; their versions are set here.
            at: wall-clock time in seconds.
            quarantined: clients whose uploads it was aggregated without, and why.
            in_vain: whether none of its uploads could be used.

        Returns:
            False, with nothing changed, if the round isn't the closed one (it was committed before).
        """
        with transaction(self._db):
            cursor = self._db.execute(
                "UPDATE rounds SET phase = ?, committed_at = ? WHERE round = ? AND phase = ?",
                (_COMMITTED, at, index, Phase.AGGREGATING.value),
            )
            if cursor.rowcount != 1:
                return False
            self._set_fact("state", state)
            self._set_fact("in_vain", self.num_in_vain() + in_vain)
            for client_id in sorted(drafts):
                self._write_download(drafts[client_id])
            for client_id in self.roll.revoked:
                self.versions.forget(client_id)
                self.drop_download(client_id)
            self._db.execute(
                "INSERT INTO rounds (round, phase, opened_at) VALUES (?, ?, ?)", (index + 1, Phase.OPEN.value, at)
            )
            if self.course() is Course.DRAINING:
                self.set_course(Course.PAUSED)
            self._db.execute("DELETE FROM uploads WHERE round <= ?", (index - KEEP_ROUNDS,))
            for client_id, reason in sorted((quarantined or {}).items()):
                self._db.execute(
                    "INSERT OR REPLACE INTO quarantine (round, client, reason) VALUES (?, ?, ?)",
                    (index, client_id, reason),
                )
            return True

    def quarantined(self) -> dict[str, tuple[int, str]]:
        """Clients whose upload was ever left out of a round: the newest such round, and why."""
        rows = self._db.execute("SELECT client, round, reason FROM quarantine ORDER BY client")
        return {client: (index, reason) for client, index, reason in rows}

    def signing_key(self, client_id: str) -> bytes | None:
        """The public key, 32 bytes, with which a member signs."""
        row = self._db.execute("SELECT key FROM signing_keys WHERE client = ?", (client_id,)).fetchone()
        return None if row is None else bytes(row[0])

    def is_enrolled(self, client_id: str = "") -> bool:
        """Whether this client, or any, was enrolled by an operator."""
        which, values = ("client = ?", (client_id,)) if client_id else ("1", ())
        question = f"SELECT 1 FROM signing_keys WHERE {which} AND enrolled LIMIT 1"  # noqa: S608
        return self._db.execute(question, values).fetchone() is not None

    def is_followed(self) -> bool:
        """Whether devices may hold this aggregator's root: it has run, or one was enrolled."""
        return self.spec() is not None or self.is_enrolled()

    def shut_out(self, client_id: str) -> str:
        """Say why nothing that this client signs counts, as of the roll's last ``refresh``; empty if it counts."""
        if client_id in self.roll.revoked:
            return f"is revoked; `aggregator enroll {client_id}` takes it in again"
        if self.roll.enrols and client_id not in self.roll.enrolled:
            return f"isn't enrolled; `aggregator enroll {client_id}` lets it in"
        return ""

    def leaves_out(self, client_id: str) -> bool:
        """Whether this client gets no models: excluded or shut out, as of the roll's last ``refresh``."""
        return self.roll.excludes(client_id) or bool(self.shut_out(client_id))

    def left_out(self) -> frozenset[str]:
        """Clients that ever got or sent anything, and get no models now."""
        return frozenset(filter(self.leaves_out, self.clients()))

    def withdraw(self, client_id: str) -> bool:
        """Take a client's upload out of the open round; returns whether it had one there."""
        with transaction(self._db):
            cursor = self._db.execute(
                "DELETE FROM uploads WHERE client = ? AND round IN (SELECT round FROM rounds WHERE phase = ?)",
                (client_id, Phase.OPEN.value),
            )
        return cursor.rowcount == 1

    def pin(self, client_id: str, key: bytes, *, enrolled: bool = True) -> None:
        """Keep a member's key; one that an operator enrolled is replaced by no other."""
        with transaction(self._db):
            self._db.execute(
                "INSERT INTO signing_keys (client, key, enrolled) VALUES (?, ?, ?) ON CONFLICT (client) DO UPDATE "
                "SET key = excluded.key, enrolled = excluded.enrolled WHERE excluded.enrolled OR NOT enrolled",
                (client_id, key, int(enrolled)),
            )

    def put_download(self, draft: Manifest) -> Manifest:
        """Keep one client's download under the next version; returns it with that version."""
        with transaction(self._db):
            return self._write_download(draft)

    def download(self, client_id: str) -> Manifest | None:
        """The newest download of a client."""
        row = self._db.execute("SELECT download FROM clients WHERE client = ?", (client_id,)).fetchone()
        return None if row is None or row[0] is None else msgspec.msgpack.decode(row[0], type=Manifest)

    def download_round(self, client_id: str, version: int) -> int:
        """Return for which round the newest download of a client is, given its version; -1 for none."""
        download = self.newest_download(client_id, version)
        return -1 if download is None else download.round

    def newest_download(self, client_id: str, version: int) -> Manifest | None:
        """Return the newest download of a client, given its version."""
        known = self._newest.get(client_id)
        if known is None or known[0] != version:  # a manifest takes long to decode, and is looked at every second
            known = self._newest[client_id] = (version, self.download(client_id))
        return known[1]

    def confirm(self, manifest: Manifest) -> None:
        """The client has everything of this manifest on its disk."""
        with transaction(self._db, told_again=True):
            self._meet(manifest.client_id)
            self._hold(manifest.client_id, digests_of(manifest))
            self._db.execute(
                "UPDATE clients SET confirmed_version = max(confirmed_version, ?) WHERE client = ?",
                (manifest.version, manifest.client_id),
            )

    def hold(self, client_id: str, digests: set[str]) -> None:
        """A client has these blobs beside what it confirmed before."""
        with transaction(self._db, told_again=True):
            self._meet(client_id)
            self._hold(client_id, self.holdings(client_id) | digests)

    def drop_download(self, client_id: str) -> None:
        """Forget a download whose blobs are damaged; the version goes on rising."""
        with transaction(self._db):
            download = self.download(client_id)
            self._newest.pop(client_id, None)
            self.versions.forget(client_id, -1 if download is None else download.version)
            self._db.execute("UPDATE clients SET download = NULL WHERE client = ?", (client_id,))

    def confirmed_version(self, client_id: str) -> int:
        """Version of the newest download that a client confirmed; 0 for none."""
        row = self._db.execute("SELECT confirmed_version FROM clients WHERE client = ?", (client_id,)).fetchone()
        return 0 if row is None else int(row[0])

    def holdings(self, client_id: str) -> set[str]:
        """Digests that a client confirmed to hold; it may have lost them since, then it asks."""
        row = self._db.execute("SELECT holdings FROM clients WHERE client = ?", (client_id,)).fetchone()
        return set() if row is None else set(msgspec.msgpack.decode(row[0], type=list[str]))

    def clients(self) -> tuple[str, ...]:
        """Every client that ever got or sent anything, sorted."""
        return tuple(client for (client,) in self._db.execute("SELECT client FROM clients ORDER BY client"))

    def places(self) -> frozenset[str]:
        """Clients that count for ``Caps.max_clients``, and who has a place whatever their number.

        Those of ``clients`` that nobody has revoked; in a fleet that enrols whoever is enrolled, and nobody else.
        """
        return self.roll.enrolled or frozenset(self.clients()) - self.roll.revoked

    def has_place(self, client_id: str) -> bool:
        """Whether this client is one of ``places``; as quick in a large fleet as in a small one."""
        if self.roll.enrolled:
            return client_id in self.roll.enrolled
        is_there = self._db.execute("SELECT 1 FROM clients WHERE client = ?", (client_id,)).fetchone() is not None
        return is_there and client_id not in self.roll.revoked

    def members(self) -> frozenset[str]:
        """Clients that belong to the fleet: enrolled, or they confirmed what they were sent, or uploaded."""
        return frozenset(client for client, standing in self.roll.refresh().items() if standing.is_member)

    @contextlib.contextmanager
    def doing(self, deed: Deed) -> Iterator[None]:
        """Make what an operator does, and that it was done, one transaction."""
        with transaction(self._db):
            yield
            self.deeds.add(deed)
        self.roll.refresh()

    def exclude(self, client_id: str, exclusion: Exclusion) -> bool:
        """Let a client take no part any more; returns whether the open round lost its upload by that."""
        with transaction(self._db):
            self.roll.exclude(client_id, exclusion)
            return self.withdraw(client_id)

    def course(self) -> Course:
        """Whether the fleet runs, is paused, or will be after the round."""
        return Course(self._fact("course", str) or Course.RUNNING.value)

    def set_course(self, course: Course) -> None:
        """Run, pause, or pause after the round."""
        with transaction(self._db):
            self._set_fact("course", course.value)

    def begun(self, index: int) -> bool:
        """Whether a round that had to wait has begun."""
        return self._fact("begun", int) == index

    def begin(self, index: int) -> None:
        """Let a round that had to wait begin."""
        with transaction(self._db):
            self._set_fact("begun", index)

    def extension_s(self, index: int) -> float:
        """By how many seconds operators extended a round."""
        found = self._fact("extension", tuple[int, float])
        return found[1] if found is not None and found[0] == index else 0.0

    def extend(self, index: int, by_s: float) -> None:
        """Extend a round by so many seconds more."""
        with transaction(self._db):
            self._set_fact("extension", (index, self.extension_s(index) + by_s))

    def forget(self, client_id: str) -> None:
        """Forget a client that never was a member; whoever comes next begins with a higher version than it had."""
        row = self._db.execute("SELECT version FROM clients WHERE client = ?", (client_id,)).fetchone()
        if row is None or client_id in self.members():
            return
        self._newest.pop(client_id, None)
        with transaction(self._db):
            self._db.execute("DELETE FROM clients WHERE client = ?", (client_id,))
            self.versions.forget(client_id)
            self._set_fact("lowest_version", max(row[0], self._fact("lowest_version", int) or 0))

    def referenced(self) -> set[str]:
        """Digests of all blobs that must stay: state, graphs, downloads, earlier ones too, uploads of this round."""
        keep = {entry.digest for entry in self.graphs()} | self.versions.digests()
        initial, state = self.initial(), self.state()
        if initial is not None:
            keep.add(initial.digest)
        if state is not None:
            keep |= state.digests()
        for client_id in self.clients():
            download = self.download(client_id)
            keep |= digests_of(download) if download else set()
        for manifest in self.uploads(self.round().index).values():
            keep |= digests_of(manifest)
        return keep

    def _fact(self, name: str, kind: type[_T]) -> _T | None:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=kind | None)

    def _set_fact(self, name: str, value: object) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, msgspec.msgpack.encode(value)))

    def _meet(self, client_id: str) -> None:
        lowest = self._fact("lowest_version", int) or 0
        self._db.execute("INSERT OR IGNORE INTO clients (client, version) VALUES (?, ?)", (client_id, lowest))

    def _hold(self, client_id: str, digests: set[str]) -> None:
        self._db.execute(
            "UPDATE clients SET holdings = ? WHERE client = ?", (msgspec.msgpack.encode(sorted(digests)), client_id)
        )

    def _write_download(self, draft: Manifest) -> Manifest:
        self._meet(draft.client_id)
        (version,) = self._db.execute("SELECT version FROM clients WHERE client = ?", (draft.client_id,)).fetchone()
        manifest = msgspec.structs.replace(draft, version=max(version, self.epoch() << COUNTER_BITS) + 1)
        self._db.execute(
            "UPDATE clients SET version = ?, download = ? WHERE client = ?",
            (manifest.version, msgspec.msgpack.encode(manifest), draft.client_id),
        )
        self.versions.add(manifest)
        return manifest


def _not_there_yet(db: sqlite3.Connection) -> str:
    """Return what makes, for who only reads, the tables that an earlier version's store gets at its next start."""
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    every = [one for one in _TABLES.split(";") if one.strip()]
    missing = [one for one in every if one.split()[5] not in there]
    return ";".join(one.replace("TABLE IF NOT EXISTS", "TEMP TABLE") for one in missing)


def added_classes(data_dir: Path) -> tuple[str, ...]:
    """Return the classes that the fleet of a data dir learns beside those it was founded with; none before a run.

    Raises:
        SettingsError: The database is damaged.
    """
    if not (data_dir / DATABASE).is_file():
        return ()
    with contextlib.closing(AggregatorStore(data_dir, read_only=True)) as store:
        return store.added_classes()


def digests_of(manifest: Manifest) -> set[str]:
    """Every blob that a manifest lists."""
    return {entry.digest for entry in manifest.blobs}

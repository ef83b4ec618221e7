"""Who belongs to the fleet and what each is to its rounds: one durable table, and what a round expects of it.

A member was enrolled, or has shown that it is one: it confirmed what it was sent, or uploaded. An exclusion belongs to
the name: it outlives restarts, connections and certificates.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from replayfleet.aggregator.records.database import transaction

NO_CLIENTS = frozenset({"aggregator", "operator"})
"""Enrolled names that are no clients."""

_COLUMNS = (
    "client TEXT PRIMARY KEY, enrolled_at REAL, revoked_at REAL, trains INTEGER NOT NULL DEFAULT 1, seen_at REAL, "
    "excluded_at REAL, excluded_by TEXT, excluded_because TEXT"
)
_TABLE = f"CREATE TABLE IF NOT EXISTS members ({_COLUMNS}) WITHOUT ROWID"
_ALL = """
SELECT names.client, enrolled_at, revoked_at, coalesce(trains, 1), seen_at, excluded_at, excluded_by, excluded_because,
    coalesce(version, 0), coalesce(confirmed_version, 0), coalesce(confirmed_version > 0 OR holdings != x'90', 0)
    OR names.client IN (SELECT client FROM uploads)
FROM (SELECT client FROM clients UNION SELECT client FROM members UNION SELECT client FROM uploads) AS names
LEFT JOIN members ON members.client = names.client LEFT JOIN clients ON clients.client = names.client
ORDER BY names.client
"""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """That a client takes no part.

    Attributes:
        at: Unix time.
        by: who decided so.
        because: why, in the operator's words; may be empty.
    """

    at: float
    by: str
    because: str

    @property
    def spoken(self) -> str:
        """Who decided so, and why."""
        return f"{self.by}: {self.because}" if self.because else self.by


@dataclass(frozen=True, slots=True)
class Standing:
    """One client as the store knows it.

    Attributes:
        enrolled_at: Unix time; None for one that no operator enrolled.
        revoked_at: Unix time; None for one whose certificate and signature count.
        trains: False for one that announced that it only serves.
        seen_at: Unix time at which it was heard of, to a minute; None for never.
        exclusion: None for one that takes part.
        version: of its newest download; 0 for none.
        confirmed_version: the newest one that it confirmed; 0 for none.
        took_part: it confirmed what it was sent, or uploaded.
        is_stranger: its fleet enrols who counts, and this one was never enrolled.
    """

    client: str
    enrolled_at: float | None = None
    revoked_at: float | None = None
    trains: bool = True
    seen_at: float | None = None
    exclusion: Exclusion | None = None
    version: int = 0
    confirmed_version: int = 0
    took_part: bool = False
    is_stranger: bool = False

    @property
    def is_client(self) -> bool:
        """Whether it is one, or was only enrolled as something else."""
        return self.took_part or self.enrolled_at is None or self.client not in NO_CLIENTS

    @property
    def is_member(self) -> bool:
        """Whether it belongs, or belonged, to the fleet; a newcomer doesn't yet."""
        return self.took_part or (self.enrolled_at is not None and self.is_client)

    @property
    def is_expected(self) -> bool:
        """Whether rounds wait for it."""
        counts = self.exclusion is None and self.revoked_at is None and not self.is_stranger
        return self.is_member and self.trains and counts


def expected_uploads(num_clients: int | None, standings: Iterable[Standing]) -> int:
    """Return with how many uploads a round closes at once: those of all members that train, ``num_clients`` at most.

    Places of the planned fleet that nobody has taken yet are waited for; those of members that don't train, are
    excluded or revoked aren't, unless others took them.

    Args:
        num_clients: how many clients the operator planned with; None: as many as there are.
        standings: all clients.
    """
    members = [standing for standing in standings if standing.is_member]
    trainers = sum(standing.is_expected for standing in members)
    if num_clients is None:
        return trainers
    return min(num_clients, trainers + max(0, num_clients - len(members)))


class Roll:
    """The table; one thread uses it.

    Args:
        db: the aggregator's database.

    Attributes:
        standings: what ``refresh`` found last, by client.
        enrolled: of these, the clients that an operator enrolled and hasn't revoked.
        revoked: those whose certificates count no more.
        enrols: whether an operator enrolled any client; then nobody else counts.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.standings: Mapping[str, Standing] = {}
        self.enrolled = self.revoked = frozenset[str]()
        self.enrols = False

    def refresh(self) -> Mapping[str, Standing]:
        """Read the table, which enrolling and revoking change beside a running aggregator."""
        found = {str(row[0]): _standing(row) for row in self._db.execute(_ALL)}
        self.enrols = any(one.enrolled_at is not None and one.is_client for one in found.values())
        self.standings = {
            client: replace(one, is_stranger=True) if self.enrols and one.enrolled_at is None else one
            for client, one in found.items()
        }
        self.revoked = frozenset(client for client, one in self.standings.items() if one.revoked_at is not None)
        members = {client for client, one in self.standings.items() if one.enrolled_at is not None and one.is_client}
        self.enrolled = frozenset(members - self.revoked)
        return self.standings

    def excludes(self, client_id: str) -> bool:
        """Whether this client takes no part; as of the last ``refresh``."""
        found = self.standings.get(client_id)
        return found is not None and found.exclusion is not None

    def excluded(self) -> tuple[str, ...]:
        """Who takes no part, sorted; as of the last ``refresh``."""
        return tuple(client for client, standing in self.standings.items() if standing.exclusion is not None)

    def exclude(self, client_id: str, exclusion: Exclusion) -> None:
        """Exclude a client; ``refresh`` shows it. One that is excluded already gets the new reason."""
        self._change(
            client_id,
            "excluded_at = ?, excluded_by = ?, excluded_because = ?",
            (exclusion.at, exclusion.by, exclusion.because),
        )

    def readmit(self, client_id: str) -> None:
        """Let a client take part again; ``refresh`` shows it."""
        self._change(client_id, "excluded_at = NULL, excluded_by = NULL, excluded_because = NULL", ())

    def saw(self, seen: Mapping[str, tuple[float, bool]]) -> None:
        """Note when members were heard of, as Unix time, and whether they train."""
        with transaction(self._db):
            for client_id, (at, trains) in sorted(seen.items()):
                self._change(client_id, "seen_at = ?, trains = ?", (at, int(trains)))
        self.refresh()

    def _change(self, client_id: str, what: str, values: tuple[object, ...]) -> None:
        with transaction(self._db):
            self._db.execute("INSERT OR IGNORE INTO members (client) VALUES (?)", (client_id,))
            self._db.execute(f"UPDATE members SET {what} WHERE client = ?", (*values, client_id))  # noqa: S608


def make_members_table(db: sqlite3.Connection, *, read_only: bool = False) -> None:
    """Make the table, or give one of an earlier version the columns that it lacks; who only reads has it in memory."""
    if any(row[1] == "trains" for row in db.execute("PRAGMA table_info(members)")):
        return
    is_old = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'members'").fetchone() is not None
    fill = "INSERT INTO {} (client, enrolled_at, revoked_at) SELECT * FROM {}"  # nobody else stood there until then
    if read_only:
        db.execute(_TABLE.replace("TABLE IF NOT EXISTS", "TEMP TABLE"))
        if is_old:
            db.execute(fill.format("temp.members", "main.members"))
        return
    with transaction(db):
        if is_old:
            db.execute("ALTER TABLE members RENAME TO enrolled")
        db.execute(_TABLE)
        if is_old:
            db.execute(fill.format("members", "enrolled"))
            db.execute("DROP TABLE enrolled")


def _standing(row: tuple[object, ...]) -> Standing:
    client, enrolled_at, revoked_at, trains, seen_at, at, by, because, version, confirmed, took_part = row
    exclusion = None if at is None else Exclusion(float(str(at)), str(by), str(because or ""))
    return Standing(
        str(client),
        _time(enrolled_at),
        _time(revoked_at),
        bool(trains),
        _time(seen_at),
        exclusion,
        int(str(version)),
        int(str(confirmed)),
        bool(took_part),
    )


def _time(value: object) -> float | None:
    return None if value is None else float(str(value))

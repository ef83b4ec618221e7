"""Members and their certificates: in the aggregator's database, beside a running aggregator; no change is half."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from replayfleet.aggregator.records.deeds import Deed, Deeds, who_is
from replayfleet.aggregator.records.roll import make_members_table
from replayfleet.aggregator.store import DATABASE
from replayfleet.federation.errors import SettingsError

BUSY_S = 30.0
"""A running aggregator writes for moments."""
_Statement: TypeAlias = tuple[str, Sequence[object]]
_SCHEMA = """
CREATE TABLE IF NOT EXISTS certificates (
    serial TEXT PRIMARY KEY, client TEXT NOT NULL, issued_at REAL NOT NULL, ends_at REAL NOT NULL,
    expires_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    digest TEXT PRIMARY KEY, client TEXT NOT NULL, revoked INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requested (client TEXT PRIMARY KEY) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate of a member.

    Attributes:
        serial: its number, which is never used again.
        issued_at: Unix time.
        ends_at: from then on it counts no more: its expiry, or earlier if it was revoked or replaced.
        expires_at: its own expiry.
        keys: digests of the public keys that its member brought with it, to write; none where it was read.
        requested: its member made its key, and asked for it, to write.
    """

    serial: int
    issued_at: float
    ends_at: float
    expires_at: float
    keys: tuple[str, ...] = ()
    requested: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """Somebody who belongs, or belonged, to the fleet.

    Attributes:
        client: client id, ``aggregator`` or ``operator``.
        enrolled_at: Unix time.
        revoked_at: Unix time; None for one who still belongs to it.
        certificates: the newest first.
    """

    client: str
    enrolled_at: float
    revoked_at: float | None
    certificates: tuple[Issued, ...]


class Members:
    """The table.

    Args:
        folder: the aggregator's data dir, whose database is there.

    Raises:
        SettingsError: The database can't be opened.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / DATABASE
        try:
            uri = f"{path.absolute().as_uri()}?mode=rw"
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S)
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            make_members_table(self._db)
        except sqlite3.Error as error:
            raise SettingsError(f"{path}: can't be opened ({error})") from error

    def close(self) -> None:
        """Close it. Idempotent."""
        self._db.close()

    def all(self) -> tuple[Member, ...]:
        """Everybody who ever was enrolled, sorted."""
        issued = defaultdict[str, list[Issued]](list)
        question = "SELECT client, serial, issued_at, ends_at, expires_at FROM certificates ORDER BY issued_at DESC"
        for client, serial, *times in self._db.execute(question):
            issued[client].append(Issued(int(serial), *times))
        rows = self._db.execute(
            "SELECT client, enrolled_at, revoked_at FROM members WHERE enrolled_at IS NOT NULL ORDER BY client"
        )
        return tuple(Member(client, since, until, tuple(issued[client])) for client, since, until in rows)

    def get(self, client: str) -> Member | None:
        """One of them; None if there never was such a one."""
        return next((member for member in self.all() if member.client == client), None)

    def enrol(self, client: str, certificate: Issued, now: float) -> None:
        """Take a client in, or again after it was revoked, with its first certificate. Excluded stays excluded."""
        enrolled = (
            "INSERT INTO members (client, enrolled_at, revoked_at) VALUES (?, ?, NULL) ON CONFLICT (client) DO UPDATE "
            "SET enrolled_at = excluded.enrolled_at, revoked_at = NULL"
        )
        done = _deed(now, "enroll", client, f"{client} is a member from now on")
        self._change((enrolled, (client, now)), *self._issue(client, certificate), deed=done)

    def renew(self, client: str, certificate: Issued, until: float) -> None:
        """Give a member another certificate; those before count until ``until`` at most."""
        ended = "UPDATE certificates SET ends_at = min(ends_at, ?) WHERE client = ?"
        done = _deed(certificate.issued_at, "renew", client, f"{client} has a new certificate")
        self._change((ended, (until, client)), *self._issue(client, certificate), deed=done)

    def revoke(self, client: str, now: float) -> None:
        """Shut a client out; all its certificates end."""
        # Not at ``now``, which a clock that is ahead puts off.
        revoked = ("UPDATE members SET revoked_at = ? WHERE client = ?", (now, client))
        ended = "UPDATE certificates SET ends_at = min(ends_at, issued_at, ?) WHERE client = ?"
        keys = ("UPDATE keys SET revoked = 1 WHERE client = ?", (client,))
        done = _deed(now, "revoke", client, f"{client} is shut out: its certificates and its signature count no more")
        self._change(revoked, (ended, (now, client)), keys, deed=done)

    def keeper(self, key: str) -> tuple[str, bool] | None:
        """Who had the key of this digest first, and whether it was revoked; None for one never seen."""
        row = self._db.execute("SELECT client, revoked FROM keys WHERE digest = ?", (key,)).fetchone()
        return None if row is None else (str(row[0]), bool(row[1]))

    def holds_its_key(self, client: str) -> bool:
        """Whether its newest certificate is for a key that it made."""
        return self._db.execute("SELECT 1 FROM requested WHERE client = ?", (client,)).fetchone() is not None

    def keyless(self) -> tuple[Member, ...]:
        """Members of an earlier version, which kept no keys."""
        known = {client for (client,) in self._db.execute("SELECT DISTINCT client FROM keys")}
        return tuple(member for member in self.all() if member.client not in known)

    def learn(self, client: str, keys: Iterable[str], *, revoked: bool) -> None:
        """Note keys of a member; those that are known stay whose they are."""
        self._change(*_kept(client, keys, revoked=revoked))

    def ended(self, now: float) -> set[int]:
        """Serial numbers of certificates that count no more, though they haven't expired."""
        rows = self._db.execute("SELECT serial FROM certificates WHERE ends_at <= ? AND expires_at > ?", (now, now))
        return {int(serial) for (serial,) in rows}

    @staticmethod
    def _issue(client: str, issued: Issued) -> list[_Statement]:
        # The newest is what the member has. One that a clock ahead of time dated wasn't issued after this one.
        former = (
            "UPDATE certificates SET issued_at = min(issued_at, ? - 1) WHERE client = ?",
            (issued.issued_at, client),
        )
        row = (str(issued.serial), client, issued.issued_at, issued.ends_at, issued.expires_at)
        text = "INSERT INTO certificates (serial, client, issued_at, ends_at, expires_at) VALUES (?, ?, ?, ?, ?)"
        noted = ("DELETE FROM requested WHERE client = ?", (client,))
        if issued.requested:
            noted = ("INSERT OR IGNORE INTO requested VALUES (?)", (client,))
        return [former, (text, row), noted, *_kept(client, issued.keys)]

    def _change(self, *statements: _Statement, deed: Deed | None = None) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for text, values in statements:
                self._db.execute(text, values)
            if deed is not None:
                Deeds(self._db).add(deed)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise SettingsError(f"the table of members can't be written ({error}); nothing was changed") from error


def _deed(at: float, verb: str, client: str, detail: str) -> Deed:
    return Deed(at, who_is(os.getpid(), os.getuid()), verb, client, detail)


def _kept(client: str, keys: Iterable[str], *, revoked: bool = False) -> list[_Statement]:
    text = "INSERT OR IGNORE INTO keys (digest, client, revoked) VALUES (?, ?, ?)"
    return [(text, (key, client, int(revoked))) for key in keys]


def expiries(folder: Path) -> dict[str, float]:
    """Return member -> Unix time at which its newest certificate ends; of a fleet that enrols nobody nothing."""
    try:
        path = (folder / DATABASE).absolute().as_uri()
        question = (
            "SELECT client, ends_at, max(issued_at) FROM certificates JOIN members USING (client) "
            "WHERE revoked_at IS NULL GROUP BY client"
        )
        with contextlib.closing(sqlite3.connect(f"{path}?mode=ro", uri=True, timeout=1.0)) as database:
            return {client: ends_at for client, ends_at, _ in database.execute(question)}
    except sqlite3.Error:
        return {}

"""What operators did, in the same transaction as the deed itself, so that no crash parts the two."""

from __future__ import annotations

import contextlib
import pwd
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = 1000
"""Deeds; a journal that has been put aside twice knows none of before."""
_NOBODY = (1 << 32) - 1

DEEDS_TABLE = """
CREATE TABLE IF NOT EXISTS deeds (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, who TEXT NOT NULL, verb TEXT NOT NULL,
    client TEXT NOT NULL, detail TEXT NOT NULL, told INTEGER NOT NULL DEFAULT 0)
"""


@dataclass(frozen=True, slots=True)
class Deed:
    """One thing that an operator did.

    Attributes:
        at: Unix time.
        who: as the way by which they came knows them.
        verb: for example ``exclude``.
        client: whom it is about; empty for the whole fleet.
        detail: what was done, in words.
        number: counts deeds; 0 until it is written.
    """

    at: float
    who: str
    verb: str
    client: str
    detail: str
    number: int = 0

    @property
    def event(self) -> dict[str, Any]:
        """What the journal says of it, as an event of kind ``operator``."""
        about = {"client": self.client} if self.client else {}
        return {"who": self.who, "verb": self.verb, "deed": self.number, "detail": self.detail, **about}


class Deeds:
    """The table; one thread uses it.

    Args:
        db: the aggregator's database.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def add(self, deed: Deed) -> None:
        """Write a deed; call it in the transaction that does it."""
        self._db.execute(
            "INSERT INTO deeds (at, who, verb, client, detail) VALUES (?, ?, ?, ?, ?)",
            (deed.at, deed.who, deed.verb, deed.client, deed.detail),
        )
        self._db.execute("DELETE FROM deeds WHERE told AND id <= (SELECT max(id) FROM deeds) - ?", (KEPT,))

    def untold(self) -> tuple[Deed, ...]:
        """Deeds that the journal may not know, the oldest first."""
        rows = self._db.execute("SELECT at, who, verb, client, detail, id FROM deeds WHERE NOT told ORDER BY id")
        return tuple(Deed(*row) for row in rows)

    def kept(self) -> tuple[Deed, ...]:
        """All that are still here, the oldest first."""
        rows = self._db.execute("SELECT at, who, verb, client, detail, id FROM deeds ORDER BY id")
        return tuple(Deed(*row) for row in rows)

    def told(self, number: int) -> None:
        """The journal knows this one and those before it."""
        self._db.execute("UPDATE deeds SET told = 1 WHERE NOT told AND id <= ?", (number,))


def who_is(pid: int, uid: int) -> str:
    """Return a name for the journal: of the user, and of the one who had logged in if that is another."""
    with contextlib.suppress(OSError, ValueError):
        login = int(Path(f"/proc/{pid}/loginuid").read_text())
        if login not in {uid, _NOBODY}:
            return f"{_user(login)} as {_user(uid)}"
    return _user(uid)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"

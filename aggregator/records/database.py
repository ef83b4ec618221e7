"""One connection, transactions that may be parts of larger ones."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Make what happens inside all or nothing; inside another transaction it is a part of that one.

    Args:
        db: opened with ``isolation_level=None``.
    """
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk has rolled back already
            db.execute("ROLLBACK")
        raise

"""One connection, transactions that may be parts of larger ones."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator


@contextlib.contextmanager
def transaction(db: sqlite3.Connection, *, told_again: bool = False) -> Iterator[None]:
    """Make what happens inside all or nothing; inside another transaction it is a part of that one.

    Args:
        db: opened with ``isolation_level=None``, its journal a write-ahead log.
        told_again: whether somebody says it again if the power fails now: the disk is waited for by the next
            transaction that nobody would repeat, and with it comes all that was before. A process that dies loses
            nothing.
    """
    if db.in_transaction:
        yield
        return
    if told_again:
        db.execute("PRAGMA synchronous = NORMAL")
    try:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk has rolled back already
            db.execute("ROLLBACK")
        raise
    finally:
        if told_again:
            db.execute("PRAGMA synchronous = FULL")

"""Transactions of the aggregator's database."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from replayfleet.aggregator.records.database import transaction

NORMAL, FULL = 1, 2


@pytest.fixture
def db(tmp_path: Path) -> sqlite3.Connection:
    made = sqlite3.connect(tmp_path / "db", isolation_level=None)
    made.execute("PRAGMA journal_mode=WAL")
    made.execute("PRAGMA synchronous=FULL")
    made.execute("CREATE TABLE numbers (number)")
    return made


def synchronous(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA synchronous").fetchone()[0])


def test_only_what_is_told_again_does_not_wait_for_the_disk(db: sqlite3.Connection) -> None:
    with transaction(db):
        assert synchronous(db) == FULL
    with transaction(db, told_again=True):
        assert synchronous(db) == NORMAL
        db.execute("INSERT INTO numbers VALUES (1)")
    assert synchronous(db) == FULL
    assert db.execute("SELECT number FROM numbers").fetchall() == [(1,)]


def test_a_part_of_a_larger_transaction_is_as_durable_as_that(db: sqlite3.Connection) -> None:
    with transaction(db), transaction(db, told_again=True):
        assert synchronous(db) == FULL


def test_what_fails_is_undone_and_the_next_one_waits_for_the_disk(db: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"), transaction(db, told_again=True):
        db.executemany("INSERT INTO numbers VALUES (?)", [(1,)]).execute("INSERT INTO figures VALUES (1)")
    assert synchronous(db) == FULL
    assert db.execute("SELECT number FROM numbers").fetchall() == []

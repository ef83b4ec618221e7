"""Who belongs to the fleet, and how many uploads a round waits for."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from replayfleet.aggregator.cli import cli
from replayfleet.aggregator.members.table import Issued, Members
from replayfleet.aggregator.records.deeds import Deed
from replayfleet.aggregator.records.roll import Exclusion, Standing, expected_uploads
from replayfleet.aggregator.store import DATABASE, AggregatorStore
from replayfleet.federation.wire.protocol.messages import FleetSpec, Manifest

SPEC = FleetSpec("street", "fedavg", {}, {}, 0)
BAD = Exclusion(5.0, "ana", "it sends noise")
MEMBER = Standing("a", took_part=True)
OUT = dataclasses.replace(MEMBER, exclusion=BAD)
SERVES = dataclasses.replace(MEMBER, trains=False)
REVOKED = dataclasses.replace(MEMBER, enrolled_at=1.0, revoked_at=2.0)
STRANGER = dataclasses.replace(MEMBER, is_stranger=True)
NEWCOMER = Standing("a")


@pytest.fixture
def store(tmp_path: Path) -> AggregatorStore:
    made = AggregatorStore(tmp_path)
    made.found(SPEC, 0.0)
    return made


def deed(verb: str = "exclude") -> Deed:
    return Deed(5.0, "ana", verb, "a", "what was done")


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ([], 5),
        ([MEMBER] * 5, 5),
        ([MEMBER] * 4 + [OUT], 4),
        ([MEMBER] * 4 + [SERVES], 4),
        ([MEMBER] * 4 + [REVOKED], 4),
        ([MEMBER] * 4 + [STRANGER], 4),
        ([MEMBER] * 5 + [OUT], 5),
        ([MEMBER] * 9, 5),
        ([MEMBER] * 2, 5),
        ([MEMBER, OUT], 4),
        ([OUT] * 5, 0),
        ([NEWCOMER] * 5, 5),
        ([dataclasses.replace(NEWCOMER, exclusion=BAD)] * 2 + [MEMBER] * 5, 5),
    ],
    ids=str,
)
def test_a_round_waits_for_places_that_are_free_and_for_members_that_train(
    standings: list[Standing], expected: int
) -> None:
    assert expected_uploads(5, standings) == expected


def test_without_a_planned_number_a_round_waits_for_all_members_that_train() -> None:
    assert expected_uploads(None, [MEMBER] * 7 + [OUT, SERVES, REVOKED, STRANGER, NEWCOMER]) == 7


def test_an_excluded_client_loses_its_upload_of_the_open_round_and_stays_excluded_after_a_restart(
    store: AggregatorStore, tmp_path: Path
) -> None:
    for client in ("a", "b"):
        store.accept_upload(Manifest("up", "street", client, 0, 1, ()), 1, 0)
    with store.doing(deed()):
        assert store.exclude("a", BAD)
    assert store.round().accepted == ("b",)
    store.close()
    again = AggregatorStore(tmp_path)
    assert again.members() == {"b"}, "it never confirmed anything, and its upload is gone"
    assert again.roll.standings["a"].exclusion == BAD
    assert again.roll.excluded() == ("a",)
    with again.doing(deed("readmit")):
        again.roll.readmit("a")
    assert again.roll.excluded() == ()
    assert [found.verb for found in again.deeds.untold()] == ["exclude", "readmit"]


def test_an_upload_that_is_being_aggregated_stays(store: AggregatorStore) -> None:
    store.accept_upload(Manifest("up", "street", "a", 0, 1, ()), 1, 0)
    store.close_round(0, 1.0)
    assert not store.exclude("a", BAD)
    assert set(store.uploads(0)) == {"a"}


def test_a_new_certificate_with_the_old_name_ends_no_exclusion(store: AggregatorStore, tmp_path: Path) -> None:
    table = Members(tmp_path)
    table.enrol("a", Issued(1, 0.0, 9.0, 9.0), 1.0)
    store.exclude("a", BAD)
    table.revoke("a", 2.0)
    table.enrol("a", Issued(2, 3.0, 9.0, 9.0), 3.0)
    found = store.roll.refresh()["a"]
    assert (found.exclusion, found.enrolled_at, found.revoked_at) == (BAD, 3.0, None)


def test_who_is_enrolled_is_a_member_and_operators_are_no_clients(store: AggregatorStore, tmp_path: Path) -> None:
    table = Members(tmp_path)
    for number, client in enumerate(("aggregator", "operator", "a")):
        table.enrol(client, Issued(number, 0.0, 9.0, 9.0), 1.0)
    store.roll.saw({"b": (7.0, False)})
    assert store.members() == {"a"}
    assert [member.client for member in table.all()] == ["a", "aggregator", "operator"]
    assert (store.roll.standings["b"].seen_at, store.roll.standings["b"].trains) == (7.0, False)


def test_once_a_client_was_enrolled_no_round_waits_for_any_other(store: AggregatorStore, tmp_path: Path) -> None:
    table, roll = Members(tmp_path), store.roll
    store.hold("b", {"1" * 64})

    def counts() -> tuple[bool, set[str], set[str], bool]:
        standings = roll.refresh()
        return roll.enrols, {*roll.enrolled}, {*roll.revoked}, standings["b"].is_expected

    table.enrol("operator", Issued(1, 0.0, 9.0, 9.0), 1.0)
    assert counts() == (False, set(), set(), True), "an operator is no client"
    table.enrol("a", Issued(2, 0.0, 9.0, 9.0), 1.0)
    assert counts() == (True, {"a"}, set(), False)
    table.revoke("a", 2.0)
    assert counts() == (True, set(), {"a"}, False), "and the fleet is not open again"


def test_a_table_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / DATABASE) as db:
        db.execute(
            "CREATE TABLE members (client TEXT PRIMARY KEY, enrolled_at REAL NOT NULL, revoked_at REAL) WITHOUT ROWID"
        )
        db.execute("INSERT INTO members VALUES ('a', 1.0, NULL), ('b', 1.0, 2.0)")
    db.close()
    standings = AggregatorStore(tmp_path).roll.refresh()
    assert {name: standing.revoked_at for name, standing in standings.items()} == {"a": None, "b": 2.0}
    assert standings["a"].is_expected
    assert AggregatorStore(tmp_path).members() == {"a", "b"}


def test_who_looks_at_the_members_of_an_earlier_version_changes_nothing(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / DATABASE) as db:
        db.execute("CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        db.execute("CREATE TABLE members (client TEXT PRIMARY KEY, enrolled_at REAL NOT NULL, revoked_at REAL)")
        db.execute("INSERT INTO members VALUES ('a', 1.0, NULL), ('b', 1.0, 2.0)")
    db.close()
    before = (tmp_path / DATABASE).read_bytes()
    done = CliRunner().invoke(cli, ["clients", "--data-dir", str(tmp_path)], catch_exceptions=False)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["client", "a", "b"]
    assert (tmp_path / DATABASE).read_bytes() == before


def test_a_deed_and_what_it_does_are_one(store: AggregatorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.deeds, "add", Mock(side_effect=sqlite3.OperationalError("database or disk is full")))
    with pytest.raises(sqlite3.OperationalError), store.doing(deed()):
        store.exclude("a", BAD)
    assert "a" not in store.roll.refresh()

"""Whose word an aggregator takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from replayfleet.aggregator.members.table import Issued, Members
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.aggregator.trust.key_ring import MAX_MET, MAX_TURNED_AWAY, OTHER_S, KeyRing
from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.topics import parse_topic, topic_of
from replayfleet.federation.wire.transport.seal import Kind, Signer, unseal


class Fleet:
    """A ring over a store on disk."""

    def __init__(self, folder: Path) -> None:
        self.store, self.live, self.own = AggregatorStore(folder), set[str](), a_signer()
        self.others: list[str] = []
        self.ring = KeyRing(self.own, self.store, self.live.__contains__, self.others.append)

    def takes(self, signer: Signer, channel: str, client: str = "cam-1", kind: Kind = Kind.SAID) -> bool:
        topic = topic_of("yard", "round") if channel == "round" else topic_of("yard", channel, client)
        return self.ring.takes(parse_topic(topic), unseal(topic, signer.seal(topic, b"\x01", kind)), 0.0)


def a_signer() -> Signer:
    return Signer(Ed25519PrivateKey.generate())


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_who_comes_first_has_the_name_while_it_lives(fleet: Fleet) -> None:
    cam, thief = a_signer(), a_signer()
    assert not fleet.takes(cam, "up"), "it introduces itself with its presence"
    assert not fleet.takes(cam, "state", kind=Kind.WILL)
    assert fleet.takes(cam, "state")
    assert fleet.takes(cam, "up")
    fleet.live.add("cam-1")
    for channel in ("state", "up", "control"):
        with pytest.raises(MalformedMessage, match="another key than that of client 'cam-1'"):
            fleet.takes(thief, channel)
    assert fleet.others == ["cam-1"] * 3, "an operator may look for a device that was given another's name"
    assert fleet.ring.other_uses("cam-1", 1.0)
    assert not fleet.ring.other_uses("cam-1", OTHER_S), "one that is off is looked for again"
    assert fleet.takes(cam, "state")
    assert not fleet.ring.other_uses("cam-1", 1.0)


def test_a_client_that_lost_its_disk_comes_back_with_another_key_once_the_former_is_gone(fleet: Fleet) -> None:
    before, after = a_signer(), a_signer()
    assert fleet.takes(before, "state")
    fleet.ring.keep("cam-1")
    assert fleet.store.signing_key("cam-1") == before.public_key
    with pytest.raises(MalformedMessage, match="another key"):
        fleet.takes(after, "up")  # before it says that it is there
    assert fleet.takes(after, "state")
    assert fleet.takes(after, "up"), "before it confirmed anything"
    fleet.ring.keep("cam-1")
    assert fleet.store.signing_key("cam-1") == after.public_key


def test_the_key_of_who_was_enrolled_is_replaced_by_nobody_but_the_operator(fleet: Fleet) -> None:
    cam, thief = a_signer(), a_signer()
    fleet.store.pin("cam-1", cam.public_key)
    with pytest.raises(MalformedMessage, match=r"another key.*then `aggregator revoke cam-1` and `aggregator enroll"):
        fleet.takes(thief, "state")
    fleet.store.pin("cam-1", thief.public_key, enrolled=False)
    assert fleet.takes(cam, "up")
    fleet.store.pin("cam-1", thief.public_key)
    assert fleet.takes(thief, "up")


def test_a_fleet_whose_first_client_was_enrolled_takes_no_strangers(fleet: Fleet) -> None:
    fleet.store.pin("cam-1", a_signer().public_key)
    with pytest.raises(MalformedMessage, match="isn't enrolled; `aggregator enroll cam-2`"):
        fleet.takes(a_signer(), "state", "cam-2")


def test_who_came_before_the_first_enrolment_and_who_is_revoked_count_no_more(fleet: Fleet, tmp_path: Path) -> None:
    table, signers = Members(tmp_path), {name: a_signer() for name in ("cam-1", "cam-2")}
    for name, signer in signers.items():
        assert fleet.takes(signer, "state", name)
        fleet.ring.keep(name)
    table.enrol("cam-1", Issued(1, 0.0, 9e9, 9e9), 1.0)
    fleet.store.roll.refresh()
    assert fleet.takes(signers["cam-1"], "up")
    with pytest.raises(MalformedMessage, match="'cam-2' isn't enrolled"):
        fleet.takes(signers["cam-2"], "up", "cam-2")
    table.revoke("cam-1", 2.0)
    fleet.store.roll.refresh()
    with pytest.raises(MalformedMessage, match="'cam-1' is revoked; `aggregator enroll cam-1` takes it in again"):
        fleet.takes(signers["cam-1"], "up")
    assert fleet.others == [], "it is no other device"
    assert fleet.ring.turned_away() == ["cam-2", "cam-1"], "both are told"
    table.enrol("cam-1", Issued(2, 0.0, 9e9, 9e9), 3.0)
    fleet.store.roll.refresh()
    assert fleet.ring.turned_away() == ["cam-2"]


def test_strangers_that_are_turned_away_cost_a_bounded_place(fleet: Fleet, tmp_path: Path) -> None:
    Members(tmp_path).enrol("cam-1", Issued(1, 0.0, 9e9, 9e9), 1.0)
    fleet.store.roll.refresh()
    stranger = a_signer()
    for number in range(MAX_TURNED_AWAY + 10):
        with pytest.raises(MalformedMessage, match="isn't enrolled"):
            fleet.takes(stranger, "state", f"ghost-{number}")
    assert len(fleet.ring.turned_away()) == MAX_TURNED_AWAY
    assert fleet.ring.turned_away()[-1] == f"ghost-{MAX_TURNED_AWAY + 9}"


def test_a_key_that_was_met_before_its_client_was_enrolled_is_forgotten_by_that(fleet: Fleet) -> None:
    rogue, enrolled = a_signer(), a_signer()
    assert fleet.takes(rogue, "state")
    fleet.store.pin("cam-1", enrolled.public_key)
    assert fleet.takes(enrolled, "up")
    with pytest.raises(MalformedMessage, match="another key"):
        fleet.takes(rogue, "state")
    fleet.ring.keep("cam-1")
    assert fleet.store.signing_key("cam-1") == enrolled.public_key


def test_only_the_fleets_own_key_announces_and_it_speaks_for_no_client(fleet: Fleet) -> None:
    assert fleet.takes(fleet.own, "round")
    assert not fleet.takes(fleet.own, "control")
    with pytest.raises(MalformedMessage, match="another key than this fleet's"):
        fleet.takes(a_signer(), "round")


def test_strangers_cost_no_row_and_a_bounded_place(fleet: Fleet) -> None:
    stranger = a_signer()
    for number in range(MAX_MET + 100):
        assert fleet.takes(stranger, "state", f"ghost-{number}")
    assert len(fleet.ring._met) == MAX_MET
    assert fleet.store.signing_key("ghost-1100") is None


def test_a_restored_aggregator_speaks_later_than_its_own_last_word(fleet: Fleet) -> None:
    for said_us in (7 * 10**15, 5):  # a broker may hand on what it kept in any order
        assert fleet.takes(Signer(fleet.own._key, clock_us=lambda at=said_us: at), "round")
        assert fleet.own.now_us() > 7 * 10**15

from __future__ import annotations

from replayfleet.aggregator.presence import DEAD_AFTER_S, Change, PresenceTable
from replayfleet.federation.wire.protocol.messages import Presence


def said(status: str, boot: str = "b1", sequence: int = 1) -> Presence:
    return Presence("cam", status, boot, sequence)


def test_a_client_comes_online_once():
    table = PresenceTable()
    assert table.heard(said("online"), 0) is Change.ONLINE
    assert table.heard(said("online", sequence=2), 5) is Change.NONE
    assert table.live == ("cam",)


def test_a_late_will_of_an_earlier_boot_does_not_mark_a_live_client_dead():
    table = PresenceTable()
    table.heard(said("online", "old", 7), 0)
    assert table.heard(said("online", "new", 1), 1) is Change.ONLINE
    assert table.heard(said("offline", "old", 8), 2) is Change.NONE
    assert table.live == ("cam",)


def test_the_will_of_the_present_boot_counts_whatever_its_sequence():
    table = PresenceTable()
    table.heard(said("online", sequence=9), 0)
    assert table.heard(said("offline", sequence=0), 1) is Change.GONE
    assert table.live == ()


def test_a_repeated_or_older_message_changes_nothing():
    table = PresenceTable()
    table.heard(said("online", sequence=2), 0)
    assert table.heard(said("stopped", sequence=1), 1) is Change.NONE
    assert table.heard(said("online", sequence=2), DEAD_AFTER_S) is Change.NONE
    assert table.ages_s(DEAD_AFTER_S) == {"cam": DEAD_AFTER_S}


def test_silence_decides_and_the_next_heartbeat_brings_the_client_back():
    table = PresenceTable()
    table.heard(said("online"), 0)
    assert table.expire(DEAD_AFTER_S) == []
    assert table.expire(DEAD_AFTER_S + 0.1) == ["cam"]
    assert table.expire(DEAD_AFTER_S + 0.2) == []
    assert table.heard(said("online", sequence=2), 20) is Change.ONLINE

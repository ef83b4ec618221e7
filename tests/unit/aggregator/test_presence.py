from __future__ import annotations

from replayfleet.aggregator.presence import (
    DEAD_AFTER_S,
    GHOST_S,
    MAX_NEWCOMERS,
    MAX_RETURNS,
    RETURNS_PER_S,
    Change,
    PresenceTable,
)
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
    table.members = frozenset({"cam"})
    table.heard(said("online", sequence=2), 0)
    assert table.heard(said("stopped", sequence=1), 1) is Change.NONE
    assert table.heard(said("online", sequence=2), DEAD_AFTER_S) is Change.NONE
    assert table.age_s("cam", DEAD_AFTER_S) == DEAD_AFTER_S


def test_who_had_gone_before_this_process_began_isnt_heard_of_by_the_brokers_memory_of_it():
    table = PresenceTable()
    table.members = frozenset({"cam"})
    table.heard(said("offline"), 7)
    assert (table.age_s("cam", 9), table.heard_of()) == (None, {})
    table.heard(said("online", "b2"), 8)
    assert (table.age_s("cam", 9), table.heard_of()) == (1, {"cam": (8, True)})


def test_silence_decides_and_the_next_heartbeat_brings_the_client_back():
    table = PresenceTable()
    table.heard(said("online"), 0)
    assert table.expire(DEAD_AFTER_S) == []
    assert table.expire(DEAD_AFTER_S + 0.1) == ["cam"]
    assert table.expire(DEAD_AFTER_S + 0.2) == []
    assert table.heard(said("online", sequence=2), 20) is Change.ONLINE


def newcomer(number: int, sequence: int = 1) -> Presence:
    return Presence(f"made-up-{number}", "online", "b1", sequence)


def nothing_new(_: str) -> float:
    return float("-inf")


def test_whoever_has_said_something_that_was_not_looked_at_yet_is_not_silent():
    table = PresenceTable()
    table.heard(said("online"), 0)
    table.unheard = frozenset({"cam"})
    assert table.expire(DEAD_AFTER_S + 1) == []
    assert table.live == ("cam",)
    table.unheard = frozenset({"another"})
    assert table.expire(DEAD_AFTER_S + 1) == ["cam"]


def test_made_up_ids_take_a_few_places_and_members_always_have_theirs():
    table = PresenceTable()
    table.members = frozenset({"cam"})
    changes = [table.heard(newcomer(number), 0) for number in range(3000)]
    assert changes.count(Change.ONLINE) == len(table.live) == MAX_NEWCOMERS
    assert table.num_turned_away == 3000 - MAX_NEWCOMERS
    assert not table.knows("made-up-2999")
    assert table.heard(said("online"), 0) is Change.ONLINE
    assert "cam" in table.live


def test_ghosts_give_their_places_to_those_who_were_turned_away():
    table = PresenceTable()
    for number in range(MAX_NEWCOMERS + 1):
        table.heard(newcomer(number), 0)
    assert table.ghosts(nothing_new, 1) == []
    table.heard(newcomer(MAX_NEWCOMERS, 2), GHOST_S)
    ghosts = table.ghosts(nothing_new, GHOST_S)
    assert len(ghosts) == MAX_NEWCOMERS
    for ghost in ghosts:
        table.forget(ghost)
    assert table.heard(newcomer(MAX_NEWCOMERS, 3), GHOST_S + 5) is Change.ONLINE


def test_a_newcomer_keeps_its_place_while_its_download_advances_or_nobody_waits():
    table = PresenceTable()
    for number in range(MAX_NEWCOMERS):
        table.heard(newcomer(number), 0)
    assert table.ghosts(nothing_new, 2 * GHOST_S) == []
    table.heard(newcomer(99), 2 * GHOST_S)
    slow = {"made-up-7": 1.5 * GHOST_S}
    assert "made-up-7" not in table.ghosts(lambda client: slow.get(client, 0.0), 2 * GHOST_S)


def test_a_newcomer_that_falls_silent_is_forgotten_and_a_member_is_not():
    table = PresenceTable()
    table.members = frozenset({"cam"})
    table.heard(newcomer(1), 0)
    table.heard(said("online"), 0)
    table.expire(DEAD_AFTER_S + 1)
    assert table.ghosts(nothing_new, DEAD_AFTER_S + 1) == ["made-up-1"]


def test_a_stranger_that_is_not_online_takes_no_place():
    table = PresenceTable()
    assert table.heard(said("offline"), 0) is Change.NONE
    assert not table.knows("cam")


def test_a_client_that_restarts_without_end_is_taken_up_now_and_then():
    table = PresenceTable()
    changes = [table.heard(said("online", f"b{number}"), number / 100) for number in range(1000)]
    assert changes.count(Change.ONLINE) <= 1 + MAX_RETURNS + 10 * RETURNS_PER_S
    assert table.heard(said("online", "b1000", 2), 100) is Change.ONLINE


def test_the_least_accurate_is_one_that_is_awaited_live_and_asked_enough_about_this_round() -> None:
    table = PresenceTable()
    table.members = frozenset("abcde")
    for client, status, round_index, answered, right in (
        ("a", "online", 3, 200, 180),
        ("b", "online", 2, 200, 1),  # of the round before
        ("c", "online", 3, 99, 1),  # too few to tell
        ("d", "stopped", 3, 200, 1),
        ("e", "online", 3, 200, 1),  # nobody waits for it
    ):
        heard = Presence(client, status, "b1", 1, round=round_index, labels_answered=answered, labels_right=right)
        table.heard(heard, 0.0)
    assert table.least_accurate("abcd", 3) == (0.9, "a")
    assert table.least_accurate("bcd", 3) == (1.0, "")

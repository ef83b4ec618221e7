from __future__ import annotations

from replayfleet.edge_client.sync.presence import PresenceClock
from replayfleet.federation.wire.protocol.codec import decode
from replayfleet.federation.wire.protocol.messages import ENCODINGS, Presence


def said(payload: bytes) -> Presence:
    message = decode(payload)
    assert isinstance(message, Presence)
    return message


def clock() -> PresenceClock:
    return PresenceClock("fleet", "cam-7", device="jetson", provider="CPUExecutionProvider", boot_id="boot")


def test_presence_is_said_at_every_change_that_lasts_and_as_a_heartbeat() -> None:
    presence = clock()
    assert presence.is_due(("training", 3, 2), now=10.0)
    first = said(presence.say("online", ("training", 3, 2), 10.0))
    assert first == Presence(
        "cam-7", "online", "boot", 1, "jetson", "CPUExecutionProvider", "training", 3, 2, decodes=ENCODINGS
    )
    assert not presence.is_due(("training", 3, 2), now=14.9)
    assert presence.is_due(("training", 3, 2), now=15.0)
    presence.labels_waiting, presence.picture_age_s, presence.answered = 12, 3.5, (20, 17)
    later = said(presence.say("online", ("training", 3, 2), 15.0))
    assert (later.sequence, later.labels_waiting, later.picture_age_s) == (2, 12, 3.5)
    assert (later.labels_answered, later.labels_right) == (20, 17)
    assert not presence.is_due(("uploading", 3, 2), now=15.1)  # and by 15.5 it may be over
    assert presence.is_due(("uploading", 3, 2), now=15.5)
    assert presence.is_due(("training", 4, 2), now=15.1)
    assert presence.is_due(("training", 3, 3), now=15.1)


def test_after_a_reconnect_presence_is_said_at_once() -> None:
    presence = clock()
    presence.say("online", ("training", 3, 2), 10.0)
    assert not presence.is_due(("training", 3, 2), now=10.1)
    presence.forget()
    assert presence.is_due(("training", 3, 2), now=10.1)


def test_the_will_belongs_to_this_boot_and_a_goodbye_follows_everything_said() -> None:
    presence = clock()
    will = presence.will()
    assert will.retain
    assert will.topic.endswith("/clients/cam-7/state")
    gone = said(will.payload)
    assert (gone.status, gone.boot_id) == ("offline", "boot")
    presence.say("online", ("training", 3, 2), 10.0)
    goodbye = said(presence.say("stopped", ("training", 3, 2), 11.0))
    assert (goodbye.status, goodbye.sequence) == ("stopped", 2)


def test_two_boots_are_told_apart() -> None:
    one, two = (PresenceClock("fleet", "cam-7", device="cpu", provider="p") for _ in range(2))
    assert one.boot_id != two.boot_id

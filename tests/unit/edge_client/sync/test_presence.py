from __future__ import annotations

from replayfleet.edge_client.sync.presence import PresenceClock
from replayfleet.federation.wire.protocol.codec import decode
from replayfleet.federation.wire.protocol.messages import ENCODINGS, Presence


def said(payload: bytes | None) -> Presence:
    assert payload is not None
    message = decode(payload)
    assert isinstance(message, Presence)
    return message


def clock() -> PresenceClock:
    return PresenceClock("fleet", "cam-7", device="jetson", provider="CPUExecutionProvider", boot_id="boot")


def test_presence_is_said_at_every_change_and_as_a_heartbeat() -> None:
    presence = clock()
    first = said(presence.due(("training", 3, 2), now=10.0))
    assert first == Presence(
        "cam-7", "online", "boot", 1, "jetson", "CPUExecutionProvider", "training", 3, 2, decodes=ENCODINGS
    )
    assert presence.due(("training", 3, 2), now=14.9) is None
    presence.labels_waiting, presence.picture_age_s, presence.answered = 12, 3.5, (20, 17)
    later = said(presence.due(("training", 3, 2), now=15.0))
    assert (later.sequence, later.labels_waiting, later.picture_age_s) == (2, 12, 3.5)
    assert (later.labels_answered, later.labels_right) == (20, 17)
    assert said(presence.due(("uploading", 3, 2), now=15.1)).phase == "uploading"
    assert presence.due(("uploading", 3, 2), now=15.2) is None


def test_after_a_reconnect_presence_is_said_at_once() -> None:
    presence = clock()
    presence.due(("training", 3, 2), now=10.0)
    presence.forget()
    assert said(presence.due(("training", 3, 2), now=10.1)).sequence == 2


def test_the_will_belongs_to_this_boot_and_a_goodbye_follows_everything_said() -> None:
    presence = clock()
    will = presence.will()
    assert will.retain
    assert will.topic.endswith("/clients/cam-7/state")
    gone = said(will.payload)
    assert (gone.status, gone.boot_id) == ("offline", "boot")
    presence.due(("training", 3, 2), now=10.0)
    goodbye = said(presence.say("stopped", ("training", 3, 2), 11.0))
    assert (goodbye.status, goodbye.sequence) == ("stopped", 2)


def test_two_boots_are_told_apart() -> None:
    one, two = (PresenceClock("fleet", "cam-7", device="cpu", provider="p") for _ in range(2))
    assert one.boot_id != two.boot_id

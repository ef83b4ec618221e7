"""What a client tells the fleet about itself: a retained presence, renewed as a heartbeat."""

from __future__ import annotations

import secrets
from typing import Literal

from replayfleet.federation.service.waits import Wait
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.limits import HEARTBEAT_S, MAX_TEXT
from replayfleet.federation.wire.protocol.messages import ENCODINGS, Presence
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.interfaces import Will

Status = Literal["online", "sleeping", "stopped"]

PASSING_S = 0.5
"""A phase that is over sooner is passed over, but where it came with another round or model."""


class PresenceClock:
    """Decides when to speak: at every change that lasts, and every ``HEARTBEAT_S``.

    Args:
        fleet: fleet name.
        client_id: this client.
        device: the device profile's name.
        provider: the execution provider that was proved.
        trains: whether it takes part in training.
        precision: what it wants its served model to compute in; empty for float32.
        boot_id: tells this process from earlier ones; a late will of an earlier boot is thereby recognised.

    Attributes:
        wait: why it doesn't do its work; goes with the next heartbeat.
        labels_waiting: labelled samples for the next round; -1 if nobody counts them. Likewise.
        answered: labelled things that the round's model was asked about, and how many it answered rightly. Likewise.
        picture_age_s: since the newest picture of the camera that gave none for longest; -1 without one. Likewise.
    """

    def __init__(
        self,
        fleet: str,
        client_id: str,
        *,
        device: str,
        provider: str,
        trains: bool = True,
        precision: str = "",
        boot_id: str | None = None,
    ) -> None:
        self.topic = topic_of(fleet, "state", client_id)
        self._client_id = client_id
        self._device = device
        self._provider = provider
        self.boot_id = boot_id or secrets.token_hex(8)
        self._sequence = 0
        self._said: tuple[str, int, int] | None = None
        self._said_at = 0.0
        self._trains, self._precision = trains, precision
        self.wait: Wait | None = None
        self.labels_waiting, self.picture_age_s = -1, -1.0
        self.answered = (0, 0)

    def will(self) -> Will:
        """What the broker says if this process vanishes."""
        gone = Presence(
            self._client_id,
            "offline",
            self.boot_id,
            0,
            self._device,
            self._provider,
            trains=self._trains,
            precision=self._precision,
        )
        return Will(self.topic, encode(gone), retain=True)

    def is_due(self, what: tuple[str, int, int], now: float) -> bool:
        """Whether to say now that this is the (phase, round, serving version)."""
        if self._said is None or what[1:] != self._said[1:]:
            return True
        return now - self._said_at >= (HEARTBEAT_S if what == self._said else PASSING_S)

    def say(self, status: Status, what: tuple[str, int, int], now: float) -> bytes:
        """Return a presence with the next sequence number; ``what`` is (phase, round, serving version)."""
        self._sequence += 1
        self._said, self._said_at = what, now
        phase, round_index, version = what
        return encode(
            Presence(
                self._client_id,
                status,
                self.boot_id,
                self._sequence,
                self._device,
                self._provider,
                phase,
                round_index,
                version,
                self._trains,
                "" if self.wait is None else self.wait.reason.value,
                "" if self.wait is None else self.wait.text[:MAX_TEXT],
                ENCODINGS,
                self._precision,
                self.labels_waiting,
                self.picture_age_s,
                *self.answered,
            )
        )

    def forget(self) -> None:
        """Say it again at once: a reconnect may have been preceded by the will."""
        self._said = None

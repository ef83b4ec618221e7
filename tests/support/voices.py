"""Members whose word is taken: signing is tested elsewhere, and these are about something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replayfleet.federation.service.credentials.keys import signing_key
from replayfleet.federation.wire.transport.seal import Signer, Voices


class Plain:
    """Opens what nobody sealed."""

    def seal(self, topic: str, frame: bytes) -> bytes:
        return frame

    def open(self, address: Any, topic: str, payload: bytes, now: float) -> bytes:
        return payload


class TakesAll:
    """Trusts whoever signs."""

    def takes(self, address: Any, sealed: Any, now: float) -> bool:
        return True


class Member:
    """One member's key, which lies in its folder, and what it signs and opens with it."""

    def __init__(self, folder: Path) -> None:
        self.signer = Signer(signing_key(folder / "keys"))
        self.voices = Voices(self.signer, TakesAll())

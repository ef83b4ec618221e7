"""The places where a crash must be harmless; a test kills the process at each of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias


class Step(str, enum.Enum):
    """What has just become durable or left the process."""

    EPOCH_RAISED = "epoch-raised"
    """The store is in a higher epoch, nobody was told."""
    ROUND_OPENED = "round-opened"
    """The round is in the store, nobody was told."""
    DOWNLOAD_PREPARED = "download-prepared"
    """One client's manifest is in the store, it was not offered."""
    UPLOAD_ARRIVED = "upload-arrived"
    """The upload's blobs are in the store, it is not accepted."""
    UPLOAD_STORED = "upload-stored"
    """The upload is accepted, its client was not told."""
    UPLOAD_CONCLUDED = "upload-concluded"
    """The client was told."""
    ROUND_CLOSED = "round-closed"
    """The set of uploads is fixed, nothing is aggregated."""
    AGGREGATED = "aggregated"
    """The results' blobs are in the store, nothing refers to them."""
    COMMITTED = "committed"
    """State, downloads, who was quarantined and the next round are durable, nobody was told."""
    PUBLISHED = "published"
    """Announced and offered; old blobs still lie around."""
    COLLECTED = "collected"
    """Old blobs are gone."""
    DEED_BEGUN = "deed-begun"
    """What an operator asked for is written, and not committed."""
    DEED_DONE = "deed-done"
    """What an operator asked for is durable; nobody was told, and the journal doesn't know."""


DEEDS = frozenset({Step.DEED_BEGUN, Step.DEED_DONE})
"""Steps that only come when an operator asks for something."""

Checkpoint: TypeAlias = Callable[[Step], None]
"""Called after every step."""


def no_checkpoint(step: Step) -> None:
    """Do nothing: production."""

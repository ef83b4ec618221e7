"""Why a round waits for a client, or doesn't: decided from values."""

from __future__ import annotations

from replayfleet.aggregator.control.view import Wait
from replayfleet.aggregator.records.roll import Standing
from replayfleet.federation.wire.protocol.messages import Presence, spoken


def wait_of(standing: Standing, presence: Presence | None, *, live: bool, awaited: bool, version: int) -> Wait | None:
    """Return why a client doesn't take part, or what the open round waits for.

    Args:
        standing: as the store knows it.
        presence: what it said last; None if it wasn't heard of since the start.
        live: whether it is there.
        awaited: whether the open round waits for its upload.
        version: of the download for this round; 0 if there is none yet.

    Returns:
        None if there is nothing to say.
    """
    return outside(standing) or (_inside(standing, presence, live, version) if awaited else None)


def outside(standing: Standing) -> Wait | None:
    """Why no round waits for it."""
    client, exclusion = standing.client, standing.exclusion
    if standing.revoked_at is not None:
        return Wait("revoked", f"its certificates count no more; `aggregator enroll {client}` takes it in again")
    if exclusion is not None:
        because = f": {exclusion.because}" if exclusion.because else ""
        return Wait("excluded", f"excluded by {exclusion.by}{because}; `aggregator readmit {client}` brings it back")
    if not standing.trains:
        return Wait("serves-only", "it serves and doesn't train: torch isn't installed there; no round waits for it")
    return None


def _inside(standing: Standing, presence: Presence | None, live: bool, version: int) -> Wait:
    """What the open round waits for."""
    if presence is None and standing.seen_at is None:
        return Wait("never-seen", "it was enrolled and never came; start it, or exclude it")
    if presence is None or not live:
        return Wait("offline", "it isn't connected; look at the device and its network, or exclude it")
    phase = presence.phase or "no phase told"
    if version == 0 or standing.confirmed_version < version:
        sent = f"version {spoken(version)}" if version else "its models"
        return Wait("download", f"it doesn't serve {sent} of this round yet: {phase}")
    return Wait("upload", f"its upload: {phase}")

"""Earlier downloads of each client, whose blobs are kept so that it can go back to one of them.

A version that brings the content of an earlier one back is no new entry: it is that one's newest version.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import msgspec

from replayfleet.aggregator.records.database import transaction
from replayfleet.federation.wire.protocol.messages import KEPT_DOWNLOADS, Manifest

VERSIONS_TABLE = """
CREATE TABLE IF NOT EXISTS versions (
    client TEXT, origin INTEGER, version INTEGER NOT NULL, manifest BLOB NOT NULL,
    PRIMARY KEY (client, origin)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A content that a client had.

    Attributes:
        origin: the version by which it first came.
        manifest: as it was given last, with the newest version that had this content.
    """

    origin: int
    manifest: Manifest


class Versions:
    """The table; one thread uses it.

    Args:
        db: the aggregator's database.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._returnable: set[str] | None = None

    def of(self, client_id: str) -> tuple[Kept, ...]:
        """What is kept of one client, by the version by which it first came; the newest content last."""
        rows = self._db.execute("SELECT origin, manifest FROM versions WHERE client = ? ORDER BY origin", (client_id,))
        return tuple(Kept(origin, msgspec.msgpack.decode(manifest, type=Manifest)) for origin, manifest in rows)

    def current(self, client_id: str) -> Kept | None:
        """The content that the client was given last."""
        return max(self.of(client_id), key=lambda kept: kept.manifest.version, default=None)

    def returnable(self) -> set[str]:
        """Clients of whom a content is kept that came before the present one."""
        if self._returnable is None:  # asked every second, and manifests are long
            question = (
                "SELECT DISTINCT client FROM versions AS earlier WHERE origin < (SELECT origin FROM versions AS one "
                "WHERE one.client = earlier.client ORDER BY one.version DESC LIMIT 1)"
            )
            self._returnable = {client for (client,) in self._db.execute(question)}
        return self._returnable

    def add(self, manifest: Manifest) -> None:
        """Keep a download with its version, and forget those before the newest few."""
        client, same = manifest.client_id, (kept for kept in self.of(manifest.client_id) if _same(kept, manifest))
        origin = next((kept.origin for kept in same), manifest.version)
        self._returnable = None
        with transaction(self._db):
            self._db.execute(
                "INSERT OR REPLACE INTO versions (client, origin, version, manifest) VALUES (?, ?, ?, ?)",
                (client, origin, manifest.version, msgspec.msgpack.encode(manifest)),
            )
            self._db.execute(
                "DELETE FROM versions WHERE client = ? AND origin NOT IN (SELECT origin FROM versions "
                "WHERE client = ? ORDER BY version DESC LIMIT ?)",
                (client, client, KEPT_DOWNLOADS + 1),
            )

    def forget(self, client_id: str, version: int | None = None) -> None:
        """Keep nothing of a client, or not what it was given as ``version``: its blobs are damaged."""
        self._returnable = None
        self._db.execute(
            "DELETE FROM versions WHERE client = ? AND version = coalesce(?, version)", (client_id, version)
        )

    def digests(self) -> set[str]:
        """Blobs that must stay for them."""
        rows = self._db.execute("SELECT manifest FROM versions")
        manifests = (msgspec.msgpack.decode(manifest, type=Manifest) for (manifest,) in rows)
        return {entry.digest for manifest in manifests for entry in manifest.blobs}


def _same(kept: Kept, manifest: Manifest) -> bool:
    """Whether both serve and train alike, whatever was noted beside them."""
    return _content(kept.manifest) == _content(manifest)


def _content(manifest: Manifest) -> tuple[object, ...]:
    blobs = {(entry.name, entry.digest) for entry in manifest.blobs}
    return blobs, manifest.facts, manifest.serving

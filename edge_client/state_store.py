"""What a client keeps on disk besides blobs: three small records, each replaced atomically and checked by digest.

``training``: the latest committed local round: the method's state after it and the upload it made.
``verdict``: what became of that upload; without it the upload is still pending.
``held`` and ``previous``: the download that is served, and the one before it.

Records name blobs by digest, and blobs are durable before a record names them, so a kill at any instant leaves either
the old or the new state.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from federation.protocol.messages import BlobEntry, FleetSpec, Manifest
from federation.service.atomic import write_atomic
from federation.service.logs import EventLogger

log = EventLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)

_DIGEST_BYTES = 32
_encoder = msgspec.msgpack.Encoder(order="deterministic")


class TrainingCommit(msgspec.Struct, frozen=True):
    """One finished local round.

    Attributes:
        round: which.
        version: of the upload's manifest.
        spec_digest: of the fleet's agreement; under another one neither state nor upload mean anything.
        state: blobs of the method's state.
        state_facts: msgpack.
        upload: blobs of the upload.
        upload_facts: msgpack.
        train_s: seconds that ``local_round`` took.
        num_samples: real samples it learned from.
        num_sub_generators: in the state.
    """

    round: int
    version: int
    spec_digest: str
    state: tuple[BlobEntry, ...]
    state_facts: bytes
    upload: tuple[BlobEntry, ...]
    upload_facts: bytes
    train_s: float
    num_samples: int
    num_sub_generators: int


class Settled(msgspec.Struct, frozen=True):
    """The upload ``version`` needs no more offers: it has its verdict, or its round is over (``dropped``)."""

    version: int
    outcome: str


class HeldDownload(msgspec.Struct, frozen=True):
    """A download that passed its probe, under the agreement it was made for."""

    manifest: Manifest
    spec: FleetSpec


def spec_digest(spec: FleetSpec) -> str:
    """Name an agreement: two are the same if fleet, method, settings, task and seed are."""
    return hashlib.sha256(_encoder.encode(spec)).hexdigest()


class StateStore:
    """The records below one data dir; the training process writes ``training``, the client the others."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "state"
        self._folder.mkdir(parents=True, exist_ok=True)

    def commit_training(self, commit: TrainingCommit) -> None:
        """Make a finished round durable; its blobs must be already."""
        self._write("training", commit)

    def training(self) -> TrainingCommit | None:
        """The latest finished round; None if there is none or its record is damaged."""
        return self._read("training", TrainingCommit)

    def settle(self, version: int, outcome: str) -> None:
        """Note that the upload ``version`` is ``accepted``, ``dropped``, or refused for a reason."""
        self._write("verdict", Settled(version, outcome))

    def pending(self) -> TrainingCommit | None:
        """The finished round whose upload has no verdict yet."""
        commit = self.training()
        settled = self._read("verdict", Settled)
        return None if commit is None or (settled is not None and settled.version == commit.version) else commit

    def hold(self, held: HeldDownload) -> None:
        """Make a download that passed its probe the one to serve, keeping the one before."""
        before = self.held()
        if before is not None and before.manifest.version != held.manifest.version:
            self._write("previous", before)
        self._write("held", held)

    def held(self) -> HeldDownload | None:
        """The download to serve."""
        return self._read("held", HeldDownload)

    def previous(self) -> HeldDownload | None:
        """The download that was served before."""
        return self._read("previous", HeldDownload)

    def blobs_in_use(self) -> set[str]:
        """Digests of all blobs that a record names; everything else may be collected while no job or transfer runs."""
        commit = self.training()
        entries = [*commit.state, *commit.upload] if commit is not None else []
        for download in (self.held(), self.previous()):
            entries += download.manifest.blobs if download is not None else ()
        return {entry.digest for entry in entries}

    def _write(self, name: str, record: msgspec.Struct) -> None:
        data = _encoder.encode(record)
        write_atomic(self._folder / name, hashlib.sha256(data).digest() + data)

    def _read(self, name: str, kind: type[R]) -> R | None:
        path = self._folder / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        try:
            if hashlib.sha256(data).digest() != digest:
                raise ValueError("digest doesn't match")
            return msgspec.msgpack.decode(data, type=kind)
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("record damaged", file=path, reason=error, next="going on with what the aggregator sends")
            path.unlink(missing_ok=True)
            return None

"""What a message may contain; everything from the network is held against this before anybody acts on it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.messages import (
    COUNTER_BITS,
    MARK_BYTES,
    Announcement,
    BlobEntry,
    Block,
    FleetSpec,
    Manifest,
    Message,
    Offer,
    Presence,
    Progress,
    Report,
    RolledBack,
    Serving,
    Verdict,
    Want,
)

HEARTBEAT_S = 5.0
"""How often a client publishes its presence at least."""

MAX_MESSAGE_BYTES = 1 << 20
MAX_BLOCK_BYTES = 4 << 20
MIN_BLOCK_BYTES = 1 << 10
MAX_BLOCKS = 1 << 14
MAX_BLOBS = 4096
MAX_BLOB_BYTES = 1 << 30
MAX_BUNDLE_BYTES = 1 << 30
MAX_FACTS_BYTES = 512 << 10
MAX_DEPTH = 16
MAX_TEXT = 1024
MAX_PROBE_LOGITS = 1 << 16
MAX_METRICS = 256
MAX_METRIC_CHARACTERS = 32_768
MAX_ENCODINGS = 16
MAX_METRIC = 1e15
"""More than any device measures, bytes included; sums of such numbers stay finite."""
_SHARES = frozenset({"accuracy", "boxes_found", "stream_accuracy", "evidence", "served"})
"""Metrics from 0 to 1, by what stands before the ``/``: of the first three a fleet's mean is taken."""
MAX_MISSING_RANGES = 256
MAX_CREDIT = 256
MAX_COUNTER = 1 << 53
MAX_EPOCH = (MAX_COUNTER >> COUNTER_BITS) - 1
MAX_HOLDS = 1 << 13
MAX_ROOTS = 8
MAX_METADATA_BYTES = 16 << 10
DIGEST_BYTES = 32

EVERYBODY = "*"
"""In place of a client id: a manifest, or a peer, that means all clients."""

ALL = "all"
"""The same in an operator's commands, so no client may have it as its id."""

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", re.ASCII)
_BLOB_NAME = re.compile(r"[a-z0-9_/-]{1,128}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TRANSFER_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


def check(condition: bool, text: str) -> None:
    """Raise ``MalformedMessage(text)`` unless ``condition``; write conditions so that NaN fails."""
    if not condition:
        raise MalformedMessage(text)


def check_id(value: str, what: str) -> str:
    """Return ``value`` if it can stand in a topic and in a file name.

    Raises:
        MalformedMessage: It is not 1 to 64 letters, digits, ``_`` or ``-``, or begins with ``-`` as options do.
    """
    if not _ID.fullmatch(value):
        raise MalformedMessage(f"{what} {value[:80]!r} is not 1 to 64 letters, digits, '_' or '-' (not as the first)")
    if value == ALL and what == "client id":
        raise MalformedMessage(f"{what} {value!r} means every client in an operator's commands; choose another")
    return value


def check_digest(value: str, what: str = "digest") -> str:
    """Return ``value`` if it is a lower-case hexadecimal sha256, else raise ``MalformedMessage``."""
    check(_DIGEST.fullmatch(value) is not None, f"{what} {value[:80]!r} is not 64 lower-case hexadecimal digits")
    return value


def check_values(value: Any, what: str, *, finite: bool = True) -> None:
    """Check a tree of plain values: depth, key types, and that numbers are finite.

    Raises:
        MalformedMessage: Deeper than ``MAX_DEPTH``, a key that is no string, NaN or infinity (if ``finite``), or a
            type that facts don't have.
    """
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        check(depth <= MAX_DEPTH, f"{what} nests deeper than {MAX_DEPTH} levels")
        if isinstance(item, float):
            check(not finite or math.isfinite(item), f"{what} contain {item}, expected finite numbers")
        elif isinstance(item, Mapping):
            check(all(isinstance(key, str) for key in item), f"{what} have a key that is not a string")
            pending.extend((child, depth + 1) for child in item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend((child, depth + 1) for child in item)
        else:
            check(
                item is None or isinstance(item, (bool, int, str)),
                f"{what} contain a {type(item).__name__}, expected None, bool, int, float, str, lists and dicts",
            )


def check_message(message: Message | Block) -> None:
    """Hold one decoded message against every limit.

    Raises:
        MalformedMessage: Says which field, what it is and what was expected.
    """
    if isinstance(message, Block):
        _check_block(message)
    else:
        _CHECKS[type(message)](message)


def num_blocks(total_bytes: int, block_bytes: int) -> int:
    """Blocks that a bundle of ``total_bytes`` is cut into; none for an empty bundle."""
    return -(-total_bytes // block_bytes)


def _text(value: str, what: str) -> None:
    check(len(value) <= MAX_TEXT, f"{what} has {len(value)} characters, expected at most {MAX_TEXT}")


def _within(value: float, low: float, high: float, what: str) -> None:
    check(low <= value <= high, f"{what} is {value}, expected {low} to {high}")


def _transfer_id(value: str) -> None:
    check(_TRANSFER_ID.fullmatch(value) is not None, f"transfer id {value[:80]!r} is not 32 hexadecimal digits")


def _unique(values: Iterable[str], what: str) -> None:
    names = list(values)
    check(len(set(names)) == len(names), f"{what} occur twice")


def _check_block(block: Block) -> None:
    _transfer_id(block.transfer_id)
    _within(block.index, 0, MAX_BLOCKS - 1, "block index")
    _within(len(block.payload), 1, MAX_BLOCK_BYTES, "block size")


def _check_blob(entry: BlobEntry) -> None:
    check(_BLOB_NAME.fullmatch(entry.name) is not None, f"blob name {entry.name[:140]!r} is not [a-z0-9_/-]{{1,128}}")
    check_digest(entry.digest)
    _within(entry.size_bytes, 0, MAX_BLOB_BYTES, f"size of blob {entry.name!r}")


def _check_serving(serving: Serving, names: set[str]) -> None:
    for name in (serving.graph, serving.parameters):
        check(name in names, f"serving refers to blob {name[:140]!r}, which the manifest lacks")
    probe = serving.probe
    _within(probe.seed, 0, MAX_COUNTER, "probe seed")
    _within(probe.batch_size, 1, 1024, "probe batch size")
    _within(len(probe.logits), 1, MAX_PROBE_LOGITS, "number of probe logits")
    check(len(probe.logits) % probe.batch_size == 0, "probe logits don't divide into the batch")
    check(all(map(math.isfinite, probe.logits)), "probe logits contain NaN or infinity")
    _within(probe.tolerance, 0.0, 1e6, "probe tolerance")


def check_manifest(manifest: Manifest) -> None:
    """Check ids, counts, names, digests and sizes of a manifest; raises ``MalformedMessage``."""
    check_id(manifest.fleet, "fleet")
    if not (manifest.client_id == EVERYBODY and manifest.direction == "down"):
        check_id(manifest.client_id, "client id")
    _within(manifest.round, 0, MAX_COUNTER, "manifest's round")
    _within(manifest.version, 0, MAX_COUNTER, "manifest's version")
    _within(len(manifest.blobs), 0, MAX_BLOBS, "number of blobs")
    _within(len(manifest.facts), 0, MAX_FACTS_BYTES, "size of the facts")
    _text(manifest.notice, "notice")
    for entry in manifest.blobs:
        _check_blob(entry)
    _unique((entry.name for entry in manifest.blobs), "blob names")
    if manifest.serving is not None:
        _check_serving(manifest.serving, {entry.name for entry in manifest.blobs})
    release = manifest.release
    for metadata in () if release is None else (release.timestamp, release.snapshot, release.targets):
        _within(len(metadata), 1, MAX_METADATA_BYTES, "size of a release's metadata")


def _check_offer(offer: Offer) -> None:
    _transfer_id(offer.transfer_id)
    check_manifest(offer.manifest)
    _within(offer.block_bytes, MIN_BLOCK_BYTES, MAX_BLOCK_BYTES, "block size")
    _within(len(offer.parts), 0, len(offer.manifest.blobs), "number of parts")
    listed = {entry.digest for entry in offer.manifest.blobs}
    _unique((part.digest for part in offer.parts), "parts")
    for part in offer.parts:
        check(part.digest in listed, f"part {part.digest[:80]!r} is not a blob of the manifest")
        _within(part.encoded_bytes, 0, MAX_BUNDLE_BYTES, "size of a part")
        if part.base:
            check_digest(part.base, "a part's base")
            check(part.encoding == "packed" and part.base != part.digest, "a part has a base that it can't have")
    total = sum(part.encoded_bytes for part in offer.parts)
    _within(total, 0, MAX_BUNDLE_BYTES, "size of the bundle")
    if offer.answers:
        check_id(offer.answers, "boot id that an offer answers")
    count = num_blocks(total, offer.block_bytes)
    _within(count, 0, MAX_BLOCKS, "number of blocks")
    check(
        len(offer.block_digests) == count * DIGEST_BYTES,
        f"offer has {len(offer.block_digests)} bytes of digests, expected {DIGEST_BYTES} for each of {count} blocks",
    )


def _check_progress(progress: Progress) -> None:
    _transfer_id(progress.transfer_id)
    _within(progress.next_missing, 0, MAX_BLOCKS, "next missing block")
    _within(progress.credit, 0, MAX_CREDIT, "credit")
    _within(len(progress.missing), 0, MAX_MISSING_RANGES, "number of missing ranges")
    previous = -1
    for first, last in progress.missing:
        check(previous < first <= last < MAX_BLOCKS, "missing ranges are not in rising order")
        previous = last


def _check_want(want: Want) -> None:
    _transfer_id(want.transfer_id)
    _within(len(want.digests), 1, MAX_BLOBS, "number of wanted blobs")
    for digest in want.digests:
        check_digest(digest)


def _check_verdict(verdict: Verdict) -> None:
    _transfer_id(verdict.transfer_id)
    _within(verdict.round, 0, MAX_COUNTER, "verdict's round")
    _within(verdict.version, 0, MAX_COUNTER, "verdict's version")
    _within(verdict.counts_in, -1, MAX_COUNTER, "round in which an upload counts")
    _text(verdict.reason, "verdict's reason")
    _text(verdict.detail, "verdict's detail")
    if verdict.instance:
        check_id(verdict.instance, "instance")


def _check_presence(presence: Presence) -> None:
    check_id(presence.client_id, "client id")
    check_id(presence.boot_id, "boot id")
    _within(presence.sequence, 0, MAX_COUNTER, "sequence number")
    _within(presence.round, -1, MAX_COUNTER, "presence's round")
    _within(presence.serving_version, -1, MAX_COUNTER, "serving version")
    _within(presence.labels_waiting, -1, MAX_COUNTER, "number of labels that wait")
    _within(presence.picture_age_s, -1.0, MAX_METRIC, "age of a picture")
    _within(presence.labels_answered, 0, MAX_COUNTER, "number of labels that were answered")
    _within(presence.labels_right, 0, presence.labels_answered, "number of labels that were answered rightly")
    for what in ("device", "provider", "phase", "reason", "why", "precision"):
        _text(getattr(presence, what), what)
    _decodes(presence.decodes)


def _check_report(report: Report) -> None:
    check_id(report.client_id, "client id")
    _within(report.round, 0, MAX_COUNTER, "report's round")
    _within(report.version, -1, MAX_COUNTER, "report's version")
    _within(len(report.metrics), 0, MAX_METRICS, "number of metrics")
    _within(sum(map(len, report.metrics)), 0, MAX_METRIC_CHARACTERS, "characters in names of metrics")
    for name, value in report.metrics.items():
        _text(name, "metric's name")
        least, most = (0.0, 1.0) if name.split("/", 1)[0] in _SHARES else (-MAX_METRIC, MAX_METRIC)
        _within(value, least, most, f"metric {name!r}")


def _check_rolled_back(told: RolledBack) -> None:
    check_id(told.client_id, "client id")
    _within(told.round, -1, MAX_COUNTER, "rolled-back round")
    _within(told.version, 0, MAX_COUNTER, "rolled-back version")
    _within(told.serving_version, -1, MAX_COUNTER, "serving version")
    _text(told.reason, "reason of a roll-back")
    _text(told.detail, "detail of a roll-back")


def _check_fleet_spec(spec: FleetSpec) -> None:
    check_id(spec.fleet, "fleet")
    check_id(spec.method, "method")
    _within(spec.run_seed, 0, (1 << 63) - 1, "run seed")
    check_values(spec.settings, "settings")
    check_values(spec.task, "task fields")


def _decodes(names: tuple[str, ...]) -> None:
    _within(len(names), 0, MAX_ENCODINGS, "number of encodings")
    for name in names:
        _text(name, "an encoding's name")


def _check_announcement(announcement: Announcement) -> None:
    check_id(announcement.instance, "instance")
    _within(announcement.epoch, 0, MAX_EPOCH, "epoch")
    for marks, what in (
        (announcement.holds, "what is held"),
        (announcement.excluded, "who is excluded"),
        (announcement.shut_out, "who is shut out"),
    ):
        _within(len(marks), 0, MAX_HOLDS * MARK_BYTES, f"size of {what}")
        check(len(marks) % MARK_BYTES == 0, f"{what} is not a row of {MARK_BYTES} bytes each")
    _within(announcement.round, -1, MAX_COUNTER, "announced round")
    _within(announcement.late_rounds, 0, MAX_COUNTER, "late rounds")
    _decodes(announcement.decodes)
    _within(announcement.deadline_s, 0.0, 1e9, "deadline")
    _within(len(announcement.roots), 0, MAX_ROOTS, "number of roots")
    for root in announcement.roots:
        _within(len(root), 1, MAX_METADATA_BYTES, "size of a root")
    _check_fleet_spec(announcement.spec)


_CHECKS: Mapping[type[Any], Callable[[Any], None]] = {
    Offer: _check_offer,
    Progress: _check_progress,
    Want: _check_want,
    Verdict: _check_verdict,
    Presence: _check_presence,
    Report: _check_report,
    RolledBack: _check_rolled_back,
    Announcement: _check_announcement,
}

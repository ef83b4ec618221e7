"""What an aggregator answers for, after The Update Framework: a root that may lie offline, one online key for the rest.

Every client has a small repository of its own, whose only target is its download. A release's timestamp rises with the
signer's time, snapshot and targets with the download's version. Whoever holds ``root.key`` replaces the online key.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (
    TOP_LEVEL_ROLE_NAMES,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization.json import JSONSerializer

from replayfleet.federation.atomic import open_file, private_folder, write_atomic
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.paths import read_regular
from replayfleet.federation.service.credentials.keys import SIGNING_KEY, read_key, signing_key, write_key
from replayfleet.federation.wire.protocol.codec import encode_manifest
from replayfleet.federation.wire.protocol.limits import MAX_ROOTS
from replayfleet.federation.wire.protocol.messages import Manifest, Release
from replayfleet.federation.wire.transport.seal import CLOCKS_APART_US, Signer

ROOT_KEY = "root.key"
FLOOR = "clock"
EXPIRES_S = 7 * 86400
"""A release that nobody renewed for so long is taken by no client any more; what it serves, it serves on."""
RENEW_S = 86400
ROOT_EXPIRES = datetime.datetime(9999, 1, 1, tzinfo=datetime.timezone.utc)
"""A root counts until another one replaces it, wherever clocks are put."""
_ROOT_FILE = re.compile(r"([1-9][0-9]{0,8})\.root\.json")
_JSON = JSONSerializer(compact=True)


class Releases:
    """Signs downloads, and says whose signatures count.

    Args:
        keys: folder of keys and roots; both are made at first use.
        may_found: whether this is the first use.

    Attributes:
        signer: signs messages too, with the online key.
        roots: the newest root metadata, oldest first.

    Raises:
        SettingsError: There are no keys though it isn't the first use, the online key isn't one that the newest root
            names, there is no root beside it, or a file can't be used.
        ReplayfleetError: The disk doesn't take a new key.
    """

    def __init__(self, keys: Path, *, may_found: bool = True) -> None:
        if not may_found and not _numbers(keys):
            raise SettingsError(
                f"{keys} holds no root, so no device would take this aggregator's word: it was lost, or this fleet was "
                "begun by a version that signed nothing. Put the folder back from a backup; where there is none, "
                "`aggregator serve --take-over` makes new keys, which every device that had others must be given then"
            )
        if not _numbers(keys) or _is_half_done(keys):
            with _alone(keys):
                if not _numbers(keys):
                    _found(keys)
                _finish_rotation(keys)
        key = signing_key(keys)
        self.signer = Signer(key, keys / FLOOR)
        self._signs = CryptoSigner(key)
        self.roots = tuple(read_regular(_root_path(keys, number)) for number in _numbers(keys)[-MAX_ROOTS:])
        newest = _read_root(keys).signed
        if self._signs.public_key.keyid not in newest.roles[Timestamp.type].keyids:
            raise SettingsError(
                f"key {keys / SIGNING_KEY} isn't the one that root {newest.version} of this fleet names; put that one "
                "back, or replace it with `aggregator rotate-key`"
            )
        self._given: dict[str, tuple[Manifest, int, Release]] = {}

    def signed(self, manifest: Manifest) -> Manifest:
        """Return a client's download with a release, the same until it gets old."""
        plain, now_us = manifest.plain, self.signer.now_us()
        before = self._given.get(plain.client_id)
        if before is None or before[0] != plain or now_us - before[1] > RENEW_S * 1_000_000:
            before = (plain, now_us, self._release(plain, now_us))
            self._given[plain.client_id] = before
        return msgspec.structs.replace(plain, release=before[2])

    def replaced_by(self, roots: Sequence[bytes], key: bytes) -> int:
        """Return the version of the newest of these roots if ours lead to it and it names this public key; else 0."""
        newest = follow_on(roots, self.roots[-1])
        if newest is None:
            return 0
        online = (newest.signed.keys[each] for each in newest.signed.roles[Timestamp.type].keyids)
        return newest.signed.version if any(one.keyval.get("public") == key.hex() for one in online) else 0

    def outlive_rival(self) -> None:
        """Sign later than another aggregator that led may have, whose clock is ahead: devices take nothing older."""
        self.signer.outlive(self.signer.now_us() + CLOCKS_APART_US)

    def forget(self, client_id: str) -> None:
        """Keep nothing of a client."""
        self._given.pop(client_id, None)

    def _release(self, plain: Manifest, now_us: int) -> Release:
        version = plain.version + 1
        until_s = now_us // 1_000_000 + EXPIRES_S
        expires = datetime.datetime.fromtimestamp(until_s, datetime.timezone.utc)
        content = TargetFile.from_data(plain.client_id, encode_manifest(plain), ["sha256"])
        targets = Targets(version, None, expires, {plain.client_id: content})
        snapshot = Snapshot(version, None, expires, {"targets.json": MetaFile(version)})
        timestamp = Timestamp(now_us, None, expires, MetaFile(version))
        return Release(*(self._sign(role) for role in (timestamp, snapshot, targets)))

    def _sign(self, role: Any) -> bytes:
        metadata: Metadata[Any] = Metadata(role)
        metadata.sign(self._signs)
        return metadata.to_bytes(_JSON)


def rotate_key(keys: Path, root_key: Path | None = None, *, new_root_key: bool = False) -> int:
    """Replace the online key, and the root key too if asked for; returns the new root's version.

    Clients learn of it from the announcements of an aggregator that is started with the new key; the former one counts
    for nothing then, and whatever it signed neither.

    Args:
        keys: folder of an aggregator's keys.
        root_key: the root key, if it isn't in ``keys``.
        new_root_key: make another root key, which the present one signs for, beside the online one.

    Raises:
        SettingsError: No such folder, or the root key isn't the one that the newest root names.
        ReplayfleetError: The disk doesn't take it.
    """
    if not _numbers(keys):
        raise SettingsError(f"{keys}: no aggregator's keys; expected the folder `keys` of its data dir")
    with _alone(keys):
        return _rotate(keys, root_key or keys / ROOT_KEY, new_root_key=new_root_key)


def follow_on(roots: Sequence[bytes], from_root: bytes) -> Metadata[Root] | None:
    """Return the newest of some roots if a chain of signatures leads to it from ``from_root``, which is older."""
    try:
        newest = Metadata[Root].from_bytes(from_root)
        before = newest.signed.version
        named = {root.signed.version: root for root in map(Metadata[Root].from_bytes, roots)}
        while (following := named.get(newest.signed.version + 1)) is not None:
            newest.signed.verify_delegate(Root.type, following.signed_bytes, following.signatures)
            following.signed.verify_delegate(Root.type, following.signed_bytes, following.signatures)
            newest = following
    except (RepositoryError, ValueError):
        return None
    return newest if newest.signed.version > before else None


def can_sign(keys: Path) -> bool:
    """Whether a folder holds a root and a signing key, without which no device takes an aggregator's word."""
    return bool(_numbers(keys)) and (keys / SIGNING_KEY).is_file()


def are_newer(keys: Path, earlier: Path) -> bool:
    """Whether a folder's keys are what those of an earlier copy were replaced with, and can be signed with."""
    try:
        root = follow_on([read_regular(_root_path(keys, number)) for number in _numbers(keys)], anchor(earlier))
        online = CryptoSigner(read_key(keys / SIGNING_KEY)).public_key.keyid
    except (OSError, SettingsError):
        return False
    return root is not None and online in root.signed.roles[Timestamp.type].keyids


def _rotate(keys: Path, root_path: Path, *, new_root_key: bool) -> int:
    _finish_rotation(keys, root_path)
    holder, fresh = CryptoSigner(read_key(root_path)), Ed25519PrivateKey.generate()
    root = _read_root(keys).signed
    if holder.public_key.keyid not in root.roles[Root.type].keyids:
        raise SettingsError(f"key {root_path} isn't the root key of this fleet")
    signers, replacement = [holder], None
    if new_root_key:
        replacement = Ed25519PrivateKey.generate()
        signers.append(CryptoSigner(replacement))
    root.version += 1
    _appoint(root, CryptoSigner(fresh), signers[-1])
    try:
        # The new keys lie beside the former ones until the root that names them is there.
        write_key(_next(keys / SIGNING_KEY), fresh)
        if replacement is not None:
            write_key(_next(root_path), replacement)
        _write_root(keys, Metadata(root), signers)
        _finish_rotation(keys, root_path)
    except OSError as error:
        raise ReplayfleetError(f"{keys}: {error.strerror or error}") from error
    return int(root.version)


def anchor(keys: Path) -> bytes:
    """Return the newest root, which tells a device whose word to take.

    Raises:
        SettingsError: There is none.
    """
    if not _numbers(keys):
        raise SettingsError(f"{keys}: no aggregator's keys yet")
    return read_regular(_root_path(keys, _numbers(keys)[-1]))


def _found(keys: Path) -> None:
    """Make the first root, before the online key that it names is in place: a key without a root has lost it."""
    if (keys / SIGNING_KEY).exists():
        raise SettingsError(
            f"{keys}: the roots of {SIGNING_KEY} are gone; put N.root.json back, from a backup, or from a device's "
            f"trust/root.json under its version. For a fleet that begins anew, move {keys} away"
        )
    root, holder = Root(1, None, ROOT_EXPIRES, consistent_snapshot=False), CryptoSigner(signing_key(keys, ROOT_KEY))
    _appoint(root, CryptoSigner(signing_key(keys, _next(keys / SIGNING_KEY).name)), holder)
    _write_root(keys, Metadata(root), [holder])


@contextlib.contextmanager
def _alone(keys: Path) -> Iterator[None]:
    """Let no other process change these keys meanwhile."""
    try:
        private_folder(keys)
        with os.fdopen(open_file(keys / "lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ReplayfleetError(f"{error.filename or keys}: {error.strerror or error}") from error


def _appoint(root: Root, online: CryptoSigner, holder: CryptoSigner) -> None:
    """Name the keys of all roles, and no others."""
    for role in TOP_LEVEL_ROLE_NAMES:
        for key_id in list(root.roles[role].keyids):
            root.revoke_key(key_id, role)
        root.add_key((holder if role == Root.type else online).public_key, role)


def _is_half_done(keys: Path) -> bool:
    return any(fresh.exists() and _names(keys, fresh) for fresh in map(_next, (keys / SIGNING_KEY, keys / ROOT_KEY)))


def _names(keys: Path, key: Path) -> bool:
    """Whether the newest root names this key."""
    return CryptoSigner(read_key(key)).public_key.keyid in _read_root(keys).signed.keys


def _finish_rotation(keys: Path, root_path: Path | None = None) -> None:
    """Put the next keys in place if the newest root names them: a rotation may have been interrupted there."""
    for place in (keys / SIGNING_KEY, root_path or keys / ROOT_KEY):
        fresh = _next(place)
        if fresh.exists() and _names(keys, fresh):
            fresh.replace(place)


def _next(key: Path) -> Path:
    return key.with_name(f"{key.name}.next")


def _write_root(keys: Path, metadata: Metadata[Root], signers: list[CryptoSigner]) -> None:
    for signer in signers:
        metadata.sign(signer, append=signer is not signers[0])
    write_atomic(_root_path(keys, metadata.signed.version), metadata.to_bytes(_JSON))


def _read_root(keys: Path) -> Metadata[Root]:
    path = _root_path(keys, _numbers(keys)[-1])
    try:
        return Metadata[Root].from_bytes(read_regular(path))
    except RepositoryError as error:
        raise SettingsError(
            f"{path}: not root metadata ({error}); put it back, from a backup, or from a device's trust/root_history"
        ) from error


def _root_path(keys: Path, number: int) -> Path:
    return keys / f"{number}.root.json"


def _numbers(keys: Path) -> list[int]:
    found = (_ROOT_FILE.fullmatch(path.name) for path in keys.glob("*.root.json"))
    return sorted(int(match[1]) for match in found if match)

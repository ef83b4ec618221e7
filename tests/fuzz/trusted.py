"""Targets: signed words, roots and releases, and the requests and keys that operators copy about."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata

from replayfleet.aggregator.members.authority import new_key, private_pem, read_request
from replayfleet.aggregator.trust.release import ROOT_KEY, Releases
from replayfleet.edge_client.sync.trust import FleetTrust
from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, SettingsError
from replayfleet.federation.service.credentials.certificates import validities
from replayfleet.federation.service.credentials.keys import SIGNING_KEY, read_key
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.messages import Announcement, Manifest, Release
from replayfleet.federation.wire.protocol.topics import parse_topic, topic_of
from replayfleet.federation.wire.transport.seal import Voices
from tests.fuzz.forms import MSGPACK, document, taken_apart
from tests.fuzz.mutation import Form, Unfit
from tests.fuzz.strangers import FLEET, SERVED, SPEC, messages
from tests.fuzz.target import Target, scratch, seeds
from tests.support.voices import TakesAll

PEM = Form(lambda data: data.split(b"\n"), b"\n".join)
"""Lines. What stands around a block of them counts for nothing, so some changed inputs are accepted with any key."""

ROUND = topic_of(FLEET, "round")
CLIENT = "cam-1"


@cache
def _fleet() -> Releases:
    return Releases(scratch() / "keys")


@cache
def _holder() -> CryptoSigner:
    return CryptoSigner(read_key(scratch() / "keys" / ROOT_KEY))


@cache
def _online() -> CryptoSigner:
    return CryptoSigner(read_key(scratch() / "keys" / SIGNING_KEY))


def _signed(tree: Any, by: CryptoSigner, signs: bool) -> bytes:
    """Return metadata as it travels: any JSON, or bytes, signed anew if it can be."""
    data = tree if isinstance(tree, bytes) else json.dumps(tree, default=repr).encode()
    if signs:
        try:
            metadata: Metadata[Any] = Metadata.from_bytes(data)
            metadata.sign(by)
            return metadata.to_bytes()
        except Exception:  # whatever is no metadata travels as it is
            return data
    return data


def _seals(data: bytes) -> None:
    topic, _, frame = data.partition(b"\0")
    address = parse_topic(topic.decode(errors="replace"))
    voices = Voices(_stranger_signer(), TakesAll())
    if voices.open(address, topic.decode(), frame, 0.0) is None:
        raise MalformedMessage("not heard")


@cache
def _stranger_signer() -> Any:
    return Releases(scratch() / "stranger").signer


def _sealed() -> Sequence[bytes]:
    topics = (ROUND, topic_of(FLEET, "state", CLIENT))
    return [topic.encode() + b"\0" + _fleet().signer.seal(topic, encode(messages()[5])) for topic in topics]


def _device(root: bytes | None) -> FleetTrust:
    """A client's trust as it is at its first start."""
    folder = scratch() / "trust"
    shutil.rmtree(folder, ignore_errors=True)
    return FleetTrust(folder, CLIENT, bytes(32), root)


def _roots(data: bytes) -> str:
    """Announcements, signed by whoever comes, with roots that somebody made: [roots, device has one, signed anew]."""
    roots, has_root, signs, own = taken_apart(data, tuple[list[dict[str, Any] | bytes], bool, bool, bool])
    device = _device(_fleet().roots[0] if has_root else None)
    brought = tuple(_signed(root, _holder(), signs) for root in roots)
    said = Announcement("boot-1", 4, "open", 9.0, SPEC, 1, bytes(8), brought)
    voices = Voices((_stranger_signer if own else lambda: _fleet().signer)(), TakesAll())
    try:
        payload = voices.seal(ROUND, encode(said))
    except MalformedMessage as error:
        raise Unfit from error
    heard = Voices(_fleet().signer if own else _stranger_signer(), device).open(parse_topic(ROUND), ROUND, payload, 0.0)
    device.learn(brought)
    if heard is None:
        raise MalformedMessage("not heard")
    return f"{has_root} {own}"


def _root_seeds() -> list[bytes]:
    root = json.loads(_fleet().roots[0])
    return [document([[root], has_root, True, False]) for has_root in (False, True)]


def _releases(data: bytes) -> None:
    """A download whose release somebody made: [timestamp, snapshot, targets, signed anew], one or two of them."""
    device = _device(_fleet().roots[0])
    for *trees, signs in taken_apart(data, list[tuple[dict[str, Any] | bytes, dict[str, Any] | bytes, Any, bool]]):
        files = [_signed(tree, _online(), signs) for tree in trees]
        manifest = msgspec.structs.replace(SERVED, release=Release(*files))
        device.vouches_for(manifest.release)
        device.check(manifest)


def _release_seeds() -> list[bytes]:
    def trees(manifest: Manifest) -> list[Any]:
        release = _fleet().signed(manifest).release
        assert release is not None
        return [*(json.loads(data) for data in msgspec.structs.astuple(release)), True]

    return [document([trees(SERVED)]), document([trees(SERVED), trees(SERVED)])]


def _requests(data: bytes) -> None:
    read_request(_written(data), CLIENT)


def _written(data: bytes) -> Path:
    path = scratch() / "pem"
    path.write_bytes(data)
    return path


def _request_seeds() -> list[bytes]:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CLIENT)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(new_key(), hashes.SHA256())
    return [request.public_bytes(serialization.Encoding.PEM)]


def _certificate_seeds() -> list[bytes]:
    key, now = new_key(), datetime(2026, 1, 1, tzinfo=timezone.utc)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CLIENT)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = builder.serial_number(7).not_valid_before(now).not_valid_after(now.replace(year=2027))
    return [dated.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)]


def _keys(data: bytes) -> None:
    read_key(_written(data))


def _key_seeds() -> list[bytes]:
    _fleet()
    return [(scratch() / "keys" / ROOT_KEY).read_bytes(), private_pem(read_key(scratch() / "keys" / SIGNING_KEY))]


TRUSTED = {
    "seals": Target(seeds(_sealed), _seals, (MalformedMessage,)),
    "roots": Target(seeds(_root_seeds), _roots, (MalformedMessage,), MSGPACK),
    "releases": Target(seeds(_release_seeds), _releases, (ArtefactRejected,), MSGPACK),
    "requests": Target(seeds(_request_seeds), _requests, (SettingsError,), PEM),
    "certificates": Target(
        seeds(_certificate_seeds), lambda data: str(len(validities(data))), (MalformedMessage,), PEM
    ),
    "keys": Target(seeds(_key_seeds), _keys, (SettingsError,), PEM),
}

"""Whose word a client takes, and which downloads: what the fleet's root says, after The Update Framework.

The root comes with the device's identity, or with the first announcement. Time is the aggregator's, signed: a device
needs no clock. What the aggregator says must answer this process, so nothing that was recorded earlier counts.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from tuf.api.exceptions import DownloadError, DownloadHTTPError, RepositoryError
from tuf.api.metadata import Metadata, Root, Timestamp
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from replayfleet.edge_client.sync.following import ALIVE_S
from replayfleet.federation.atomic import clear_place, write_atomic
from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, Reason, SettingsError
from replayfleet.federation.paths import read_regular
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.codec import decode, encode_manifest
from replayfleet.federation.wire.protocol.limits import EVERYBODY, MAX_METADATA_BYTES, check
from replayfleet.federation.wire.protocol.messages import Announcement, Manifest, Release
from replayfleet.federation.wire.protocol.topics import Address
from replayfleet.federation.wire.transport.seal import CLOCKS_APART_US, Kind, Sealed

FOLDER = "trust"
KEEP_HEARD_EVERY_US = 600_000_000
"""How often the time that was heard is written down; flash memory wears."""
_CHECK = "crc32"
"""One bit more in a time that was heard, and all that the fleet says would be old."""
MAX_REFUSED = 64
UNNAMED = "signed with a key that this fleet's root doesn't name"
READ_NONE = "give the fleet's root.json with --identity, or remove the folder trust in the data dir"

log = EventLogger(__name__)
_CONFIG = UpdaterConfig(
    max_root_rotations=32,
    root_max_length=MAX_METADATA_BYTES,
    timestamp_max_length=MAX_METADATA_BYTES,
    snapshot_max_length=MAX_METADATA_BYTES,
    targets_max_length=MAX_METADATA_BYTES,
)


class FleetTrust:
    """Implements ``Trust``, and says which downloads may be served.

    Args:
        folder: where the root and what was seen are kept; belongs to this.
        client_id: whose downloads.
        own: this client's public key.
        root: root metadata that the device was given; without it the first announcement's is taken.

    Attributes:
        problem: why the newest announcement wasn't heard; empty if it was.

    Raises:
        SettingsError: What the device was given is no root, and none was trusted before.
    """

    def __init__(self, folder: Path, client_id: str, own: bytes, root: bytes | None = None) -> None:
        self._folder = folder
        self._client_id = client_id
        self._own = own
        self._given = None if root is None or is_no_root(root) else root
        self.problem = ""
        self._keys: Mapping[bytes, str] = {}
        self._roots: tuple[bytes, ...] = ()
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._heard_us = self._kept_us = 0
        self._trusted_at = float("-inf")
        self._unread = ""
        self._load()
        if self._given is not root:
            if not self._keys:
                raise SettingsError("root.json beside this device's keys is no root; put the fleet's there")
            log.error("root damaged", file="root.json beside the keys", next="going on with the one that is kept")

    @property
    def heard_us(self) -> int:
        """The fleet's time, in microseconds since 1970, as its aggregator signed it last; 0 before."""
        return self._heard_us

    def takes(self, address: Address, sealed: Sealed, now: float) -> bool:
        if sealed.key == self._own:
            return False  # an earlier process of ours
        announces = address.peer == EVERYBODY and address.channel == "round"
        if announces and sealed.key not in self._keys:
            self._introduced(sealed)
        trusted, why = sealed.key in self._keys, UNNAMED
        if self._unread and not self._keys:
            why = f"and the root that this device trusts can't be read ({self._unread}); {READ_NONE}"
        if announces and trusted:
            self.problem, self._trusted_at = "", now
        elif announces and now - self._trusted_at >= ALIVE_S:
            self.problem = f"an aggregator announces itself, {why}; what is served stays"
        whose = "" if announces else ": another aggregator, or a second device with this client's id"
        check(trusted, f"{why}{whose}")
        if sealed.kind is Kind.SAID:
            behind_us = self._heard_us - sealed.time_us
            if announces and behind_us > CLOCKS_APART_US:
                self.problem = (
                    f"an aggregator's word is {behind_us / 1e6:.0f} s older than what it said before: it was "
                    "recorded, or the aggregator's clock was put back, and its keys are those of an earlier copy"
                )
            check(behind_us <= CLOCKS_APART_US, "said long ago, and recorded")
            self._heard_us = max(self._heard_us, sealed.time_us)
            if self._heard_us - self._kept_us >= KEEP_HEARD_EVERY_US:
                self._keep_heard()
        return True

    def learn(self, roots: Sequence[bytes]) -> bool:
        """Take newer roots, if the one that is trusted leads to them; False if the disk takes none: ask again."""
        if tuple(roots) == self._roots:
            return True
        named = _named(roots)
        if self._has_next(named):  # strangers may announce roots of theirs, and each look at them would be written down
            try:
                with contextlib.suppress(RepositoryError, DownloadError):
                    self._updater(named).refresh()  # it ends where the timestamp is missing; roots are kept before
            except OSError:
                return False
            finally:
                self._load()
        self._roots = tuple(roots)
        return True

    def check(self, manifest: Manifest) -> None:
        """Decide whether a download may be received.

        Raises:
            ArtefactRejected: No release, not signed as the root wants, older than what was seen, expired, or for
                another client or content.
            OSError: The disk doesn't take what was seen.
        """
        release = manifest.release
        if release is None:
            raise ArtefactRejected(Reason.UNTRUSTED, "nobody signed for it")
        files = {f"{name}.json": data for name, data in msgspec.structs.asdict(release).items()}
        try:
            updater = self._updater(files)
            updater.refresh()
            target = updater.get_targetinfo(self._client_id)
            if target is None:
                raise ArtefactRejected(Reason.UNTRUSTED, f"its release isn't for {self._client_id!r}")
            target.verify_length_and_hashes(encode_manifest(manifest.plain))
        except (RepositoryError, DownloadError) as error:
            raise ArtefactRejected(Reason.UNTRUSTED, " ".join(str(error).split())[:300]) from error

    def vouches_for(self, release: Release | None) -> bool:
        """Whether keys that count today signed for a download that was taken before."""
        if release is None:
            return True
        try:
            signed = Metadata[Timestamp].from_bytes(release.timestamp).signatures
        except RepositoryError:
            return False
        return not self._keys or any(key_id in signed for key_id in self._keys.values())

    def _introduced(self, sealed: Sealed) -> None:
        """An announcement with an unknown key may bring the root that names it."""
        if sealed.key in self._refused:
            return
        said = decode(sealed.frame)
        roots = said.roots if isinstance(said, Announcement) else ()
        if self._unread:
            self._load()
        known = not self._unread or sealed.key.hex() in self._read_heard()  # what is damaged, its own fleet makes good
        if not self._keys and self._given is None and roots and known:
            self._adopt(roots[-1], sealed.key)
        else:
            self._roots = ()
            if not self.learn(roots):
                return
        if sealed.key not in self._keys:
            self._refused[sealed.key] = None
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def _adopt(self, root: bytes, key: bytes) -> None:
        """Trust at first sight."""
        try:
            names = _online_keys(Metadata[Root].from_bytes(root))
            if key in names:
                told = "root made good by a key that it named" if self._unread else "fleet trusted at first sight"
                self._updater({}, root)
                # A power cut would leave it empty, and who was heard, which makes that good, isn't written down yet.
                with (self._folder / "root.json").open("rb") as kept:
                    os.fsync(kept.fileno())
                self._load()
                log.info(told, root=next(iter(names.values()))[:16])
        except RepositoryError as error:
            raise MalformedMessage(f"its root can't be used: {error}") from error

    def _updater(self, files: Mapping[str, bytes], root: bytes | None = None) -> Updater:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        first = root or self._given or self._newest()
        history = self._folder / "root_history"
        if not history.is_dir():
            history.unlink(missing_ok=True)  # a file there is a damaged disk's
        for path in [*self._folder.glob("*.json"), *self._folder.glob("root_history/*.json")]:
            if clear_place(path):
                log.warning("no file, and removed", path=path, next="the aggregator says anew what was there")
        updater = Updater(str(self._folder), "mqtt:", fetcher=_Delivered(files), config=_CONFIG, bootstrap=first)
        heard = datetime.datetime.fromtimestamp(self._heard_us / 1e6, datetime.timezone.utc)
        updater._trusted_set.reference_time = heard  # the fleet's time, in place of this device's clock
        return updater

    def _has_next(self, named: Mapping[str, bytes]) -> bool:
        """Whether the root after the one that is trusted is among these, or it can't be told."""
        try:
            trusted = Metadata[Root].from_bytes(self._newest()).signed
        except (OSError, RepositoryError):
            return True
        with contextlib.suppress(RepositoryError, KeyError):
            found = Metadata[Root].from_bytes(named[f"{trusted.version + 1}.root.json"])
            trusted.verify_delegate(Root.type, found.signed_bytes, found.signatures)
            return True
        return False

    def _newest(self) -> bytes:
        """The root that is trusted, or the newest before it that is whole; FileNotFoundError if there never was one."""
        # root.json is a link to it, which The Update Framework removes at each look, and then makes anew. What is
        # numbered higher may be of a fleet that this device was in before it was given another's root.
        trusted = float("inf")
        with contextlib.suppress(OSError):
            trusted = int((self._folder / "root.json").readlink().name.split(".")[0])
        history = self._folder.glob("root_history/*.root.json")
        kept = {number: path for path in history if (number := int(path.name.split(".")[0])) <= trusted}
        for number in sorted(kept, reverse=True):
            data = read_regular(kept[number])
            with contextlib.suppress(RepositoryError):
                Metadata[Root].from_bytes(data)
                return data
        if not kept and not self._read_heard():
            (self._folder / "root.json").lstat()
        raise OSError(errno.EIO, "damaged or gone", str(self._folder / "root_history"))

    def _load(self) -> None:
        """Read what is trusted; a root that came with the device and leads nowhere newer counts itself."""
        before = self._keys
        try:
            if self._given is not None:
                with contextlib.suppress(DownloadError):  # newer roots are here, the rest isn't
                    self._updater({}).refresh()
            self._keys = _online_keys(Metadata[Root].from_bytes(self._newest()))
            self._unread = ""
        except (OSError, RepositoryError, DownloadError) as error:  # who was trusted still is
            # There is one, and it may be read later: until then nobody takes its place.
            self._unread = str(error) * (isinstance(error, OSError) and not isinstance(error, FileNotFoundError))
            self._keys = before or ({} if self._given is None else _online_keys(Metadata[Root].from_bytes(self._given)))
        if self._keys == before:
            return  # and the time that was heard of them counts
        heard = self._read_heard()
        self._heard_us = self._kept_us = max((heard.get(key.hex(), 0) for key in self._keys), default=0)

    def _keep_heard(self) -> None:
        self._kept_us = self._heard_us
        with contextlib.suppress(OSError):  # it is written again later
            times = {key.hex(): self._heard_us for key in self._keys}
            times[_CHECK] = zlib.crc32(msgspec.json.encode(times))
            write_atomic(self._folder / "heard.json", msgspec.json.encode(times))

    def _read_heard(self) -> dict[str, int]:
        try:
            times = msgspec.json.decode(read_regular(self._folder / "heard.json"), type=dict[str, int])
        except (OSError, msgspec.MsgspecError):
            return {}
        check_value = times.pop(_CHECK, None)  # earlier versions wrote none
        return times if check_value in {None, zlib.crc32(msgspec.json.encode(times))} else {}


class _Delivered(FetcherInterface):
    """Gives The Update Framework the files that came with a message."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def _fetch(self, url: str) -> Iterator[bytes]:
        data = self._files.get(url.removeprefix("mqtt:/"))
        if data is None:
            raise DownloadHTTPError("not delivered", 404)
        return iter((data,))


def _named(roots: Sequence[bytes]) -> dict[str, bytes]:
    named = {}
    for root in roots:
        with contextlib.suppress(RepositoryError):
            named[f"{Metadata[Root].from_bytes(root).signed.version}.root.json"] = root
    return named


def is_no_root(data: bytes) -> bool:
    """Return whether this is anything but a fleet's root."""
    with contextlib.suppress(RepositoryError):
        return not isinstance(Metadata.from_bytes(data).signed, Root)
    return True


def _online_keys(root: Metadata[Root]) -> dict[bytes, str]:
    """Public key, 32 bytes -> its id, of those who sign messages and releases."""
    found = {}
    for key_id in root.signed.roles[Timestamp.type].keyids:
        key = root.signed.keys.get(key_id)
        # A stranger's root may name what it doesn't list, and list what is none.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if key is not None and key.scheme == "ed25519":
                found[bytes.fromhex(key.keyval["public"])] = key_id
    return found

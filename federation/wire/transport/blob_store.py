"""Content-addressed files that survive a crash at any instruction.

A blob exists under its digest or not at all: it is written beside its place, flushed, renamed, and the directory is
flushed. The spool holds what can be made again: encoded blobs on their way out, part files on their way in.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from replayfleet.federation.atomic import clear_place, give_to_owner_of, shared_folder
from replayfleet.federation.errors import ArtefactRejected, Reason, ReplayfleetError, SettingsError
from replayfleet.federation.paths import open_regular, read_regular
from replayfleet.federation.wire.protocol.limits import check_digest
from replayfleet.federation.wire.protocol.messages import Encoding
from replayfleet.federation.wire.protocol.packed import pack, unpack
from replayfleet.federation.wire.protocol.tensors import compress, decompress, digest

FileLook: TypeAlias = tuple[int, ...]
"""What tells that a file has changed since: inode, size and times."""

_WHOLE: tuple[Encoding, ...] = ("raw", "zstd", "shuffle4-zstd")
_BLOB = re.compile(r"[0-9a-f]{64}", re.ASCII)
_STALE_AFTER_S = 7 * 86_400.0
_STALE_TEMPORARY_S = 3600.0


@dataclass(frozen=True, slots=True)
class EncodedBlob:
    """A blob as it travels.

    Attributes:
        digest: of the decoded bytes.
        encoding: how ``path`` decodes to them.
        path: file with the encoded bytes; the blob's own file when they travel raw.
        size_bytes: of that file.
        base: digest of the blob from which it differs; empty if it stands alone.
    """

    digest: str
    encoding: Encoding
    path: Path
    size_bytes: int
    base: str = ""


class DiskBlobStore:
    """Blobs under ``root``, as ``<root>/<first two hex digits>/<digest>``, and a spool under ``<root>/.spool``.

    Args:
        root: folder, made if need be.
        verified: blobs that another process of ours has verified; each is believed while its file looks the same.
    """

    def __init__(self, root: Path, verified: Mapping[str, FileLook] | None = None) -> None:
        self._root = root
        spool = root / ".spool"
        self.parts = spool / "parts"
        self._encoded = spool / "encoded"
        self._temporary = spool / "tmp"
        for directory in (self.parts, self._encoded, self._temporary):
            shared_folder(directory)
        self._trusted: dict[str, FileLook] = dict(verified or {})
        self._sound: dict[str, dict[Path, FileLook]] = {}  # digest -> files that a peer doubted in vain
        _remove_older(self._temporary, _STALE_TEMPORARY_S)
        _remove_older(self.parts, _STALE_AFTER_S)

    def path(self, digest: str) -> Path:
        """Where the blob lies (or would)."""
        return self._root / check_digest(digest)[:2] / digest

    def has(self, digest: str) -> bool:
        """Whether the blob is there, complete and verified."""
        return self.path(digest).is_file()

    def verified(self, digests: Iterable[str]) -> dict[str, FileLook]:
        """Return those that need not be read again, for a store of another process."""
        return {each: self._trusted[each] for each in digests if each in self._trusted}

    def believe(self, verified: Mapping[str, FileLook]) -> None:
        """Take what another process of ours verified, as ``verified`` at the beginning."""
        self._trusted.update(verified)

    def put(self, data: bytes | memoryview) -> str:
        """Store decoded bytes durably; returns their digest. Idempotent."""
        name = digest(data)
        self.put_verified(name, data)
        return name

    def put_verified(self, digest: str, data: bytes | memoryview) -> None:
        """Store bytes whose digest the caller has just computed."""
        target = self.path(digest)
        if not target.is_file():
            self._make_folder(target)
            self._write(target, data)
        self._trust(digest)

    def adopt(self, digest: str, file: Path) -> None:
        """Move a file whose digest the caller has just computed into the store: durable, and without a copy."""
        target = self.path(digest)
        if target.is_file():
            file.unlink()
        else:
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
            self._make_folder(target)
            file.replace(target)
            _flush_directory(target.parent)
        self._trust(digest)

    def read(self, digest: str) -> bytes:
        """Return the bytes, verified unless this process did and the file is the same since.

        Raises:
            KeyError: Not there.
            ArtefactRejected: The file was damaged; it is removed, so it will be fetched again.
        """
        try:
            data = read_regular(self.path(digest))
        except OSError as error:
            self._missing(digest, error)
        self._verify(digest, data)
        return data

    def mapped(self, digest: str) -> mmap.mmap:
        """Return the bytes as ``read`` does, mapped into memory; writing there changes no file.

        Raises:
            KeyError: Not there.
            ArtefactRejected: The file was damaged, and is removed, so it will be fetched again; or it is empty.
        """
        try:
            with open_regular(self.path(digest)) as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            self._missing(digest, error)
        except ValueError as error:
            self._verify(digest, b"")  # a power cut leaves files without content
            raise ArtefactRejected(Reason.MALFORMED, f"blob {digest[:12]} is empty") from error
        self._verify(digest, data)
        return data

    def collect(self, keep: set[str]) -> int:
        """Delete every blob not in ``keep``, with its encoded copy; returns how many blobs."""
        for file in self._encoded.iterdir():
            if file.name.partition(".")[0] not in keep:
                file.unlink(missing_ok=True)
        removed = 0
        for path in list(self._blobs()):
            if path.name not in keep:
                if not clear_place(path):
                    path.unlink(missing_ok=True)
                self._trusted.pop(path.name, None)
                self._sound.pop(path.name, None)
                removed += 1
        return removed

    def pack(self, digest: str, base: str, steps: Mapping[str, float]) -> None:
        """Keep a blob in the spool as its difference from another; nothing is kept where it would save nothing.

        Args:
            digest: of the blob.
            base: of another one, which receivers hold.
            steps: of those arrays that were rounded to whole steps from the base's.

        Raises:
            KeyError: One of the two isn't there.
            ArtefactRejected: One was damaged; it is removed.
        """
        target = self._encoded / f"{digest}.{check_digest(base)}.packed"
        if digest != base and not target.is_file():
            packed = pack(self.read(digest), self.read(base), steps)
            if packed is not None:
                self._write(target, packed, durable=False)

    def packed_against(self, digests: Iterable[str]) -> set[str]:
        """Return the digests from which these blobs are packed as differences in the spool."""
        return {base for one in digests for base in self._bases(one)}

    def encoded(self, digest: str, bases: Collection[str] | None = None) -> EncodedBlob:
        """Return the blob as it travels, encoded once and kept in the spool.

        Args:
            digest: of the blob.
            bases: digests that the receiver holds; None: it doesn't know what a packed blob is.

        Raises:
            KeyError: Not there.
            ArtefactRejected: The file was damaged; it is removed.
        """
        blob = self.path(digest)
        if not blob.is_file():
            raise KeyError(digest)
        for base in self._bases(digest) if bases else ():
            if base in (bases or ()):
                spooled = self._encoded / f"{digest}.{base}.packed"
                return EncodedBlob(digest, "packed", spooled, spooled.stat().st_size, base)
        alone = self._encoded / f"{digest}.packed"
        if bases is not None and alone.is_file():
            return EncodedBlob(digest, "packed", alone, alone.stat().st_size)
        for encoding in _WHOLE:
            if (self._encoded / f"{digest}.{encoding}").is_file():
                return self._describe(digest, encoding)
        data = self.read(digest)
        # Not flushed: if a power cut damages it, the receiver refuses it, and it is made again.
        if bases is not None and (packed := pack(data, None, {})) is not None:
            self._write(alone, packed, durable=False)
            return EncodedBlob(digest, "packed", alone, len(packed))
        encoding, encoded = compress(data)
        self._write(self._encoded / f"{digest}.{encoding}", b"" if encoding == "raw" else encoded, durable=False)
        return self._describe(digest, encoding)

    def distrust(self, digest: str) -> None:
        """A peer says that our bytes don't verify: look at blob and encoded copies again, and drop what is damaged.

        What is sound stays, for others may be reading it; whoever says so of the same files again costs nothing.
        """
        looks = {file: _look(file) for file in self._encoded.glob(f"{digest}.*")}
        with contextlib.suppress(FileNotFoundError):
            looks[self.path(digest)] = _look(self.path(digest))
        if self._sound.get(digest) == looks:
            return
        self._trusted.pop(digest, None)
        data = None
        with contextlib.suppress(KeyError, ArtefactRejected):
            data = self.read(digest)
        for file in looks.keys() - {self.path(digest)}:
            if data is None or not self._decodes(file, data):
                file.unlink(missing_ok=True)
                looks.pop(file)
        self._sound[digest] = looks

    def _decodes(self, file: Path, data: bytes) -> bool:
        """Whether an encoded copy gives a blob's bytes again; of one that travels raw there is nothing but a name."""
        words = file.name.split(".")[1:]
        with contextlib.suppress(KeyError, ReplayfleetError, OSError):
            if words[-1] == "raw":
                return True
            if words[-1] == "packed":
                return unpack(file.read_bytes(), self.read(words[0]) if len(words) > 1 else None, len(data)) == data
            return bytes(decompress(words[-1], file.read_bytes(), len(data))) == data
        return False

    def _bases(self, digest: str) -> list[str]:
        """Return from what a blob is packed as a difference; a pattern of its own is compiled for longer than this."""
        words = [file.name.split(".") for file in os.scandir(self._encoded) if file.name.startswith(f"{digest}.")]
        return sorted(base for _, *bases, kind in words if kind == "packed" for base in bases)

    def _describe(self, digest: str, encoding: Encoding) -> EncodedBlob:
        path = self.path(digest) if encoding == "raw" else self._encoded / f"{digest}.{encoding}"
        return EncodedBlob(digest, encoding, path, path.stat().st_size)

    def _verify(self, expected: str, data: bytes | mmap.mmap) -> None:
        if expected in self._trusted and self._trusted[expected] == _look(self.path(expected)):
            return
        found = digest(data)
        if found != expected:
            self._trusted.pop(expected, None)
            self.path(expected).unlink(missing_ok=True)
            raise ArtefactRejected(
                Reason.WRONG_DIGEST, f"blob {expected[:12]} reads as {found[:12]}; removed, it will be fetched again"
            )
        self._trust(expected)

    def _trust(self, digest: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._trusted[digest] = _look(self.path(digest))

    def _blobs(self) -> Iterator[Path]:
        for directory in os.scandir(self._root):  # of 256 folders each, once a round: it says what is one
            if len(directory.name) == 2 and directory.is_dir():
                yield from (Path(file) for file in os.scandir(directory) if _BLOB.fullmatch(file.name))

    def _make_folder(self, target: Path) -> None:
        if not target.parent.is_dir():
            with contextlib.suppress(IsADirectoryError):  # made meanwhile, by another thread or process of ours
                target.parent.unlink(missing_ok=True)  # a file there is a damaged disk's
            shared_folder(target.parent)
            _flush_directory(self._root)
        clear_place(target)

    def _missing(self, digest: str, error: OSError) -> NoReturn:
        """Raise KeyError of a blob that isn't there, or in whose place a damaged disk left what is no file."""
        if isinstance(error, FileNotFoundError | NotADirectoryError) or clear_place(self.path(digest)):
            raise KeyError(digest) from None
        raise error

    def _write(self, target: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
        descriptor, name = tempfile.mkstemp(dir=self._temporary)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as handle:
                give_to_owner_of(self._root, handle.fileno())
                _write_all(handle.fileno(), memoryview(data))
                if durable:
                    os.fsync(handle.fileno())
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        if durable:
            _flush_directory(target.parent)


def look_up(root: Path, expected: str) -> bytes:
    """Return a blob of a store that may be another process's, which is why it isn't opened: nothing is made or removed.

    Raises:
        SettingsError: It isn't there, or can't be read.
        ArtefactRejected: It is damaged.
    """
    path = root / expected[:2] / expected
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path} can't be read ({error.strerror}); a newer round may have replaced it") from error
    if digest(data) != expected:
        raise ArtefactRejected(Reason.WRONG_DIGEST, f"{path} is damaged")
    return data


def _look(path: Path) -> FileLook:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_older(directory: Path, age_s: float) -> None:
    oldest = time.time() - age_s
    for file in directory.iterdir():
        with contextlib.suppress(OSError):  # gone meanwhile, no file, or on a disk that lets nothing go
            if file.stat().st_mtime < oldest:
                file.unlink()

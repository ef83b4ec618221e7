from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, Reason
from replayfleet.federation.wire.protocol.tensors import decompress, digest
from replayfleet.federation.wire.transport import blob_store
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from tests.support.flushes import noted
from tests.support.no_file import KINDS, leave


def floats(count: int = 50_000) -> bytes:
    return np.random.default_rng(3).normal(size=count).astype(np.float32).tobytes()


def test_a_blob_lies_under_its_digest_and_reads_back(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    name = store.put(b"blob")
    assert name == digest(b"blob")
    assert store.put(b"blob") == name
    assert store.has(name)
    assert store.path(name) == tmp_path / name[:2] / name
    assert store.read(name) == b"blob"
    assert not store.has("0" * 64)
    with pytest.raises(KeyError):
        store.read("0" * 64)


def test_a_name_that_is_no_digest_never_becomes_a_path(tmp_path: Path) -> None:
    with pytest.raises(MalformedMessage):
        DiskBlobStore(tmp_path).path("../../etc/passwd")


def test_a_damaged_blob_is_removed_so_that_it_is_fetched_again(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    name = store.put(b"blob")
    store.path(name).write_bytes(b"blub")
    with pytest.raises(ArtefactRejected) as caught:
        store.read(name)
    assert caught.value.reason is Reason.WRONG_DIGEST
    assert not store.has(name)


@pytest.mark.parametrize("later", [False, True])
def test_what_another_process_verified_is_hashed_again_only_if_its_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    store = DiskBlobStore(tmp_path)
    kept, changed = store.put(b"kept"), store.put(b"blob")
    told = store.verified([kept, changed, "0" * 64])
    assert list(told) == [kept, changed]
    store.path(changed).unlink()
    store.path(changed).write_bytes(b"blub")
    hashed: list[bytes] = []

    def hashing(data: bytes) -> str:
        hashed.append(bytes(data))
        return digest(data)

    monkeypatch.setattr(blob_store, "digest", hashing)
    other = DiskBlobStore(tmp_path, {} if later else told)
    other.believe(told if later else {})
    assert (other.read(kept), hashed) == (b"kept", [])
    with pytest.raises(ArtefactRejected):
        other.read(changed)
    assert hashed == [b"blub"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskBlobStore(tmp_path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            store.put(b"blob")
    assert not store.has(digest(b"blob"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_data_are_flushed_before_the_rename_and_the_directory_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, steps = DiskBlobStore(tmp_path), noted(monkeypatch)
    store.put(b"blob")
    assert steps == ["directory", "data", "rename", "directory"]
    steps.clear()
    store.path(digest(b"blob")).unlink()
    store.put(b"blob")
    assert steps == ["data", "rename", "directory"]
    steps.clear()
    store.path(digest(b"blob")).unlink()
    (tmp_path / "part").write_bytes(b"blob")
    store.adopt(digest(b"blob"), tmp_path / "part")
    assert steps == ["data", "rename", "directory"], "what arrived block by block, too"


def test_collect_keeps_what_is_named_and_nothing_else(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    kept, gone = store.put(floats()), store.put(floats(60_000))
    store.encoded(kept)
    spooled = store.encoded(gone).path
    assert store.collect({kept}) == 1
    assert store.has(kept)
    assert not store.has(gone)
    assert not spooled.exists()
    assert store.encoded(kept).path.exists()


def test_a_blob_is_encoded_once(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    name = store.put(floats())
    encoded = store.encoded(name)
    assert encoded.encoding == "shuffle4-zstd"
    assert bytes(decompress(encoded.encoding, encoded.path.read_bytes(), 200_000)) == floats()
    stamp = encoded.path.stat().st_mtime_ns
    assert DiskBlobStore(tmp_path).encoded(name) == encoded
    assert encoded.path.stat().st_mtime_ns == stamp


def test_what_does_not_compress_travels_from_the_blob_itself(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    name = store.put(os.urandom(100_000))
    encoded = store.encoded(name)
    assert (encoded.encoding, encoded.path) == ("raw", store.path(name))


def test_a_damaged_blob_is_not_encoded_after_a_restart(tmp_path: Path) -> None:
    name = DiskBlobStore(tmp_path).put(floats())
    store = DiskBlobStore(tmp_path)
    store.path(name).write_bytes(b"x")
    with pytest.raises(ArtefactRejected):
        store.encoded(name)
    with pytest.raises(KeyError):
        store.encoded(name)


def test_a_complete_part_file_becomes_the_blob_without_a_copy(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    part = store.parts / "cam-1.part"
    part.write_bytes(b"blob")
    inode = part.stat().st_ino
    store.adopt(digest(b"blob"), part)
    assert store.path(digest(b"blob")).stat().st_ino == inode
    assert store.read(digest(b"blob")) == b"blob"


def test_of_a_doubted_blob_only_what_is_damaged_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskBlobStore(tmp_path)
    sound, spoiled, damaged = (store.put(floats(count)) for count in (50_000, 60_000, 70_000))
    spooled = [store.encoded(name).path for name in (sound, spoiled, damaged)]
    spooled[1].write_bytes(b"x")
    store.path(damaged).write_bytes(b"x")
    for name in (sound, spoiled, damaged):
        store.distrust(name)
    assert [store.has(name) for name in (sound, spoiled, damaged)] == [True, True, False]
    assert [path.exists() for path in spooled] == [True, False, False], "others may be reading what is sound"
    monkeypatch.setattr(store, "read", lambda name: pytest.fail("looked at twice"))
    store.distrust(sound)


def test_what_strangely_lies_in_the_spool_keeps_nobody_from_starting(tmp_path: Path):
    parts = DiskBlobStore(tmp_path).parts
    (parts / "a-folder").mkdir()
    (parts / "a-link").symlink_to(tmp_path / "nowhere")
    old = parts / "cam-1.old.part"
    old.touch()
    for path in (parts / "a-folder", old):
        os.utime(path, (0, 0))
    DiskBlobStore(tmp_path)
    assert not old.exists()


def test_a_blob_that_a_power_cut_emptied_is_damaged_and_fetched_again(tmp_path: Path) -> None:
    """It was called malformed, as if who made it were to blame, and stayed."""
    name = DiskBlobStore(tmp_path).put(b"blob")
    DiskBlobStore(tmp_path).path(name).write_bytes(b"")
    store = DiskBlobStore(tmp_path)
    with pytest.raises(ArtefactRejected) as rejected:
        store.mapped(name)
    assert rejected.value.reason is Reason.WRONG_DIGEST
    assert not store.has(name)
    empty = store.put(b"")
    with pytest.raises(ArtefactRejected) as rejected:
        store.mapped(empty)
    assert rejected.value.reason is Reason.MALFORMED


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("read", [DiskBlobStore.read, DiskBlobStore.mapped, None])
def test_what_is_no_file_in_a_blobs_place_is_no_blob_and_makes_way(
    tmp_path: Path, what: str, read: Callable[[DiskBlobStore, str], object] | None
) -> None:
    store = DiskBlobStore(tmp_path)
    name = store.put(b"blob")
    path = store.path(name)
    path.unlink()
    leave(path, what)
    assert not store.has(name)
    if read is not None:
        with pytest.raises(KeyError):
            read(store, name)
    store.put(b"blob")
    assert store.read(name) == b"blob"


def test_a_folder_of_blobs_that_somebody_makes_at_the_same_time_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, look = DiskBlobStore(tmp_path), Path.is_dir

    def made_after(path: Path) -> bool:
        was_there = look(path)
        os.makedirs(path, exist_ok=True)  # noqa: PTH103 - mkdir of Path looks too
        return was_there

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_dir", made_after)
        name = store.put(b"blob")
    assert store.read(name) == b"blob"


def test_a_file_in_a_blobs_folders_place_makes_way(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    name = digest(b"blob")
    store.path(name).parent.write_bytes(b"?")
    for read in (store.read, store.mapped):
        with pytest.raises(KeyError):
            read(name)
    store.put(b"blob")
    assert store.read(name) == b"blob"


def test_what_is_no_file_in_a_blobs_place_is_collected(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    name = store.put(b"blob")
    store.path(name).unlink()
    store.path(name).mkdir()
    store.collect(set())
    assert not store.path(name).exists()

"""Bundles through a store that both ends reach: a folder, and a real server that speaks S3, killed in the middle."""

from __future__ import annotations

import contextlib
import errno
import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.couriers import FLEET, Clock, End

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.transport import claims
from replayfleet.federation.wire.transport.claims import ClaimStore
from tests.support.lease import lent
from tests.support.memory_broker import MemoryBroker
from tests.support.ports import free_port
from tests.support.waiting import until

BLOB_BYTES = 1_500_000


class Pair:
    """An aggregator and a camera, each with or without the store."""

    def __init__(self, root: Path, ours: ClaimStore | None, theirs: ClaimStore | None) -> None:
        self.clock, self.broker = Clock(), MemoryBroker()
        self.aggregator = End(self.broker, self.clock, root / "aggregator", claims=ours)
        self.cam = End(self.broker, self.clock, root / "cam", "cam-1", claims=theirs)

    def until(self, done: Callable[[], bool], within_s: float = 60.0) -> None:
        """Let both ends work, on the real clock, which the store's threads need."""
        end = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < end, (self.aggregator.events, self.cam.events)
            worked = self.aggregator.work() + self.cam.work()
            self.clock.now += 0.02
            time.sleep(0.0 if worked else 0.02)

    def download(self, version: int) -> tuple[int, bytes]:
        """Send a download, and return (bytes of blocks that the camera got over the broker, what it holds)."""
        blob = os.urandom(BLOB_BYTES)
        before = self.cam.courier.counters["bytes_received"]
        manifest = self.aggregator.offer("cam-1", blob, version=version)
        self.until(lambda: len(self.aggregator.concluded) == version)
        assert self.cam.store.read(manifest.blobs[0].digest) == blob
        return self.cam.courier.counters["bytes_received"] - before, blob


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Callable[[], ClaimStore]]:
    made: list[ClaimStore] = []

    def one() -> ClaimStore:
        made.append(ClaimStore(f"file://{tmp_path}/store", FLEET))
        return made[-1]

    yield one
    for store in made:
        store.close()


def test_a_bundle_goes_through_the_store_and_is_gone_from_it_after_the_verdict(
    tmp_path: Path, folder: Callable[[], ClaimStore]
) -> None:
    pair = Pair(tmp_path, folder(), folder())
    over_the_broker, _ = pair.download(1)
    assert over_the_broker < 10_000
    pair.until(lambda: not list((tmp_path / "store" / FLEET).iterdir()))
    assert list(pair.cam.store.parts.iterdir()) == []


def test_a_shared_folder_that_went_is_not_made_anew_and_serves_again_when_it_is_back(
    tmp_path: Path, folder: Callable[[], ClaimStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "REST_S", 0.0)
    store, place = folder(), tmp_path / "store"
    for first in [store.put(str(index), [b"one"]) for index in range(4)]:
        first.result(timeout=60)
    place.rename(tmp_path / "unmounted")
    with pytest.raises(OSError, match="was there and is gone; mount it, or make it, again"):
        store.put("b", [b"two"]).result(timeout=60)
    with pytest.raises(FileNotFoundError):
        store.fetch("0", tmp_path / "fetched", 3).result(timeout=60)
    assert not place.exists()
    (tmp_path / "unmounted").rename(place)
    shutil.rmtree(place / FLEET)  # an operator may empty it
    store.put("b", [b"two"]).result(timeout=60)
    assert [one.name for one in (place / FLEET).iterdir()] == ["b"]


def test_a_process_that_begins_while_the_mount_is_away_makes_no_folder_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, note, mounted = tmp_path / "share" / "store", tmp_path / "note", {"/", str(tmp_path / "share")}
    monkeypatch.setattr("os.path.ismount", lambda path: str(path) in mounted)

    def put(url: str) -> None:
        with contextlib.closing(ClaimStore(url, FLEET, note)) as store:
            store.put("a", [b"one"]).result(timeout=60)

    for _ in range(2):
        put(f"file://{place}")
    mounted.remove(str(tmp_path / "share"))
    shutil.rmtree(place)
    with pytest.raises(OSError, match=r"nothing is mounted at .*share, where .*store was; mount it, or remove .*note"):
        put(f"file://{place}")
    assert not place.exists()
    put(f"file://{tmp_path}/other")  # is another store
    put(f"file://{tmp_path}/other")


def test_who_has_no_store_gets_blocks(tmp_path: Path, folder: Callable[[], ClaimStore]) -> None:
    over_the_broker, _ = Pair(tmp_path, folder(), None).download(1)
    assert over_the_broker > BLOB_BYTES


def test_whoever_reaches_another_store_than_the_sender_gets_blocks(
    tmp_path: Path, folder: Callable[[], ClaimStore]
) -> None:
    elsewhere = ClaimStore(f"file://{tmp_path}/elsewhere", FLEET)
    over_the_broker, _ = Pair(tmp_path, folder(), elsewhere).download(1)
    elsewhere.close()
    assert over_the_broker > BLOB_BYTES


def test_a_store_that_connects_and_is_away_keeps_nobody_from_starting(
    tmp_path: Path, folder: Callable[[], ClaimStore]
) -> None:
    away = ClaimStore("ftp://127.0.0.1:1/yard", FLEET)
    over_the_broker, _ = Pair(tmp_path, folder(), away).download(1)
    assert over_the_broker > BLOB_BYTES
    assert not away.usable, "it rests"
    away.close()


@pytest.mark.parametrize(
    "url",
    [
        *("s3://", "s3:///models", "ftp:///yard", "/yard", "nonsense://yard", "s3://user:pw@yard", "http://[bad"),
        *("file://yard/models", "file:models", "file:", "local://yard/models"),
    ],
)
def test_what_is_no_place_for_bundles_is_refused_in_words(url: str) -> None:
    with pytest.raises(SettingsError, match="blob store") as refused:
        ClaimStore(url, FLEET)
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize("how", ["shorter", "longer", "changed"])
def test_what_somebody_did_to_the_stored_bundle_comes_over_the_broker(
    how: str,
    tmp_path: Path,
    folder: Callable[[], ClaimStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fetch = ClaimStore.fetch

    def tampered(self: ClaimStore, transfer_id: str, target: Path, size_bytes: int) -> object:
        file = tmp_path / "store" / FLEET / transfer_id
        data = file.read_bytes()
        changed = {"shorter": data[:700_000], "longer": data + bytes(1 << 20), "changed": b"\0" * 9 + data[9:]}[how]
        file.write_bytes(changed)
        return fetch(self, transfer_id, target, size_bytes)

    monkeypatch.setattr(ClaimStore, "fetch", tampered)
    over_the_broker, _ = Pair(tmp_path, folder(), folder()).download(1)
    least, most = {"shorter": (700_000, 1_200_000), "longer": (0, 10_000), "changed": (200_000, 1_600_000)}[how]
    assert least < over_the_broker < most
    told = [line for line in caplog.messages if line.startswith("bundle from the store isn't what was offered")]
    assert len(told) == (0 if how == "longer" else 1)


def test_a_pipe_in_the_shared_folder_and_a_bundle_that_is_not_there_keep_the_store_from_nobody(
    tmp_path: Path, folder: Callable[[], ClaimStore]
) -> None:
    store = folder()
    store.put("a" * 32, [b"whole"]).result()
    os.mkfifo(tmp_path / "store" / FLEET / ("f" * 32))
    for transfer_id in ["f" * 32, "0" * 32] * 4:  # it has four threads
        with pytest.raises(FileNotFoundError):
            store.fetch(transfer_id, tmp_path / "fetched", 5).result(timeout=60)
    assert store.usable
    store.fetch("a" * 32, tmp_path / "fetched", 5).result(timeout=60)
    assert (tmp_path / "fetched").read_bytes() == b"whole"


def test_a_bundle_that_a_server_of_files_has_lent_to_another_machine_is_fetched_once_it_is_given_back(
    tmp_path: Path, folder: Callable[[], ClaimStore]
) -> None:
    store = folder()
    store.put("a" * 32, [b"whole"]).result()
    with lent(tmp_path / "store" / FLEET / ("a" * 32)):
        store.fetch("a" * 32, tmp_path / "fetched", 5).result(timeout=60)
    assert (tmp_path / "fetched").read_bytes() == b"whole"


class S3Server:
    """moto's server, in a process of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-c",
            f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    server = S3Server()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    server.start()
    yield server
    server.stop()


def make_bucket(within_s: float = 60.0) -> None:
    """Wait for the server, and make the bucket: after a restart moto has forgotten it."""
    import s3fs

    end = time.monotonic() + within_s
    while True:
        with contextlib.suppress(Exception):
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir("models")
            return
        assert time.monotonic() < end, "the server doesn't start"
        time.sleep(0.2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_with_the_s3_server_gone_the_fleet_goes_on_over_the_broker_and_back(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "REST_S", 0.2)
    make_bucket()
    stores = [ClaimStore("s3://models/edge", FLEET) for _ in range(2)]
    pair = Pair(tmp_path, *stores)
    assert pair.download(1)[0] < 10_000
    s3.stop()
    assert pair.download(2)[0] > BLOB_BYTES
    assert pair.download(3)[0] > BLOB_BYTES
    s3.start()
    make_bucket()
    time.sleep(0.3)
    assert pair.download(4)[0] < 10_000
    for store in stores:
        store.close()


class Endless(http.server.BaseHTTPRequestHandler):
    """An S3 server whose objects have no end, whatever range is asked for."""

    sent = 0

    def do_HEAD(self) -> None:
        self._say(5)

    def do_GET(self) -> None:
        self._say(None if "chunked" in self.path else 1 << 40)
        with contextlib.suppress(OSError):
            while Endless.sent < 1 << 30:
                Endless.sent += self.wfile.write(bytes(1 << 16))

    def _say(self, size: int | None) -> None:
        self.send_response(200)
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


Bucket = Callable[[type[http.server.BaseHTTPRequestHandler]], tuple[str, ClaimStore]]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Return what opens a bucket that a handler answers for, and gives its URL too."""
    pytest.importorskip("s3fs")
    with contextlib.ExitStack() as opened:

        def answered_by(handler: type[http.server.BaseHTTPRequestHandler]) -> tuple[str, ClaimStore]:
            server = opened.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            opened.callback(server.shutdown)
            url = f"http://127.0.0.1:{server.server_port}"
            for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "ENDPOINT_URL": url}.items():
                monkeypatch.setenv(f"AWS_{name}", value)
            store = ClaimStore("s3://models/edge", FLEET)
            opened.callback(store.close)
            return url, store

        yield answered_by


def test_of_an_object_without_an_end_no_more_is_read_than_was_offered(tmp_path: Path, bucket: Bucket) -> None:
    Endless.sent = 0
    _, store = bucket(Endless)
    for _ in range(12):  # there are ten connections
        store.fetch("a" * 32, tmp_path / "fetched", 1 << 20).result(timeout=120)
        assert (tmp_path / "fetched").stat().st_size == 1 << 20
    with pytest.raises(OSError, match="how long"):
        store.fetch("chunked", tmp_path / "fetched", 1 << 20).result(timeout=120)
    assert Endless.sent < 1 << 29  # buffers on the way; the rest of a terabyte was not asked for


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Sends whoever asks somewhere else."""

    def do_GET(self) -> None:
        is_login = self.path.endswith("login")
        self.send_response(307 if is_login else 301)
        self.send_header(*(("Location", "http://x.invalid/") if is_login else ("x-amz-bucket-region", "eu-west-1")))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        ("region", "answers 301, and sends on to region eu-west-1; look at AWS_DEFAULT_REGION"),
        ("login", "sends on to x.invalid, which can't be reached; look at"),
    ],
)
def test_a_store_that_sends_elsewhere_is_told_by_where_it_sends(
    tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture, transfer: str, said: str
) -> None:
    url, store = bucket(Elsewhere)
    with pytest.raises(Exception):  # noqa: B017, PT011 -- whatever s3fs makes of it
        store.fetch(transfer, tmp_path / "fetched", 10).result(timeout=60)
    assert f"{url} {said}" in caplog.text


class Wordless(http.server.BaseHTTPRequestHandler):
    """Refuses as a gateway before a store does, with a page, or as some stores do, with a code and no message."""

    def do_GET(self) -> None:
        page = b"<html>no</html>"
        code = b"<Error><Code>AccessDenied</Code><Message></Message></Error>"
        said = page if self.path.endswith("page") else code
        self.send_response(403)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("transfer", "said"), [("page", "answers 403 next"), ("code", "answers 403 AccessDenied next")]
)
def test_a_store_that_refuses_without_a_word_is_told_by_its_status(
    tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture, transfer: str, said: str
) -> None:
    url, store = bucket(Wordless)
    with pytest.raises(OSError):  # noqa: PT011 -- it has no words
        store.fetch(transfer, tmp_path / "fetched", 10).result(timeout=60)
    assert f"{url} {said}" in caplog.text


class Reading(Wordless):
    """Takes nothing, and forbids to ask for what isn't there, as S3 does those who may not list."""

    def do_GET(self) -> None:
        if "bbbb" in self.path:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"whole")

    do_PUT = Wordless.do_GET  # noqa: N815


def test_who_may_only_read_goes_on_reading_and_a_bundle_that_may_not_be_there_keeps_nobody(
    tmp_path: Path, bucket: Bucket
) -> None:
    _, store = bucket(Reading)
    for refused in (store.put("a" * 32, [b"whole"]), store.fetch("b" * 32, tmp_path / "fetched", 5)):
        with pytest.raises(PermissionError):
            refused.result(timeout=60)
        assert store.usable
    store.fetch("a" * 32, tmp_path / "fetched", 5).result(timeout=60)
    assert (tmp_path / "fetched").read_bytes() == b"whole"


def test_who_has_the_folder_mounted_read_only_goes_on_reading(
    tmp_path: Path, folder: Callable[[], ClaimStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder()
    store.put("a" * 32, [b"whole"]).result(timeout=60)
    written = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr(ClaimStore, "_make", written)
    with pytest.raises(OSError, match="Read-only"):
        store.put("b" * 32, [b"whole"]).result(timeout=60)
    assert store.usable
    store.fetch("a" * 32, tmp_path / "fetched", 5).result(timeout=60)
    assert (tmp_path / "fetched").read_bytes() == b"whole"
    assert Pair(tmp_path, store, None).download(1)[0] > BLOB_BYTES
    assert written.call_count == 1, "nobody waits again for what is forbidden"


def test_what_ends_without_a_word_is_told_by_its_kind(
    folder: Callable[[], ClaimStore], caplog: pytest.LogCaptureFixture
) -> None:
    def stalls() -> Iterator[bytes]:
        yield b"half"
        raise TimeoutError  # as of a store that answers, and then says nothing more

    with pytest.raises(TimeoutError):
        folder().put("a" * 32, stalls()).result(timeout=60)
    assert "error=TimeoutError after 0 s next" in caplog.text


def failing() -> Iterator[bytes]:
    yield b"half"
    raise FileExistsError


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What a store has put is there once this is set."""
    put, opened = ClaimStore.put, threading.Event()

    def slowly(self: ClaimStore, transfer_id: str, blocks: Iterable[bytes]) -> object:
        def late() -> Iterator[bytes]:
            yield from blocks
            opened.wait(60)

        return put(self, transfer_id, late())

    monkeypatch.setattr(ClaimStore, "put", slowly)
    return opened


def test_a_bundle_that_came_too_late_for_its_offer_does_not_stay_in_the_store(
    tmp_path: Path, folder: Callable[[], ClaimStore], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = folder()
    monkeypatch.setattr(claims, "MAX_REST_S", 0.0)  # else it is removed with the first drop after the rest
    pair = Pair(tmp_path, ours, folder())
    over_the_broker, _ = pair.download(1)
    assert over_the_broker > BLOB_BYTES
    gate.set()
    until(lambda: not list((tmp_path / "store" / FLEET).iterdir()))


@pytest.mark.parametrize("way", ["let go", "replaced", "abandoned"])
def test_a_bundle_that_is_being_put_while_nobody_wants_it_any_more_does_not_stay_in_the_store(
    tmp_path: Path, folder: Callable[[], ClaimStore], gate: threading.Event, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    ours, dropped, drop = folder(), threading.Event(), ClaimStore._remove

    def removed(self: ClaimStore, transfer_id: str) -> None:
        drop(self, transfer_id)
        dropped.set()

    monkeypatch.setattr(ClaimStore, "_remove", removed)
    pair = Pair(tmp_path, ours, folder())
    pair.aggregator.offer("cam-1", os.urandom(BLOB_BYTES))
    if way == "let go":
        pair.aggregator.courier.forget("cam-1")
    elif way == "replaced":
        pair.aggregator.offer("cam-1", b"small", version=2)
    else:
        pair.aggregator.courier._fail("cam-1", OSError("no space left"))
    gate.set()
    assert dropped.wait(60)
    assert list((tmp_path / "store" / FLEET).iterdir()) == []


@pytest.mark.parametrize("way", ["over the broker", "replaced"])
def test_a_bundle_that_waits_for_its_turn_in_vain_keeps_none_after_it_waiting(
    tmp_path: Path, folder: Callable[[], ClaimStore], way: str
) -> None:
    ours, gate = folder(), threading.Event()

    def slow() -> Iterator[bytes]:
        gate.wait(60)
        yield b"whole"

    for number in range(claims._AT_A_TIME):
        ours.put(f"{number:032}", slow())
    pair = Pair(tmp_path, ours, None)
    pair.aggregator.offer("cam-1", os.urandom(BLOB_BYTES))
    storing = pair.aggregator.courier._open["cam-1"].storing
    if way == "replaced":
        pair.aggregator.offer("cam-1", b"small", version=2)
    else:
        pair.clock.now += claims.WAIT_S
        pair.aggregator.work()
    gate.set()
    assert storing is not None
    assert storing.cancelled()


def test_what_is_offered_anew_as_another_version_stays_in_the_store(
    tmp_path: Path, folder: Callable[[], ClaimStore]
) -> None:
    ours, gate, blob = folder(), threading.Event(), os.urandom(BLOB_BYTES)

    def slow() -> Iterator[bytes]:
        gate.wait(60)
        yield b"whole"

    for number in range(claims._AT_A_TIME - 1):  # what is left does one thing after the other
        ours.put(f"{number:032}", slow())
    aggregator = Pair(tmp_path, ours, None).aggregator
    for version in (1, 2):
        aggregator.offer("cam-1", blob, version=version)
        offered = aggregator.courier._open["cam-1"]
        assert offered.storing is not None
        offered.storing.result(timeout=60)
        aggregator.work()
    ours.put("f" * 32, [b"whole"]).result(timeout=60)
    assert (tmp_path / "store" / FLEET / offered.offer.transfer_id).is_file()
    gate.set()


HANGS = """
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from replayfleet.federation.wire.transport.claims import ClaimStore
asked = threading.Event()
class Hanging(MemoryFileSystem):
    protocol = "hanging"
    def open(self, *_, **__):
        asked.set()
        threading.Event().wait()
fsspec.register_implementation("hanging", Hanging)
store = ClaimStore("hanging://yard", "fleet")
for number in range(100):
    store.put(f"{number:032}", [b"whole"])
asked.wait()
assert threading.active_count() < 10
store.close()
"""


def test_a_program_ends_though_its_store_never_answers() -> None:
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=120)


def test_a_store_slower_than_anybody_waits_rests_ten_times_as_long(
    folder: Callable[[], ClaimStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: clock.now))

    store = folder()
    usable: list[bool] = []

    def hanging() -> Iterator[bytes]:
        clock.now += 9.0
        usable.append(store.usable)
        clock.now += 6.0
        usable.append(store.usable)
        yield b"whole"

    store.put("a" * 32, hanging()).result(timeout=60)
    assert usable == [True, False]
    clock.now += 149.0
    assert not store.usable
    clock.now += 2.0
    assert store.usable
    store.put("b" * 32, [b"whole"]).result(timeout=60)
    assert store.usable


def test_what_a_store_that_rests_should_remove_is_removed_with_the_next(
    folder: Callable[[], ClaimStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: clock.now))
    store, place = folder(), tmp_path / "store" / FLEET
    for transfer_id in ("a" * 32, "b" * 32):
        store.put(transfer_id, [b"whole"]).result(timeout=60)
    with pytest.raises(FileExistsError):
        store.put("c" * 32, failing()).result(timeout=60)
    store.drop("a" * 32)
    assert len(list(place.iterdir())) == 2
    clock.now += 31.0
    store.drop("b" * 32)
    until(lambda: not list(place.iterdir()))


def test_what_was_to_be_removed_is_gone_before_a_store_is_closed(
    folder: Callable[[], ClaimStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: clock.now))  # each thread has its two seconds
    store, transfers = folder(), [f"{number:032}" for number in range(8)]
    for transfer_id in transfers:
        store.put(transfer_id, [b"whole"]).result(timeout=60)
    for transfer_id in transfers:
        store.drop(transfer_id)
    store.close()
    assert not list((tmp_path / "store" / FLEET).iterdir())


def test_a_link_or_a_pipe_that_lies_in_the_folder_is_neither_written_nor_read_through(
    folder: Callable[[], ClaimStore], tmp_path: Path
) -> None:
    place, precious = tmp_path / "store" / FLEET, tmp_path / "aggregator.sqlite"
    place.mkdir(parents=True)
    precious.write_bytes(b"a database")
    (place / "a-link").symlink_to(precious)
    os.mkfifo(place / "a-pipe")
    store = folder()
    for name in ("a-link", "a-pipe"):
        with pytest.raises(FileNotFoundError):
            store.fetch(name, tmp_path / "fetched", 10).result(timeout=60)
        store.put(name, [b"a bundle"]).result(timeout=60)
        store.fetch(name, tmp_path / "fetched", 10).result(timeout=60)
        assert (tmp_path / "fetched").read_bytes() == b"a bundle"
    assert precious.read_bytes() == b"a database"
    assert sorted(path.name for path in place.iterdir()) == ["a-link", "a-pipe"]

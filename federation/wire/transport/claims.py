"""Claim check: bundles in a store that both ends reach, in place of blocks over MQTT.

The sender puts a bundle there, and its offer says so; the receiver fetches it from the store that its own operator
named, never from a place that a message names. What arrives is held against the offer's size and block digests, and
what is missing of it, or all if the store can't be reached, comes over MQTT.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import importlib.util
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, cast
from urllib.parse import urlsplit

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import open_regular

MIN_BYTES = 64 << 10
"""Smaller bundles are through before a store has answered."""
WAIT_S = 10.0
"""An offer waits so long for its bundle to be in the store."""
FETCH_S = 60.0
"""After so long a bundle that doesn't arrive from the store comes over MQTT."""
REST_S = 30.0
"""A store that failed isn't asked again before, and one that forbids to write is read nevertheless; one that took
longer than anybody waits, for ten times what it took."""
MAX_REST_S = 600.0

_CHUNK_BYTES = 1 << 20
_AT_A_TIME = 4
_NAMING = frozenset(("s3", "gs", "gcs", "az", "abfs", "ftp", "sftp", "smb"))
"""Protocols whose URLs begin with a bucket or a host."""
_FOLDERS = ("file", "local")
"""What fsspec calls this machine's own."""
_S3: dict[str, Any] = {"config_kwargs": {"connect_timeout": 3, "read_timeout": 10, "retries": {"max_attempts": 1}}}

log = logging.getLogger(__name__)


def check_store(url: str) -> str:
    """Return a store's URL if bundles can lie there.

    Raises:
        SettingsError: It is none, holds a password, which other users of this machine would see, or the package that
            speaks its protocol isn't installed.
    """
    secret = url.partition("://")[2].rpartition("@")[0].partition("/")[0].partition(":")[2]
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise SettingsError(f"blob store {url.rpartition('@')[2]!r}: {error}") from None
    scheme = parts.scheme
    if parts.password is not None or (secret and not secret.isdecimal()):  # a password with a slash, or a port
        place = "AWS_SECRET_ACCESS_KEY" if scheme == "s3" else f"FSSPEC_{scheme.upper()}_PASSWORD"
        raise SettingsError(f"blob store {scheme}://...: its URL holds a password; give it in the variable {place}")
    nameless = scheme in _NAMING and not parts.netloc
    relative = scheme in _FOLDERS and (parts.netloc or not parts.path.startswith("/"))  # to where each program began
    if not scheme or nameless or relative:
        raise SettingsError(f"blob store {url!r}: expected a URL, for example s3://BUCKET/FOLDER or file:///SHARED/DIR")
    if importlib.util.find_spec("fsspec") is None or (scheme == "s3" and importlib.util.find_spec("s3fs") is None):
        raise SettingsError(f"blob store {url}: needs fsspec: pip install 'replayfleet[store]'")
    return url


class ClaimStore:
    """Bundles of one fleet in a store of fsspec's, put and fetched by threads of its own.

    Args:
        url: of a folder: ``s3://BUCKET/FOLDER``, ``file:///DIR``, ... Keys and endpoint come from where the protocol's
            own programs take them, such as ``AWS_ACCESS_KEY_ID`` and ``AWS_ENDPOINT_URL``.
        fleet: its name, a folder there.
        note: file that keeps on which mount a shared folder was, over restarts; None: nothing is kept.

    Raises:
        SettingsError: fsspec doesn't know the protocol, or lacks a package for it.
    """

    def __init__(self, url: str, fleet: str, note: Path | None = None) -> None:
        check_store(url)
        self._url, self._fleet, self._note = url, fleet, note
        self._scheme = urlsplit(url).scheme
        try:
            importlib.import_module("fsspec").get_filesystem_class(self._scheme)
        except (ValueError, ImportError) as error:
            raise SettingsError(f"blob store {url}: {error}") from error
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._rests_until = self._forbids_until = self._told_until = 0.0
        self._due: list[float] = []  # of what runs: when it is late
        self._left: deque[str] = deque(maxlen=1000)  # to be removed when it is usable
        self._opened: tuple[Any, str] | None = None
        self._device: int | None = None  # of the file system that the shared folder was on

    @property
    def usable(self) -> bool:
        """Whether it didn't fail a moment ago, and nothing that runs is late."""
        now = time.monotonic()
        with self._lock:
            overdue = [due for due in self._due if due <= now]  # one that never ends is forgotten in time, all are not
            late = len(overdue) == _AT_A_TIME or any(now < due + MAX_REST_S for due in overdue)
            fresh = late and now >= self._told_until
            self._told_until = now + REST_S if fresh else self._told_until
            usable = not late and now >= self._rests_until
        if fresh:
            log.warning("the blob store doesn't answer in time next=over MQTT, until it does")
        return usable

    @property
    def writable(self) -> bool:
        """Whether it is usable, and didn't forbid to write a moment ago."""
        return time.monotonic() >= self._forbids_until and self.usable

    def put(self, transfer_id: str, blocks: Iterable[bytes]) -> Future[None]:
        """Begin to store a bundle; the future's error is whatever the store, or our disk, had against it."""

        def work() -> None:
            with self._new(transfer_id) as target:
                for block in blocks:
                    target.write(block)

        return self._begun(work, "put", transfer_id, WAIT_S)

    def fetch(self, transfer_id: str, target: Path, size_bytes: int) -> Future[None]:
        """Begin to fetch a bundle into a file, of ``size_bytes`` at most; what came before an error stays there."""

        def work() -> None:
            with target.open("wb") as file:
                if self._streamed(transfer_id, file, size_bytes):
                    return
                with self._found(transfer_id) as source:
                    left = size_bytes
                    while left > 0 and (chunk := source.read(min(_CHUNK_BYTES, left))):
                        file.write(chunk)
                        left -= len(chunk)

        return self._begun(work, "fetched", transfer_id, FETCH_S)

    def drop(self, transfer_id: str) -> None:
        """Remove a bundle that nobody needs any more; where the store rests, with the next one."""
        self._left.append(transfer_id)
        for _ in range(len(self._left) if self.usable else 0):
            with contextlib.suppress(IndexError):  # another thread took it
                left = self._left.popleft()
                self._begun(functools.partial(self._remove, left), "removed", left, WAIT_S)

    def close(self) -> None:
        """Wait two seconds at most for what was asked for, such as removals, and begin nothing more after them."""
        end = time.monotonic() + 2.0
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._closed = True

    def _store(self) -> tuple[Any, str]:
        """Return the file system and the fleet's folder; some protocols connect for it, so not before it is used."""
        if self._opened is None:
            fsspec: Any = importlib.import_module("fsspec")
            options: dict[str, Any] = _S3 if self._scheme == "s3" else {"auto_mkdir": True} if self._is_shared else {}
            files, root = fsspec.core.url_to_fs(
                self._url, use_listings_cache=False, skip_instance_cache=True, **options
            )
            self._opened = files, f"{root.rstrip('/')}/{self._fleet}"
        return self._opened

    @property
    def _is_shared(self) -> bool:
        return self._scheme in _FOLDERS

    @contextlib.contextmanager
    def _new(self, transfer_id: str) -> Iterator[IO[bytes]]:
        """Open a bundle to be written; in a folder beside its place, where others may have laid a link or a pipe."""
        files, folder = self._store()
        place = f"{folder}/{transfer_id}"
        if not self._is_shared:
            with files.open(place, "wb") as target:
                yield target
            return
        beside = Path(f"{place}.{secrets.token_hex(8)}")
        self._make(beside.parent)
        try:
            with beside.open("xb") as target:
                yield target
            beside.replace(place)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def _make(self, folder: Path) -> None:
        """Make the fleet's shared folder; OSError if what was mounted there is gone.

        A folder made anew would fill this machine's own disk, seen by nobody.
        """
        before, root = self._device, folder.parent  # in this order: another thread may make it meanwhile
        if before is not None and (not root.is_dir() or root.stat().st_dev != before):
            raise OSError(f"{root} was there and is gone; mount it, or make it, again")
        if before is None and self._note is not None and self._note.is_file():
            known, _, mount = os.fsdecode(self._note.read_bytes()).partition("\n")
            if known == str(root) and not os.path.ismount(mount):  # this process began while it was away
                raise OSError(f"nothing is mounted at {mount}, where {root} was; mount it, or remove {self._note}")
        folder.mkdir(parents=True, exist_ok=True)
        self._device = root.stat().st_dev
        if before is None and self._note is not None:
            mount = next(str(each) for each in (root, *root.parents) if os.path.ismount(each))
            write_atomic(self._note, os.fsencode(f"{root}\n{mount}"))

    def _found(self, transfer_id: str) -> IO[bytes]:
        """Open a bundle to be read; in a folder a file alone, for a pipe would hold this thread for ever."""
        files, folder = self._store()
        place = f"{folder}/{transfer_id}"
        if not self._is_shared:
            return cast("IO[bytes]", files.open(place, "rb"))
        try:
            return open_regular(Path(place), links=False)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ELOOP}:
                raise
            raise FileNotFoundError("no bundle lies there") from error

    def _streamed(self, transfer_id: str, file: IO[bytes], size_bytes: int) -> bool:
        """Fetch piece by piece, which ends in time and in memory whatever the store sends; False: it has no such way.

        A file that s3fs opens reads an answer as a whole, and so one that never ends.
        """
        files, folder = self._store()

        async def copied() -> None:
            source, left = await files.open_async(f"{folder}/{transfer_id}", "rb"), size_bytes
            try:
                while left > 0 and (chunk := await source.read(min(_CHUNK_BYTES, left))):
                    file.write(chunk)
                    left -= len(chunk)
            finally:
                if (answer := getattr(source, "r", None)) is not None:  # s3fs has ten connections, and lets none go
                    answer.close()

        if not files.async_impl:
            return False
        try:
            importlib.import_module("fsspec.asyn").sync(files.loop, copied, timeout=FETCH_S)
        except NotImplementedError:
            return False
        except KeyError as error:  # s3fs reads it from the answer
            raise OSError("the store doesn't say how long its answer is") from error
        return True

    def _remove(self, transfer_id: str) -> None:
        with contextlib.suppress(Exception):  # it may be gone, or not ours to remove; operators let old bundles expire
            files, folder = self._store()
            files.rm_file(f"{folder}/{transfer_id}")

    def _begun(self, work: Callable[[], None], what: str, transfer_id: str, patience_s: float) -> Future[None]:
        def guarded() -> None:
            error: Exception | None = None
            began = time.monotonic()
            with self._lock:
                self._due.append(began + patience_s)
            try:
                work()
            except Exception as caught:
                error = caught
            took_s = time.monotonic() - began
            with self._lock:
                self._due.remove(began + patience_s)
            late = took_s >= patience_s
            if error is None and not late:
                return
            # Whoever offers a bundle that it never put there keeps the store from nobody. S3 calls that forbidden to
            # those who may list nothing; and who may read and not write goes on reading.
            absent = what == "fetched" and isinstance(error, FileNotFoundError)
            forbidden = isinstance(error, PermissionError) or getattr(error, "errno", 0) == errno.EROFS
            address: Any = self._url
            with contextlib.suppress(AttributeError, TypeError):  # of s3fs alone, once it is connected
                address = cast("Any", self._opened)[0]._s3.meta.endpoint_url
            with self._lock:
                now = time.monotonic()
                fresh, self._told_until = now >= self._told_until, now + REST_S
                if forbidden and what == "put":
                    self._forbids_until = now + REST_S
                if late or not absent:
                    rest_s = min(10 * took_s, MAX_REST_S) if late else 0.0 if forbidden else REST_S
                    self._rests_until, self._opened = max(self._rests_until, now + rest_s), None
            if fresh:
                slow = f"took {took_s:.0f} s, expected {patience_s:g} at most"
                text = _against(error, address) or (slow if late else f"{type(error).__name__} after {took_s:.0f} s")
                log.warning("bundle not %s transfer=%s error=%s next=over MQTT", what, transfer_id, text)
            if error is not None:
                raise error

        return self._submit(guarded)

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        """Do it in one of a few threads, which no end of the program waits for, as it would for an executor's."""
        future: Future[None] = Future()

        def run() -> None:
            if self._closed or not future.set_running_or_notify_cancel():
                future.cancel()
                return
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._work.put(run)
        with self._lock:
            if len(self._threads) < _AT_A_TIME:
                self._threads.append(threading.Thread(target=self._serve, name="blob-store", daemon=True))
                self._threads[-1].start()
        return future

    def _serve(self) -> None:
        while (run := self._work.get()) is not None:
            run()


def _against(error: Exception | None, address: object) -> str:
    """Return what a store has against a bundle; of one that sends on, where to, for S3's own words don't say.

    A gateway's page, or an answer without a message, has no words that S3's would quote: then its status says what.
    """
    answer, facts = getattr(getattr(error, "__cause__", None), "response", None), getattr(error, "kwargs", {})
    said = ""
    if isinstance(answer, dict):
        about = answer.get("ResponseMetadata", {})
        status, headers = about.get("HTTPStatusCode", 0), about.get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region")
        where = f"region {region}" if region else headers.get("location") or answer.get("Error", {}).get("Endpoint")
        said = f"answers {status}, and sends on to {where or 'nowhere'}" * (300 <= status < 400)
        if status and not said and not answer.get("Error", {}).get("Message"):
            return f"{address} answers {status} {answer.get('Error', {}).get('Code') or ''}".strip()
    elif (other := getattr(facts.get("error"), "host", None)) and other not in str(facts.get("endpoint_url")):
        said = f"sends on to {other}, which can't be reached"  # redirects are followed, to a login page's host, say
    if said:
        return f"{address} {said}; look at AWS_DEFAULT_REGION and AWS_ENDPOINT_URL"
    return " ".join(str(error or "").split())[:300]

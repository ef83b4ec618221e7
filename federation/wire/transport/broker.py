"""A broker for who has none: a private mosquitto, or amqtt in a thread as the last resort.

Both listen on this machine only, keep nothing on disk and end with the process that opened them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from replayfleet.federation.children import die_with_parent
from replayfleet.federation.errors import SettingsError

MOSQUITTO_VARIABLE = "MOSQUITTO_BIN"
_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")
_MIN_VERSION = (2, 0)
_PORT_ATTEMPTS = 5
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0

_CONFIG = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence false
set_tcp_nodelay true
max_packet_size 1048576
max_queued_messages 10000
max_queued_bytes 268435456
max_inflight_messages 20
log_dest stderr
log_type error
log_type warning
"""
"""``max_inflight_messages`` bounds the copies that wait for one slow client: 5 MB of blocks, where 64 took 16.
Never set ``message_size_limit``: clients would send a refused message again and again."""


@dataclass(frozen=True, slots=True)
class BrokerHandle:
    """Where the broker is, and one line for operators about what it guarantees.

    Attributes:
        url: for ``MqttSession``.
        description: which broker, where, with which limits.
        pid: of a private mosquitto.
        has_ended: asks whether that was ended.
    """

    url: str
    description: str
    pid: int | None = None
    has_ended: Callable[[], bool] = lambda: False


@contextlib.contextmanager
def open_broker(*, log: logging.Logger, port: int | None = None) -> Iterator[BrokerHandle]:
    """Yield a private mosquitto, else an embedded amqtt.

    Args:
        log: told which broker it became.
        port: where it listens, instead of any free one.

    Raises:
        SettingsError: A port in use, a broker that doesn't start, or none to start.
    """
    with contextlib.ExitStack() as stack:
        binary = find_mosquitto()
        handle = stack.enter_context(_mosquitto(binary, port) if binary is not None else _embedded(port))
        log.info("broker description=%r", handle.description)
        yield handle


class PrivateBroker:
    """A broker of our own that is started again where somebody ends it, as Linux does where memory runs out; a context.

    Args:
        port: where it listens; any free one if none is given.
        whose: log is told which broker it became.
    """

    def __init__(self, port: int | None = None, whose: str = "fleet") -> None:
        self._port, self._log = port, logging.getLogger(whose)
        self._stack = contextlib.ExitStack()
        self._handle: BrokerHandle | None = None

    def __enter__(self) -> PrivateBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def handle(self) -> BrokerHandle:
        assert self._handle is not None
        return self._handle

    @property
    def url(self) -> str:
        """Where it listens, also while it is away."""
        return f"mqtt://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, at the port that it had before.

        Raises:
            SettingsError: It doesn't start.
        """
        self._handle = self._stack.enter_context(open_broker(log=self._log, port=self._port))
        self._port = int(self._handle.url.rpartition(":")[2])

    def kill(self) -> None:
        """End it with SIGKILL: all that it held is gone."""
        assert self.handle.pid is not None
        os.kill(self.handle.pid, signal.SIGKILL)
        self._stack.close()
        self._handle = None

    def keep(self) -> bool:
        """Start it again if somebody else ended it; returns whether it did. If it doesn't start, call it again."""
        if self._handle is None or not self._handle.has_ended():
            return False
        if find_mosquitto() is None:  # short of memory it can't be asked for its version; the embedded one would stay
            return False
        self._stack.close()
        self.start()
        return True


def find_mosquitto() -> Path | None:
    """Return a mosquitto of version 2 or later, also from folders that ordinary users don't have on their path.

    Raises:
        SettingsError: ``MOSQUITTO_BIN`` names something else.
    """
    named = os.environ.get(MOSQUITTO_VARIABLE)
    if named is not None:
        if _version(named) is None:
            raise SettingsError(f"{MOSQUITTO_VARIABLE}={named!r} is not a mosquitto; unset it or correct it")
        return Path(named)
    found = shutil.which("mosquitto")
    for candidate in ([found] if found else []) + [f"{folder}/mosquitto" for folder in _FOLDERS]:
        version = _version(candidate)
        if version is not None and version >= _MIN_VERSION:
            return Path(candidate)
    return None


def _version(binary: str) -> tuple[int, int] | None:
    try:
        result = subprocess.run([binary, "-h"], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"mosquitto version (\d+)\.(\d+)", result.stdout)
    return (int(match[1]), int(match[2])) if match else None


@contextlib.contextmanager
def _mosquitto(binary: Path, port: int | None) -> Iterator[BrokerHandle]:
    with tempfile.TemporaryDirectory(prefix="replayfleet-broker-") as folder:
        process, used = _start_mosquitto(binary, Path(folder), port)
        version = ".".join(map(str, _version(str(binary)) or ()))
        text = f"private mosquitto {version} on 127.0.0.1:{used}, without persistence: it ends with this process"
        try:
            yield BrokerHandle(f"mqtt://127.0.0.1:{used}", text, process.pid, lambda: process.poll() is not None)
        finally:
            _end(process)


def _start_mosquitto(binary: Path, folder: Path, port: int | None) -> tuple[subprocess.Popen[bytes], int]:
    problem = ""
    for _ in range(_PORT_ATTEMPTS if port is None else 1):
        config, errors = folder / "mosquitto.conf", folder / "errors.log"
        with _reserved(port) as held, errors.open("wb") as stderr:
            chosen = int(held.getsockname()[1])
            text = _CONFIG.format(port=chosen)
            if os.geteuid() == 0:
                text += "user root\n"  # otherwise it looks for a user of its own, which need not exist
            config.write_text(text, encoding="utf-8")
            process = subprocess.Popen(  # noqa: S603
                [binary, "-c", config],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C in a terminal is for its parent, which still has goodbyes to send
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
            if _listens(chosen, process):
                return process, chosen
        _end(process)
        problem = errors.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    raise SettingsError(f"{binary} does not start ({problem or 'no word from it'})")


def _listens(port: int, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process.poll() is None
        time.sleep(0.005)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _reserved(port: int | None) -> socket.socket:
    """Bind a port, or any free one: until mosquitto listens there nobody else is given it, and taken for ours."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as mosquitto does: it may have it too
    try:
        held.bind(("127.0.0.1", port or 0))
    except (OSError, OverflowError) as error:
        held.close()
        raise SettingsError(f"broker port {port} can't be used ({error}); name another one") from error
    return held


@contextlib.contextmanager
def _embedded(port: int | None) -> Iterator[BrokerHandle]:
    try:
        from replayfleet.federation.wire.transport.embedded import EmbeddedBroker
    except ImportError:
        raise SettingsError(
            "no MQTT broker: install mosquitto (apt install mosquitto), or pip install 'replayfleet[broker]'; looked "
            f"for mosquitto in ${MOSQUITTO_VARIABLE}, PATH, {', '.join(_FOLDERS)} as user {os.getuid()}; "
            "`aggregator serve --broker URL` takes one that runs"
        ) from None
    if port is not None:
        _reserved(port).close()
    broker = EmbeddedBroker(port or 0)
    used = broker.start()
    text = (
        f"embedded amqtt on 127.0.0.1:{used}: MQTT 3.1.1 only, a quarter of mosquitto's speed, nothing kept over "
        "restarts or dead links; for demos. Install mosquitto for more"
    )
    try:
        yield BrokerHandle(f"mqtt://127.0.0.1:{used}", text)
    finally:
        broker.stop()

"""Transfers side by side: ours over mosquitto, one single MQTT message, plain TCP, HTTP PUT.

Each ends when the receiver has verified the bytes, has them on disk (fsync) and the sender has been told so. The bytes
are random, so compression helps nobody. Ours and the single message go through brokers of the same kind, both ends with
TCP_NODELAY; the single message's broker takes packets of any size. Runs are interleaved; medians are printed.

    python -m benchmarks.transfer [--large] [--frozen] [--repeats 5] [--out benchmarks/results/transfer.json]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import http.server
import logging
import multiprocessing
import os
import signal
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from benchmarks.harness import peak_bytes, run
from replayfleet.federation.wire.protocol import topics
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest
from replayfleet.federation.wire.transport import broker as broker_module
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.broker import open_broker
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.interfaces import Arrived, Concluded, Event, Offered
from replayfleet.federation.wire.transport.mqtt import MqttSession
from replayfleet.federation.wire.transport.seal import Signer, Voices
from tests.support.voices import TakesAll

FLEET = "bench"
NUM_CLIENTS = 10
CLIENT_BYTES = 2_800_000
FROZEN_BYTES = 20_000_000
FROZEN_S = 8.0
SPAWN = multiprocessing.get_context("spawn")
log = logging.getLogger("benchmark")


class Member:
    """Ours: one end of a fleet, served by the thread that calls ``serve``."""

    def __init__(self, url: str, folder: Path, client: str | None) -> None:
        self.client = client
        self.store = DiskBlobStore(folder)
        for number in range(256):  # a store that has been in use for a while
            (folder / f"{number:02x}").mkdir(exist_ok=True)
        self._inbox: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        signer = Signer(Ed25519PrivateKey.generate())
        self.session = MqttSession(
            url, client or "aggregator", on_message=lambda topic, payload: self._inbox.put((topic, payload))
        )
        wanted = topics.aggregator_subscriptions(FLEET)
        if client is not None:
            wanted = topics.client_subscriptions(FLEET, client)
        self.session.subscribe((*wanted.control, *wanted.data))
        self.courier = FleetCourier(
            "aggregator" if client is None else "client",
            FLEET,
            SimpleNamespace(control=self.session, data=self.session),
            self.store,
            Voices(signer, TakesAll()),
            own_id=client,
        )
        self.session.start()
        while not self.session.connected:
            time.sleep(0.01)

    def serve(self, until: Callable[[Event], bool]) -> None:
        """Work until an event ends it."""
        while True:
            try:
                topic, payload = self._inbox.get(timeout=0.1)
            except Empty:
                events = self.courier.tick(time.monotonic())
            else:
                events = self.courier.handle(topic, payload, time.monotonic())
            while events:
                event = events.pop(0)
                if isinstance(event, Offered):
                    events += self.courier.accept(event.peer, event.offer, time.monotonic())
                elif isinstance(event, Arrived):
                    self.courier.conclude(event.peer, event.manifest, event.transfer_id, accepted=True)
                    for entry in event.manifest.blobs:
                        self.store.path(entry.digest).unlink()
                if until(event):
                    return

    def prepare(self, data: bytes, version: int) -> Manifest:
        """Put the bytes where a training process would have left them."""
        assert self.client is not None
        self.store.collect(set())
        entry = BlobEntry("task", self.store.put(data), len(data))
        return Manifest("up", FLEET, self.client, 0, version, (entry,))

    def upload(self, manifest: Manifest) -> float:
        """Return the seconds from the offer to its verdict."""
        started = time.perf_counter()
        self.courier.send(manifest.client_id, manifest, [manifest.blobs[0].digest], time.monotonic())
        self.serve(lambda event: isinstance(event, Concluded) and event.verdict.accepted)
        return time.perf_counter() - started


def plain_client(
    url: str, name: str, on_message: Callable[[bytes], None], topic: str, *, nodelay: bool = True
) -> Client:
    """Stock paho: what one writes after reading its manual, plus TCP_NODELAY."""
    client = Client(CallbackAPIVersion.VERSION2, name, protocol=MQTTProtocolVersion.MQTTv5)
    client.on_message = lambda _client, _data, message: on_message(bytes(message.payload))
    if nodelay:
        client.on_socket_open = lambda _client, _data, sock: sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # type: ignore[union-attr, attr-defined]
    ready = threading.Event()
    client.on_subscribe = lambda *_: ready.set()
    client.on_connect = lambda *_: client.subscribe(topic, 1)
    host, _, port = url.removeprefix("mqtt://").partition(":")
    client.connect(host, int(port))
    client.loop_start()
    assert ready.wait(10)
    return client


class Single:
    """One MQTT message: client id (16 bytes), sha256, data."""

    def __init__(self, url: str, name: str) -> None:
        self._name = name.encode().ljust(16)
        self._done: SimpleQueue[bytes] = SimpleQueue()
        self._client = plain_client(url, f"single-{name}", self._done.put, f"single/done/{name}")

    def upload(self, data: bytes) -> float:
        started = time.perf_counter()
        self._client.publish("single/up", self._name + hashlib.sha256(data).digest() + data, qos=1)
        assert self._done.get(timeout=300) == b"ok"
        return time.perf_counter() - started


def write_durably(path: Path, pieces: Iterator[bytes]) -> bytes:
    """Write, fsync, and return the sha256."""
    found = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            found.update(piece)
            file.write(piece)
        os.fsync(file.fileno())
    return found.digest()


def ours_receiver(url: str, folder: Path, ready: Any) -> None:
    member = Member(url, folder, None)
    ready.set()
    member.serve(lambda _event: False)


def single_receiver(url: str, folder: Path, ready: Any) -> None:
    inbox: SimpleQueue[bytes] = SimpleQueue()
    client = plain_client(url, "single-receiver", inbox.put, "single/up")
    ready.set()
    while True:
        payload = memoryview(inbox.get())
        name = bytes(payload[:16]).strip().decode()
        digest = write_durably(folder / "single", iter([payload[48:]]))  # type: ignore[list-item]
        client.publish(f"single/done/{name}", b"ok" if digest == payload[16:48] else b"bad", qos=1)


def tcp_receiver(port: int, folder: Path, ready: Any) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        ready.set()
        while True:
            connection, _ = server.accept()
            with connection:
                (size,) = struct.unpack("!Q", connection.recv(8, socket.MSG_WAITALL))
                connection.sendall(write_durably(folder / "tcp", pieces(connection.makefile("rb").read, size)))


def pieces(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    while size:
        piece = read(min(size, 256 << 10))
        size -= len(piece)
        yield piece


def http_receiver(port: int, folder: Path, ready: Any) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            size = int(self.headers["Content-Length"])
            digest = write_durably(folder / "http", pieces(self.rfile.read, size))
            self.send_response(201)
            self.send_header("Content-Length", "32")
            self.end_headers()
            self.wfile.write(digest)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", port), Handler) as server:
        ready.set()
        server.serve_forever()


def tcp_upload(port: int, data: bytes) -> float:
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(struct.pack("!Q", len(data)))
        connection.sendall(data)
        assert connection.recv(32, socket.MSG_WAITALL) == hashlib.sha256(data).digest()
    return time.perf_counter() - started


def http_upload(port: int, data: bytes) -> float:
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", "/blob", body=data)
    assert connection.getresponse().read() == hashlib.sha256(data).digest()
    connection.close()
    return time.perf_counter() - started


def client_process(pipe: Connection, ours: str, single: str, folder: Path, name: str) -> None:
    """A sender with a process of its own, told over a pipe what to send and how."""
    member, other = Member(ours, folder, name), Single(single, name)
    pipe.send("ready")
    version = 0
    while True:
        kind, size = pipe.recv()
        data = os.urandom(size)
        version += 1
        manifest = member.prepare(data, version)
        pipe.send("armed")
        pipe.recv()
        pipe.send(member.upload(manifest) if kind == "ours" else other.upload(data))


@contextlib.contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[int]:
    """A child that is ready when this yields, and gone afterwards."""
    ready = SPAWN.Event()
    child = SPAWN.Process(target=target, args=(*args, ready), daemon=True)
    child.start()
    assert ready.wait(30)
    assert child.pid is not None
    try:
        yield child.pid
    finally:
        child.kill()
        child.join()


@contextlib.contextmanager
def variant(change: Callable[[str], str]) -> Iterator[tuple[str, int]]:
    """A mosquitto with another configuration than ours."""
    kept = broker_module._CONFIG
    broker_module._CONFIG = change(kept)
    try:
        with open_broker(log=log) as handle:
            assert handle.pid is not None
            yield handle.url, handle.pid
    finally:
        broker_module._CONFIG = kept


def peak_rss_mb(pid: int) -> float:
    return peak_bytes(pid) / 2**20


def compare_sizes(sizes_mb: list[int], repeats: int, folder: Path) -> dict[str, Any]:
    """Return medians in MB/s per size and method, and ratios."""
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        ours_url, ours_pid = stack.enter_context(variant(lambda config: config))
        any_size = variant(lambda config: config.replace("max_packet_size 1048576\n", ""))
        single_url, single_pid = stack.enter_context(any_size)
        stack.enter_context(process(ours_receiver, ours_url, folder / "ours"))
        stack.enter_context(process(single_receiver, single_url, folder))
        with broker_module._reserved(None) as one, broker_module._reserved(None) as other:
            tcp_port, http_port = (int(held.getsockname()[1]) for held in (one, other))
        stack.enter_context(process(tcp_receiver, tcp_port, folder))
        stack.enter_context(process(http_receiver, http_port, folder))
        member, single = Member(ours_url, folder / "sender", "cam"), Single(single_url, "cam")
        version = 0
        for size_mb in sizes_mb:
            seconds: dict[str, list[float]] = {"ours": [], "single": [], "tcp": [], "http": []}
            for _ in range(repeats + 1):
                data = os.urandom(size_mb * 1_000_000)
                version += 1
                seconds["ours"].append(member.upload(member.prepare(data, version)))
                seconds["single"].append(single.upload(data))
                seconds["tcp"].append(tcp_upload(tcp_port, data))
                seconds["http"].append(http_upload(http_port, data))
            rate = {name: size_mb / statistics.median(times[1:]) for name, times in seconds.items()}
            ratios = {f"ours/{name}": rate["ours"] / rate[name] for name in ("single", "http", "tcp")}
            rss = {"ours": peak_rss_mb(ours_pid), "single": peak_rss_mb(single_pid)}
            result[f"{size_mb} MB"] = {
                "mb_per_s": rate,
                "ratios": ratios,
                "broker_peak_rss_mb": rss,
                "seconds": seconds,
            }
            print(
                f"{size_mb:4d} MB  "
                + "  ".join(f"{name} {value:6.1f} MB/s" for name, value in rate.items())
                + "   "
                + "  ".join(f"{name} {value:.2f}" for name, value in ratios.items())
                + f"   broker RSS {rss['ours']:.0f} / {rss['single']:.0f} MB",
                flush=True,
            )
        member.session.stop()
    return result


class Crowd:
    """Ten senders in processes of their own, that start together."""

    def __init__(self, stack: contextlib.ExitStack, ours: str, single: str, folder: Path) -> None:
        self._pipes = []
        for number in range(NUM_CLIENTS):
            pipe, far = SPAWN.Pipe()
            name = f"cam-{number}"
            child = SPAWN.Process(target=client_process, args=(far, ours, single, folder / name, name), daemon=True)
            child.start()
            stack.callback(child.kill)
            self._pipes.append(pipe)
        self._wait()

    def go(self, kind: str, size: int) -> float:
        """Return the seconds until the last one is served."""
        self._tell((kind, size))
        self._wait()
        started = time.perf_counter()
        self._tell("go")
        self._wait()
        return time.perf_counter() - started

    def _tell(self, what: object) -> None:
        for pipe in self._pipes:
            pipe.send(what)

    def _wait(self) -> None:
        for pipe in self._pipes:
            pipe.recv()


def many_clients(repeats: int, frozen: bool, folder: Path) -> dict[str, Any]:
    """Return seconds until all of ten clients are served, ours and single, and the brokers' memory."""
    with contextlib.ExitStack() as stack:
        ours_url, ours_pid = stack.enter_context(variant(lambda config: config))
        any_size = variant(lambda config: config.replace("max_packet_size 1048576\n", ""))
        single_url, single_pid = stack.enter_context(any_size)
        receiver = stack.enter_context(process(ours_receiver, ours_url, folder / "aggregator"))
        stack.enter_context(process(single_receiver, single_url, folder))
        crowd = Crowd(stack, ours_url, single_url, folder)
        seconds: dict[str, list[float]] = {"ours": [], "single": []}
        for _ in range(repeats + 1):
            for kind, times in seconds.items():
                times.append(crowd.go(kind, CLIENT_BYTES))
        ours, single = (statistics.median(seconds[kind][1:]) for kind in ("ours", "single"))
        rss = {"ours": peak_rss_mb(ours_pid), "single": peak_rss_mb(single_pid)}
        print(
            f"{NUM_CLIENTS} x {CLIENT_BYTES / 1e6} MB  ours {ours:.3f} s  single {single:.3f} s   "
            f"ours/single {single / ours:.2f}   broker RSS {rss['ours']:.0f} / {rss['single']:.0f} MB",
            flush=True,
        )
        result = {"seconds": seconds, "ratio ours/single": single / ours, "broker_peak_rss_mb": rss}
        if frozen:
            os.kill(receiver, signal.SIGSTOP)
            threading.Timer(FROZEN_S, os.kill, (receiver, signal.SIGCONT)).start()
            took, peak = crowd.go("ours", FROZEN_BYTES), peak_rss_mb(ours_pid)
            result["frozen"] = {"seconds": took, "broker_peak_rss_mb": peak}
            print(
                f"aggregator frozen {FROZEN_S:.0f} s, {NUM_CLIENTS} x {FROZEN_BYTES / 1e6:.0f} MB: "
                f"all done after {took:.1f} s, broker RSS {peak:.0f} MB",
                flush=True,
            )
    return result


def request_and_reply(nodelay: bool, count: int) -> float:
    """Return the median milliseconds of a 200-byte request and its reply."""
    change = (lambda config: config) if nodelay else (lambda config: config.replace("set_tcp_nodelay true\n", ""))
    with variant(change) as (url, _):
        server: list[Client] = []
        server.append(
            plain_client(url, "server", lambda payload: server[0].publish("reply", payload, 1), "ask", nodelay=nodelay)  # type: ignore[arg-type, return-value]
        )
        replies: SimpleQueue[bytes] = SimpleQueue()
        client = plain_client(url, "client", replies.put, "reply", nodelay=nodelay)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            client.publish("ask", bytes(200), 1)
            replies.get(timeout=5)
            times.append(time.perf_counter() - started)
        for each in (server[0], client):
            each.disconnect()
            each.loop_stop()
    return 1000 * statistics.median(times)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sizes = compare_sizes([3, 16, 64, *([200] if options.large else [])], options.repeats, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        clients = many_clients(options.repeats, options.frozen, Path(folder))
    small = {"with NODELAY": request_and_reply(True, 50), "without": request_and_reply(False, 15)}
    fast, slow = small.values()
    print(f"request and reply of 200 B: {fast:.2f} ms with TCP_NODELAY, {slow:.1f} ms without")
    return {"sizes": sizes, "ten_clients": clients, "request_reply_ms": small, "repeats": options.repeats}


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        large=(False, "200 MB too"),
        frozen=(False, "ten clients while the aggregator is stopped for 8 s"),
        repeats=(5, "interleaved runs per number, after one to warm up"),
    )

"""A small RTSP camera for tests: MJPEG in RTP, interleaved in the TCP connection (RFC 2326, RFC 2435).

It listens on 127.0.0.1 and can be told to fall silent, send garbage, change size, hang up and refuse.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import cv2
import numpy as np
from numpy.typing import NDArray

from tests.support.ports import free_port

BITS = 12
"""Of the picture's number that is painted into it."""

_BLOCK = 16
_PAYLOAD = 1400
_JPEG = 26
"""RTP payload type of JPEG (RFC 3551)."""

RED = (200, 40, 40)
"""Of every picture's background, as RGB."""


def painted(number: int, width: int, height: int) -> NDArray[np.uint8]:
    """Return (H, W, 3) uint8 RGB: a red picture with ``number`` in black and white blocks at its top left."""
    picture = np.empty((height, width, 3), np.uint8)
    picture[:] = RED
    for bit in range(BITS):
        picture[:_BLOCK, bit * _BLOCK : (bit + 1) * _BLOCK] = 255 * (number >> bit & 1)
    return picture


def number_in(pixels: NDArray[np.uint8]) -> int:
    """Return the number (modulo 2**BITS) that is painted into a picture."""
    blocks = pixels[4:12, : BITS * _BLOCK].mean(axis=(0, 2)).reshape(BITS, _BLOCK).mean(axis=1)
    return sum(1 << bit for bit in range(BITS) if blocks[bit] > 127)


class RtspServer:
    """One camera at ``url``; use it as a context manager.

    Args:
        size: (width, height) of the pictures in pixels, multiples of 16 and at least 192 wide.
        rate_hz: pictures per second.
    """

    def __init__(self, size: tuple[int, int] = (320, 240), rate_hz: float = 25.0) -> None:
        self.size = size
        self.silent = False
        self.garbage = False
        """Noise instead of RTP packets."""
        self.damaged = False
        """Pictures that begin well and are noise from there on."""
        self.status = "200 OK"
        self.num_connections = 0
        self._rate_hz = rate_hz
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._numbers = itertools.count()
        self.port = free_port()

    @property
    def url(self) -> str:
        """Where the camera is, with a user and a password that it doesn't ask for."""
        return f"rtsp://operator:secret@127.0.0.1:{self.port}/street?channel=1"

    def __enter__(self) -> RtspServer:
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()

    def accept(self) -> None:
        """Listen (again)."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        self._listener = listener
        threading.Thread(target=self._listen, args=(listener,), name="rtsp-server", daemon=True).start()

    def refuse(self) -> None:
        """Hang up, and refuse new connections."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.hang_up()

    def come_back(self) -> None:
        """Serve again as at first, whatever failed."""
        self.silent = self.garbage = self.damaged = False
        self.status = "200 OK"
        if self._listener is None:
            self.accept()

    def ask_for_another_password(self) -> None:
        self.status = "401 Unauthorized"
        self.hang_up()

    def hang_up(self) -> None:
        """End all connections; new ones are welcome."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._guarded, args=(connection,), name="rtsp-client", daemon=True).start()

    def _guarded(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        with connection, contextlib.suppress(OSError):
            self._converse(connection)
        self._connections.discard(connection)

    def _converse(self, connection: socket.socket) -> None:
        sending = threading.Lock()
        for method, target, sequence in _requests(connection):
            if self.silent:
                continue
            with sending:
                connection.sendall(_answer(method, target, sequence, self.status))
            if method == "PLAY":
                threading.Thread(target=self._play, args=(connection, sending), name="rtp", daemon=True).start()
            if method == "TEARDOWN":
                return

    def _play(self, connection: socket.socket, sending: threading.Lock) -> None:
        began, sequence = time.monotonic(), itertools.count()
        rng = random.Random(0)
        for turn in itertools.count():
            time.sleep(max(0.0, began + turn / self._rate_hz - time.monotonic()))
            if self.silent:
                continue
            width, height = self.size
            jpeg = _jpeg(painted(next(self._numbers), width, height))
            clock = int((time.monotonic() - began) * 90000) & 0xFFFFFFFF
            try:
                tables, scan = _split(jpeg)
                if self.damaged:
                    scan = scan[: len(scan) // 2] + rng.randbytes(len(scan) // 2)
                for packet in _packets(tables, scan, (width, height), sequence, clock):
                    body = rng.randbytes(len(packet)) if self.garbage else packet
                    with sending:
                        connection.sendall(b"$" + struct.pack(">BH", 0, len(body)) + body)
            except OSError:
                return


FAILURES: dict[str, Callable[[RtspServer], None]] = {
    "silent": lambda server: setattr(server, "silent", True),
    "noise": lambda server: setattr(server, "garbage", True),
    "damaged pictures": lambda server: setattr(server, "damaged", True),
    "another password": RtspServer.ask_for_another_password,
    "refuses": RtspServer.refuse,
}


def _requests(connection: socket.socket) -> Iterator[tuple[str, str, str]]:
    """Yield (method, target, CSeq); skips interleaved receiver reports."""
    stream = connection.makefile("rb")
    while True:
        first = stream.read(1)
        if not first:
            return
        if first == b"$":
            _, length = struct.unpack(">BH", stream.read(3))
            stream.read(length)
            continue
        method, target, _ = (first + stream.readline()).decode().split()
        headers = {}
        while line := stream.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        yield method, target, headers["cseq"]


def _answer(method: str, target: str, sequence: str, status: str) -> bytes:
    lines = [f"RTSP/1.0 {status}", f"CSeq: {sequence}", "Session: 1"]
    body = ""
    if method == "OPTIONS":
        lines.append("Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN, GET_PARAMETER")
    elif method == "DESCRIBE":
        body = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=street\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
        body += f"m=video 0 RTP/AVP {_JPEG}\r\na=control:track\r\n"
        lines += [f"Content-Base: {target}/", "Content-Type: application/sdp", f"Content-Length: {len(body)}"]
    elif method == "SETUP":
        lines.append("Transport: RTP/AVP/TCP;unicast;interleaved=0-1")
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def _jpeg(picture: NDArray[np.uint8]) -> bytes:
    _, jpeg = cv2.imencode(".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 90])
    return jpeg.tobytes()


def _packets(tables: bytes, scan: bytes, size: tuple[int, int], sequence: Iterator[int], clock: int) -> Iterator[bytes]:
    """Cut a baseline 4:2:0 JPEG into RTP packets (RFC 2435, section 3.1)."""
    width, height = size
    offset = 0
    while offset < len(scan):
        header = struct.pack(">I", offset) + bytes([1, 255, width // 8, height // 8])
        if offset == 0:
            header += struct.pack(">BBH", 0, 0, len(tables)) + tables
        piece = scan[offset : offset + _PAYLOAD]
        offset += len(piece)
        marker = 0x80 if offset == len(scan) else 0
        rtp = struct.pack(">BBHII", 0x80, marker | _JPEG, next(sequence) & 0xFFFF, clock, 0x5EED)
        yield rtp + header + piece


def _split(jpeg: bytes) -> tuple[bytes, bytes]:
    """Return (quantisation tables, entropy-coded scan)."""
    tables, at = b"", 2
    while True:
        marker, length = struct.unpack_from(">HH", jpeg, at)
        segment = jpeg[at + 4 : at + 2 + length]
        at += 2 + length
        if marker == 0xFFDB:
            for start in range(0, len(segment), 65):
                tables += segment[start + 1 : start + 65]
        if marker == 0xFFDA:
            return tables, jpeg[at:-2]

"""Pages are there for those who ask for something, however many connections say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from replayfleet.federation.service.web import guard, serving
from tests.support.authority import Authority


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[serving.WebServer]:
    monkeypatch.setattr(serving, "FIRST_REQUEST_S", 0.2)
    with served() as made:
        yield made


@contextlib.contextmanager
def served(tls: tuple[Path | None, Path | None] = (None, None)) -> Iterator[serving.WebServer]:

    async def takes(request: Request) -> PlainTextResponse:
        try:
            return PlainTextResponse(str(len(await guard.body_of(request, 100))))
        except guard.Refused as refused:
            return PlainTextResponse(str(refused), refused.status)

    async def on_and_on() -> AsyncIterator[str]:
        while True:
            yield "more\n"
            await asyncio.sleep(0.01)

    routes = [
        Route("/", lambda _: PlainTextResponse("here")),
        Route("/body", takes, methods=["POST"]),
        Route("/live", lambda _: StreamingResponse(on_and_on())),
    ]
    app = Starlette(routes=routes)
    made = serving.WebServer(app, "127.0.0.1", 0, name="pages", max_connections=4, tls=tls)
    thread = threading.Thread(target=made.run)
    thread.start()
    while not made._server.started:
        thread.join(0.01)
    try:
        yield made
    finally:
        made.stop()
        thread.join()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_connections_that_never_ask_give_their_places_back(server: serving.WebServer, said: bytes) -> None:
    address = server._server.servers[0].sockets[0].getsockname()
    silent = [socket.create_connection(address, timeout=60) for _ in range(4)]
    try:
        for each in silent:
            each.sendall(said)
        assert [each.recv(100) for each in silent] == [b""] * 4  # closed, without a word
        with urllib.request.urlopen(server.url) as answer:
            assert answer.read() == b"here"
    finally:
        for each in silent:
            each.close()


def test_connections_beyond_all_places_are_closed_at_once_so_that_descriptors_are_left(
    server: serving.WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "FIRST_REQUEST_S", 60.0)
    address = server._server.servers[0].sockets[0].getsockname()
    kept = [socket.create_connection(address, timeout=60) for _ in range(4 + serving.SURPLUS)]
    try:
        while len(server._server.server_state.connections) < len(kept):
            time.sleep(0.01)
        more = [socket.create_connection(address, timeout=60) for _ in range(3)]
        for each in more:
            with each, contextlib.suppress(ConnectionResetError):
                assert each.recv(100) == b""
        kept[0].sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert kept[0].recv(100).startswith(b"HTTP/1.1 503"), "who is within the surplus is told"
    finally:
        for each in kept:
            each.close()


def test_connections_that_never_agree_on_tls_are_bounded_and_give_their_places_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They weren't counted: a thousand of them took all descriptors, for a minute each, and no page was served."""
    monkeypatch.setattr(serving, "FIRST_REQUEST_S", 60.0)
    tls = Authority(tmp_path).issue("localhost")
    with served(tls) as server:
        address = server._server.servers[0].sockets[0].getsockname()
        kept = [socket.create_connection(address, timeout=60) for _ in range(4 + serving.SURPLUS)]
        with socket.create_connection(address, timeout=60) as another, contextlib.suppress(ConnectionResetError):
            assert another.recv(100) == b""
        for each in kept:
            each.close()
    monkeypatch.setattr(serving, "FIRST_REQUEST_S", 0.2)
    with served(tls) as server:
        address = server._server.servers[0].sockets[0].getsockname()
        silent = [socket.create_connection(address, timeout=60) for _ in range(4 + serving.SURPLUS)]
        assert {each.recv(100) for each in silent} == {b""}
        for each in silent:
            each.close()


def test_connections_that_ask_once_and_never_end_their_second_question_give_their_places_back(
    server: serving.WebServer,
) -> None:
    address = server._server.servers[0].sockets[0].getsockname()
    stalled = [socket.create_connection(address, timeout=60) for _ in range(3)]
    try:
        for each in stalled:
            each.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert each.recv(1000).startswith(b"HTTP/1.1 200")
            each.sendall(b"GET / HTTP/1.1\r\nHost: 127.0")
        for each in stalled:
            while each.recv(1000):
                pass
        with urllib.request.urlopen(server.url) as answer:
            assert answer.read() == b"here"
    finally:
        for each in stalled:
            each.close()


def test_an_answer_that_goes_on_and_on_ends_with_the_server_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with served() as server:
        line = socket.create_connection(server._server.servers[0].sockets[0].getsockname(), timeout=60)
        line.sendall(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
    with contextlib.suppress(ConnectionResetError):
        while line.recv(1000):
            pass
    line.close()
    assert [record.getMessage() for record in caplog.records] == []


def test_a_body_that_breaks_off_is_no_event(server: serving.WebServer, caplog: pytest.LogCaptureFixture) -> None:
    address = server._server.servers[0].sockets[0].getsockname()
    with socket.create_connection(address, timeout=60) as asking:
        asking.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\nhal")
    while server._server.server_state.connections or server._server.server_state.tasks:
        time.sleep(0.01)
    with urllib.request.urlopen(server.url) as answer:
        assert answer.read() == b"here"
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("length", "sent", "status"), [(50, 50, b"200"), (50, 1, b"408"), (101, 101, b"413")])
def test_a_body_that_is_too_long_or_doesnt_come_is_refused(
    server: serving.WebServer, monkeypatch: pytest.MonkeyPatch, length: int, sent: int, status: bytes
) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.2 if sent < length else 60.0)
    address = server._server.servers[0].sockets[0].getsockname()
    with socket.create_connection(address, timeout=60) as asking:
        asking.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length + bytes(sent))
        assert asking.recv(100).split()[1] == status

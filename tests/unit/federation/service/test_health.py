from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service import health
from replayfleet.federation.service.health import OFF, HealthServer
from tests.support.waiting import until


def fetched(url: str | urllib.request.Request, authorization: str = "") -> tuple[int, bytes]:
    if isinstance(url, str):
        url = urllib.request.Request(url, headers={"Authorization": authorization} if authorization else {})
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@contextlib.contextmanager
def serving(registry: CollectorRegistry, **options: str) -> Iterator[HealthServer]:
    server = HealthServer(registry, **options)
    try:
        yield server
    finally:
        server.stop()


def test_health_and_metrics_answer_on_loopback():
    registry = CollectorRegistry()
    Counter("rounds", "Rounds.", registry=registry).inc(2)
    report = {"healthy": True, "round": 3}
    with serving(registry) as server:
        assert server.url.startswith("http://127.0.0.1:")
        status, body = fetched(server.url + "/healthz")
        assert (status, json.loads(body)) == (503, {"healthy": False, "phase": "starting"})
        assert fetched(server.url + "/predictions")[0] == 503
        server.answer(lambda: report)
        status, body = fetched(server.url + "/healthz")
        assert (status, json.loads(body)) == (200, report)
        report["healthy"] = False
        assert fetched(server.url + "/healthz")[0] == 503
        assert b"rounds_total 2.0" in fetched(server.url + "/metrics")[1]
        assert fetched(server.url + "/secrets")[0] == 404


def test_a_probe_that_asks_for_the_head_alone_or_with_a_query_is_answered():
    with serving(CollectorRegistry()) as server:
        server.answer(lambda: {"healthy": True}, get={"/predictions": lambda _: (HTTPStatus.OK, {"frame": 7})})
        for path in ("/healthz", "/metrics", "/predictions?_=1"):
            status, whole = fetched(server.url + path)
            assert status == 200
            with urllib.request.urlopen(urllib.request.Request(server.url + path, method="HEAD"), timeout=60) as head:
                assert (head.status, int(head.headers["Content-Length"]), head.read()) == (200, len(whole), b"")


def test_a_port_that_another_program_has_is_said_and_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(health, "AGAIN_S", 0.02)
    first = HealthServer(CollectorRegistry())
    port = int(first.url.rsplit(":", 1)[1])
    second = HealthServer(CollectorRegistry(), port=port)
    second.answer(lambda: {"healthy": True, "who": "second"})
    assert second.url == ""
    assert "health and metrics wait" in caplog.text
    first.stop()
    until(lambda: second.url)
    assert b"second" in fetched(second.url + "/healthz")[1]
    second.stop()


def test_one_that_waits_for_its_port_can_be_stopped():
    first = HealthServer(CollectorRegistry())
    second = HealthServer(CollectorRegistry(), port=int(first.url.rsplit(":", 1)[1]))
    second.stop()
    first.stop()
    second.stop()


def test_an_address_that_is_none_of_ours_is_one_clear_line():
    with pytest.raises(SettingsError, match=r"203\.0\.113\.1:1 for health and metrics: .*; choose another address"):
        HealthServer(CollectorRegistry(), port=1, host="203.0.113.1")


def test_nothing_is_told_without_the_token():
    with serving(CollectorRegistry(), token="0123456789abcdef") as server:
        for path in ("/healthz", "/metrics", "/nothing"):
            assert fetched(server.url + path)[0] == 401
            assert fetched(server.url + path, "Bearer 0123456789abcdeF")[0] == 401
        assert fetched(server.url + "/metrics", "Bearer 0123456789abcdef")[0] == 200


def test_a_collector_that_has_nothing_to_tell_is_no_traceback():
    class Silent(Collector):
        def collect(self) -> Iterator[Metric]:
            raise OSError("the loop doesn't answer")

    registry = CollectorRegistry()
    registry.register(Silent())
    with serving(registry) as server:
        assert fetched(server.url + "/metrics") == (503, b'{"error": "the loop doesn\'t answer"}\n')


def test_off_means_no_endpoint():
    server = HealthServer(CollectorRegistry(), port=OFF)
    assert server.url == ""
    server.stop()


def test_connections_that_say_nothing_cost_a_bounded_number_of_threads_and_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(health._Handler, "timeout", 600)
    server = HealthServer(CollectorRegistry())
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    silent = [socket.create_connection(address) for _ in range(2)]
    try:
        with socket.create_connection(address, timeout=60) as third:
            assert third.recv(10) == b""  # closed at once
        silent.pop().close()
        status = 0
        while not status:  # its place is free when its thread has seen it
            with contextlib.suppress(OSError):
                status, _ = fetched(f"{server.url}/metrics")
        assert status == 200
    finally:
        for each in silent:
            each.close()
        server.stop()


@pytest.mark.parametrize(("host", "status"), [("evil.example", 421), ("localhost", 200), ("[::1]:9101", 200)])
def test_without_a_token_no_name_of_somebody_elses_leads_here(host: str, status: int):
    with serving(CollectorRegistry()) as server:
        server.answer(lambda: {"healthy": True}, post={"/feedback": lambda _: (HTTPStatus.OK, {})})
        for path, data in (("/healthz", None), ("/feedback", b"{}")):
            headers = {"Host": host, "Content-Type": "application/json"}
            assert fetched(urllib.request.Request(server.url + path, data, headers))[0] == status


def test_a_request_that_comes_a_byte_at_a_time_gives_its_place_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "CONNECTION_S", 0.3)
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 1)
    with serving(CollectorRegistry(), token="a-secret-of-ours") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as slow, contextlib.suppress(OSError):
            while True:  # until it is closed
                slow.sendall(b"G")
                time.sleep(0.02)
        assert until_answered(server.url + "/healthz") == 401


def until_answered(url: str) -> int:
    for _ in range(1200):
        with contextlib.suppress(OSError):
            return fetched(url)[0]
        time.sleep(0.05)
    raise AssertionError("no place")

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.health import OFF, HealthServer


def fetched(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_health_and_metrics_answer_on_loopback():
    registry = CollectorRegistry()
    Counter("rounds", "Rounds.", registry=registry).inc(2)
    report = {"healthy": True, "round": 3}
    server = HealthServer(registry)
    try:
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
    finally:
        server.stop()


def test_a_port_in_use_is_one_clear_line():
    server = HealthServer(CollectorRegistry())
    port = int(server.url.rsplit(":", 1)[1])
    try:
        with pytest.raises(SettingsError, match=rf"health port 127.0.0.1:{port}: Address already in use; choose"):
            HealthServer(CollectorRegistry(), port=port)
    finally:
        server.stop()


def test_off_means_no_endpoint():
    server = HealthServer(CollectorRegistry(), port=OFF)
    assert server.url == ""
    server.stop()

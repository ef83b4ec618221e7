"""Every reason why something waits stands in a client's status and metrics, the aggregator's metrics, and on pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from replayfleet.aggregator.console.app import Console
from replayfleet.aggregator.console.watch import Watch
from replayfleet.aggregator.control.exported import FleetCollector
from replayfleet.aggregator.control.view import FleetView, MemberView
from replayfleet.aggregator.control.waits import PATIENCE as OF_THE_AGGREGATOR
from replayfleet.aggregator.control.waits import own_word
from replayfleet.edge_client.operator import status
from replayfleet.edge_client.operator.metrics import Metrics
from replayfleet.edge_client.operator.waits import PATIENCE as OF_A_CLIENT
from replayfleet.federation.service.waits import Wait, Why
from replayfleet.federation.service.web.access import Access
from replayfleet.federation.service.web.guard import Rules
from replayfleet.federation.wire.protocol.messages import Presence
from tests.support.asking import ask
from tests.support.watched_fleet import watched_fleet

CLIENT = "cam-001"
MEMBER = MemberView(CLIENT, True, True, False, True, None, True, 0.0, "", "", "", 4, 7, 7, 7, False, True, None)
VIEW = FleetView("street", "fedavg", True, 3, "open", "running", (), 2, 1, 60.0, (MEMBER,), (), True)


class Loop:
    """What the running aggregator says of itself."""

    def __init__(self, view: FleetView) -> None:
        self._view = view

    def look(self) -> FleetView:
        return self._view


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return watched_fleet(tmp_path_factory.mktemp("fleet"))


def shown(folder: Path, view: FleetView) -> tuple[Any, CollectorRegistry]:
    """Return the console, and what Prometheus gets."""
    watch = Watch(folder)
    watch.control = Loop(view)  # type: ignore[assignment]
    registry = CollectorRegistry()
    registry.register(FleetCollector(lambda: view, {}, folder, connected=lambda: True, problem=lambda: ""))
    rules = Rules(frozenset({"127.0.0.1"}), Access(None, reading_needs_token=False))
    return Console(watch, rules).app, registry


@pytest.mark.parametrize("why", OF_A_CLIENT)
def test_what_keeps_a_client_is_in_its_status_its_metrics_and_on_the_pages(folder: Path, why: Why) -> None:
    text = f"what {why.value} means here"
    metrics = Metrics("cpu", "CPUExecutionProvider")
    metrics.waiting([why.value])
    assert metrics.registry.get_sample_value("replayfleet_client_waiting", {"reason": why.value}) == 1
    assert any(text in line for line in status.lines({"waits": [{"reason": why.value, "text": text}]}))
    heard = own_word(Presence(CLIENT, "online", "b", 1, reason=why.value, why=text))
    app, registry = shown(folder, replace(VIEW, members=(replace(MEMBER, wait=heard),)))
    labels = {"client": CLIENT, "reason": why.value}
    assert registry.get_sample_value("replayfleet_member_waits", labels) == 1
    for page in ("/", "/round", f"/clients/{CLIENT}"):
        assert text[1:] in ask(app, page).text, page


@pytest.mark.parametrize("why", OF_THE_AGGREGATOR)
def test_what_keeps_the_aggregator_is_in_its_metrics_and_on_every_page(folder: Path, why: Why) -> None:
    text = f"what {why.value} means here"
    app, registry = shown(folder, replace(VIEW, waits=(Wait(why, text),)))
    assert registry.get_sample_value("replayfleet_waits", {"reason": why.value}) == 1
    for page in ("/", "/round", "/methods", "/journal"):
        found = ask(app, page).text
        if why not in {Why.UPLOAD, Why.AGGREGATION}:
            assert text[1:] in found, page
        elif page in {"/", "/round"}:
            assert "Round 3 waits for" in found, "whom a round waits for is its headline, and that it is aggregated"
            assert text[1:] not in found


def test_a_clients_page_says_in_which_precision_it_serves(folder: Path) -> None:
    member = replace(MEMBER, device="jetson-orin-nx", provider="CUDAExecutionProvider", precision="fp16")
    app, _ = shown(folder, replace(VIEW, members=(member,)))
    assert "jetson-orin-nx · CUDA · fp16" in ask(app, f"/clients/{CLIENT}").text

"""The alert rules in a real Prometheus, on what the aggregator's own metrics show."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from support.tiny_fleet import TinyFleet

from replayfleet.aggregator.cli import cli
from replayfleet.aggregator.control import exported
from replayfleet.aggregator.control.exported import FleetCollector
from replayfleet.aggregator.control.verbs import VerbRefused
from replayfleet.aggregator.control.view import FleetView, MemberView
from replayfleet.aggregator.operator.metrics import Metrics
from replayfleet.federation.service.health import HealthServer
from replayfleet.federation.wire.protocol.messages import RolledBack
from tests.support.prometheus import FOLDER, Prometheus

TOKEN = "0123456789abcdef0123456789abcdef"
MEMBER = MemberView("cam-1", True, True, False, True, None, True, 0.0, "", "", "", 4, 7, 7, 7, True, False, None)
VIEW = FleetView("street", "fedavg", True, 4, "open", "running", ("cam-1",), 2, 1, 60.0, (MEMBER,), (), True)


def rules() -> list[tuple[str, str]]:
    text = (FOLDER / "alerts.yaml").read_text(encoding="utf-8")
    return re.findall(r"- alert: (\S+)(?:.|\n)*?runbook: (\S+)", text)


def test_every_alert_has_its_chapter_in_the_runbook() -> None:
    book = (FOLDER.parents[1] / "docs" / "runbook.md").read_text(encoding="utf-8")
    chapters = {f"docs/runbook.md#{title.lower().replace(' ', '-')}" for title in re.findall(r"^## (.+)$", book, re.M)}
    assert {page for _, page in rules()} == chapters
    assert all(f"`{name}`" in book for name, _ in rules())


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    metrics = Metrics()
    metrics.registry.register(FleetCollector(lambda: VIEW, {}, Path("/"), connected=lambda: True, problem=lambda: ""))
    there = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    there |= {family.name for family in metrics.registry.collect()}
    board = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    quality = [text for text in texts if "replayfleet_member_accuracy" in text]
    assert len(quality) == 2
    assert all("replayfleet_member_boxes_found" in text for text in quality), "of detectors there is no accuracy"
    texts.append((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))
    assert set(re.findall(r"replayfleet_\w+", " ".join(texts))) <= there


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (apt install prometheus)")
def test_the_rules_fire_when_they_should_and_not_earlier() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yaml"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed (apt install prometheus)")
def test_they_fire_in_a_prometheus_that_scrapes_an_aggregator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, view, disk = Metrics(), [VIEW], [shutil.disk_usage(tmp_path)._replace(total=100, used=0, free=100)]
    ends = [time.time() + 90 * 86400]
    monkeypatch.setattr(exported, "expiries", lambda folder: {"cam-1": ends[0]})
    monkeypatch.setattr(exported.shutil, "disk_usage", lambda folder: disk[0])
    connected = [True]

    def look() -> FleetView:
        if not view:
            raise VerbRefused("the loop is busy")
        return view[0]

    metrics.registry.register(
        FleetCollector(look, metrics.reported, tmp_path, connected=lambda: connected[0], problem=lambda: "")
    )
    metrics.told("client report", {"client": "cam-1", "metrics": {"accuracy": 0.9}})
    server = HealthServer(metrics.registry, token=TOKEN)
    with Prometheus(tmp_path, server.url.removeprefix("http://"), TOKEN) as seen:
        seen.wait("replayfleet_member_accuracy > 0.8")
        assert seen.firing() == set()
        for index in range(3):
            metrics.told("round closed", {"round": index, "by": "deadline", "open_s": 60.0})
            metrics.told("upload rejected", {"client": "cam-1", "reason": "not-finite", "bytes": 1})
            metrics.told("upload rejected", {"client": "cam-1", "reason": "not-finite", "bytes": 1})
        metrics.told("model rolled back", {"client": "cam-1", "reason": "too-slow"})
        metrics.told("client report", {"client": "cam-1", "metrics": {"accuracy": 0.7}})
        view[0] = replace(VIEW, members=(replace(MEMBER, live=False),))
        disk[0], ends[0], connected[0] = disk[0]._replace(free=9), time.time() + 86400, False
        expected = {name for name, _ in rules()}
        seen.until_firing(expected - {"ReplayfleetAggregatorDown"})
        view.clear()
        seen.until_firing({"ReplayfleetAggregatorDown"})
    server.stop()


@contextlib.contextmanager
def turning(fleet: TinyFleet) -> Iterator[None]:
    """Let a thread turn a fleet's loop and clients: a tenth of a second of theirs each time."""
    stop, begun = threading.Event(), threading.Event()
    fleet.kill_aggregator()  # its database is that of one thread

    def turn() -> None:
        fleet.new_service().start()
        begun.set()
        while not stop.wait(0.01):
            fleet.now += 0.1
            fleet.service.loop.pump(0)
            for client in list(fleet.clients.values()):
                client.pump(fleet.now)
        fleet.close()

    turner = threading.Thread(target=turn)
    turner.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        stop.set()
        turner.join()


@pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed (apt install prometheus)")
def test_they_fire_for_what_happens_to_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = [shutil.disk_usage(tmp_path)._replace(total=10**15, used=0, free=10**15)]  # nobody fills one here
    monkeypatch.setattr(exported.shutil, "disk_usage", lambda folder: disk[0])
    fleet = TinyFleet(tmp_path / "fleet", ("cam-1", "cam-2", "cam-3"), num_rounds=None, deadline_s=10.0, interval_s=5.0)
    for client in fleet.clients.values():
        client.metrics = {"accuracy": 0.9}
    with turning(fleet):
        server = HealthServer(fleet.service._parts.metrics.registry, token=TOKEN)
        with Prometheus(tmp_path, server.url.removeprefix("http://"), TOKEN) as seen:
            seen.wait("replayfleet_rounds_total > 1 and on() min(replayfleet_member_accuracy) > 0.8")
            assert seen.firing() == set()
            disk[0] = disk[0]._replace(free=9 * 10**13)
            fleet.clients["cam-1"].metrics = {"accuracy": 0.6}
            held = fleet.clients["cam-1"].manifest
            fleet.clients["cam-1"].say("control", RolledBack("cam-1", held.round, held.version, -1, "too-slow"))
            fleet.kill_client("cam-3")  # no round has all uploads from now on
            seen.until_firing({
                "ReplayfleetClientGone", "ReplayfleetRoundsByDeadline", "ReplayfleetRollBacks", "ReplayfleetDiskLow",
                "ReplayfleetAccuracyFalling",
            })  # fmt: skip
            gone = 'ALERTS{alertname="ReplayfleetClientGone", client="%s", alertstate="firing"}'
            seen.wait(gone % "cam-3")
            assert not seen.ask(f"query?query={quote(gone % 'cam-1')}")["result"]
            data_dir = tmp_path / "fleet" / "aggregator"
            words = ["enroll", "cam-9", "--data-dir", str(data_dir), "--host", "localhost"]
            enrolled = CliRunner().invoke(cli, [*words, "--fleet", "tiny-fleet", "--days", "10"])
            assert enrolled.exit_code == 0, enrolled.output  # from now on nobody else is heard
            seen.until_firing({"ReplayfleetCertificateSoonOver"})
        server.stop()

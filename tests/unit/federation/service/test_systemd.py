from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.manager_socket import ManagerSocket

from replayfleet.federation.service import systemd
from replayfleet.federation.service.systemd import Notifier, ServiceManager, Watchdog


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ManagerSocket]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@replayfleet-test-{os.getpid()}"
    with ManagerSocket(address) as found:
        yield found


def test_what_is_said_arrives_line_by_line(manager: ManagerSocket) -> None:
    Notifier(manager.address).send(READY=1, STATUS="serving\nversion 3")
    assert manager.read() == ["READY=1\nSTATUS=serving version 3"]


def test_without_a_manager_nothing_is_sent_and_nothing_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    silent = ServiceManager()
    silent.begin("starting")
    silent.report({"capture": 1}, ready=True, status="serving", now=1.0)
    silent.stopping()
    with caplog.at_level(logging.WARNING):
        gone = Notifier(str(tmp_path / "nobody"))
        gone.send(READY=1)
        gone.send(READY=1)
        assert not Notifier("vsock:2:1234")
    assert [record.message for record in caplog.records] == [
        "service manager not reached",
        "service manager's socket can't be used",
    ]


def test_a_manager_that_reads_nothing_never_blocks_the_service(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        notifier = Notifier(str(tmp_path / "deaf"))
        for _ in range(2000):
            notifier.send(WATCHDOG=1)


def test_the_environment_is_read_once_and_children_inherit_none_of_it(manager: ManagerSocket) -> None:
    environment = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "4000000",
        "WATCHDOG_PID": str(os.getpid()),
        "A": "",
    }
    found = ServiceManager.from_environment(environment)
    assert environment == {"A": ""}
    found.report({"loop": 1}, ready=True, status="serving", now=0.0)
    found.report({"loop": 2}, ready=True, status="serving", now=2.0)
    assert manager.read() == ["READY=1\nSTATUS=serving", "WATCHDOG=1"]


@pytest.mark.parametrize(
    "variables", [{"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}, {}]
)
def test_a_watchdog_that_is_somebody_elses_is_not_fed(manager: ManagerSocket, variables: dict[str, str]) -> None:
    found = ServiceManager.from_environment({"NOTIFY_SOCKET": manager.address, **variables})
    for second in range(100):
        found.report({"loop": second}, ready=True, status="serving", now=float(second))
    assert manager.read() == ["READY=1\nSTATUS=serving"]


def test_a_watchdog_is_fed_only_when_every_loop_has_turned() -> None:
    watchdog = Watchdog(30.0, now=0.0)
    assert not watchdog.due({"capture": 5, "inference": 5}, 14.9)
    assert watchdog.due({"capture": 5, "inference": 5}, 15.0)
    assert not watchdog.due({"capture": 5, "inference": 9}, 31.0), "capture stands still"
    assert watchdog.due({"capture": 6, "inference": 9}, 32.0)
    assert not watchdog.due({"capture": 7, "inference": 9}, 47.0), "inference stands still"
    assert watchdog.due({"inference": 10}, 48.0), "a recording that ended isn't waited for"
    assert watchdog.due({"inference": 1, "mqtt": 0}, 63.0), "a loop begins anew with another source"


def test_the_log_says_which_loop_hangs_before_the_service_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(30.0, now=0.0)
    watchdog.due({"capture front": 5, "inference": 5}, 15.0)
    with caplog.at_level(logging.ERROR):
        for now in range(30, 45):
            watchdog.due({"capture front": 5, "inference": now}, float(now))
    (record,) = caplog.records
    assert (record.message, record.fields["loops"]) == ("watchdog not fed", "capture front")


def test_before_it_is_ready_progress_asks_for_more_time_instead(manager: ManagerSocket) -> None:
    starting = ServiceManager(Notifier(manager.address), watchdog_s=30.0)
    starting.report({"mqtt": 1}, ready=False, status="waiting", now=0.0)
    starting.report({"mqtt": 2}, ready=False, status="waiting", now=20.0)
    starting.report({"mqtt": 2}, ready=False, status="waiting", now=40.0)
    starting.report({"mqtt": 3}, ready=True, status="serving", now=50.0)
    starting.report({"mqtt": 4}, ready=False, status="the broker is gone", now=70.0)
    assert manager.read() == [
        "STATUS=waiting",
        "EXTEND_TIMEOUT_USEC=60000000",
        "READY=1\nSTATUS=serving",
        "WATCHDOG=1",
        "STATUS=the broker is gone",
        "WATCHDOG=1",
    ]


def test_a_status_is_said_when_it_changes_and_not_too_often(manager: ManagerSocket) -> None:
    service = ServiceManager(Notifier(manager.address))
    for tenth in range(40):
        service.report({"loop": tenth}, ready=True, status=f"frame {tenth}", now=tenth / 10)
    service.stopping()
    assert manager.read() == [
        "READY=1\nSTATUS=frame 0",
        "STATUS=frame 10",
        "STATUS=frame 20",
        "STATUS=frame 30",
        "STOPPING=1\nSTATUS=stopping",
    ]


def until_nobody_asks() -> None:
    """Wait for the thread that asks for time: what it says, it has said."""
    for thread in threading.enumerate():
        if thread.name == "starting":
            thread.join(60)
            assert not thread.is_alive()


def test_a_long_start_asks_for_time_until_the_loops_turn(
    manager: ManagerSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "_ASK_EVERY_S", 0.05)
    service = ServiceManager(Notifier(manager.address))
    service.begin("building an engine")
    said = manager.read()
    assert said[0] == "STATUS=building an engine\nEXTEND_TIMEOUT_USEC=60000000"
    while said.count("EXTEND_TIMEOUT_USEC=60000000") < 3:
        time.sleep(0.01)
        said += manager.read()
    service.report({}, ready=False, status="building an engine", now=0.0)
    until_nobody_asks()


def test_a_start_that_never_ends_is_given_up(manager: ManagerSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "_ASK_EVERY_S", 0.02)
    ServiceManager(Notifier(manager.address)).begin("hanging", limit_s=0.2)
    until_nobody_asks()


def test_a_service_that_rebuilds_itself_is_not_taken_for_one_that_hangs(manager: ManagerSocket) -> None:
    serving = ServiceManager(Notifier(manager.address), watchdog_s=30.0)
    with serving.busy("the fleet learns more classes"):
        pass
    assert manager.read() == ["STATUS=the fleet learns more classes\nWATCHDOG=1"]

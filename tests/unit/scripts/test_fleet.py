from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from rich.console import Console

from replayfleet.aggregator.settings import AggregatorSettings
from replayfleet.edge_client.cameras.uri import parse_sources
from replayfleet.federation.children import child_command
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.service.settings import read_settings
from replayfleet.federation.wire.transport.broker import PrivateBroker, find_mosquitto
from replayfleet.scripts.fleet.__main__ import SMALLER, fleet
from replayfleet.scripts.fleet.faults import (
    AFTER_S,
    BAD_LINE,
    BROKER,
    DOWN_S,
    KILL_CLIENT,
    RESTART_BROKER,
    Faults,
    check_faults,
)
from replayfleet.scripts.fleet.plan import Yard
from replayfleet.scripts.fleet.tcp_link import LineQuality, tcp_link
from replayfleet.scripts.launch.fleet import Limit, RunningFleet
from replayfleet.scripts.launch.plan import FleetPlan
from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]


def a_plan(out: Path, **changes: object) -> Yard:
    options: dict[str, object] = {
        "out": out,
        "clients": 3,
        "rounds": 4,
        "source": "dataset",
        "method": "fedavg",
        "preset": "tiny",
        "rate": 5.0,
        "deadline_s": 60.0,
        "seed": 1,
        **changes,
    }
    return Yard(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["dataset", "synthetic"])
def test_every_client_has_a_source_and_a_data_dir_of_its_own(tmp_path: Path, source: str) -> None:
    plan = a_plan(tmp_path / "fleet", source=source)
    plan.prepare()
    words = list(plan.fleet().clients.values())
    sources = [parse_sources([line[line.index("--source") + 1]]) for line in words]
    assert len({str(source) for source in sources}) == 3
    assert len({line[line.index("--data-dir") + 1] for line in words}) == 3


def test_the_synthetic_fleet_has_a_task_that_the_aggregator_understands(tmp_path: Path) -> None:
    plan = a_plan(tmp_path / "fleet", source="synthetic")
    plan.prepare()
    words = plan.fleet().aggregator
    task = Path(words[words.index("--task") + 1])
    settings = read_settings(AggregatorSettings, None, {"data_dir": tmp_path, "clients": 3, "task": task})
    assert "vehicle" in settings.task_spec().class_names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "datset"}, "did you mean 'dataset'"),
        ({"preset": "tny"}, "did you mean 'tiny'"),
        ({"clients": 0}, "--clients is 0, expected at least 1"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_a_fleet_that_can_not_be_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        a_plan(tmp_path, **changes)


def test_an_unknown_fault_is_refused_and_one_asked_for_twice_counts_once() -> None:
    assert check_faults([KILL_CLIENT, BAD_LINE, KILL_CLIENT]) == (KILL_CLIENT, BAD_LINE)
    with pytest.raises(SettingsError, match="did you mean 'kill-client'"):
        check_faults(["kil-client"])


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SettingsError, match="not of a demo"):
        a_plan(tmp_path).prepare()
    assert (tmp_path / "thesis.tex").exists()


def through(faults: Faults, num_rounds: int, *, runs: bool = True, round_s: float = 10.0) -> list[tuple[float, str]]:
    """Let a fleet's rounds pass; returns when who was killed and started, of which nobody can be that doesn't run."""
    done: list[tuple[float, str]] = []
    for now in (step / 2 for step in range(int(2 * num_rounds * round_s))):
        for name in faults.due_kills(None if now == 0 else int(now // round_s), now):
            if runs:
                done.append((now, f"{name} killed"))
                faults.was_killed(name, now)
        done += [(now, f"{name} started") for name in faults.due_starts(now)]
    return done


def test_every_round_but_the_first_loses_a_client_and_the_middle_one_the_broker() -> None:
    faults = Faults([KILL_CLIENT, RESTART_BROKER], ["a", "b"], 4, random.Random(0))
    done = through(faults, 4)
    kills = [at for at, what in done if what in {"a killed", "b killed"}]
    assert kills == [10 + AFTER_S, 20 + AFTER_S, 30 + AFTER_S]
    assert [at for at, what in done if what in {"a started", "b started"}] == [at + DOWN_S for at in kills]
    assert [entry for entry in done if "broker" in entry[1]] == [
        (20 + AFTER_S, "broker killed"),
        (20 + AFTER_S + DOWN_S, "broker started"),
    ]
    assert faults.num_kills["a"] + faults.num_kills["b"] == 3
    assert faults.num_kills[BROKER] == 1
    assert faults.due_starts(1000.0) == faults.due_kills(3, 1000.0) == []


def test_a_client_that_is_done_is_neither_killed_nor_started_again() -> None:
    faults = Faults([KILL_CLIENT], ["a"], 1, random.Random(0))
    assert through(faults, 1, runs=False) == []
    assert faults.num_kills["a"] == 0


class Echo(socketserver.BaseRequestHandler):
    """Says everything again."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(65536):
                self.request.sendall(data)


@contextlib.contextmanager
def linked(*words: str, target: int | None = None) -> Iterator[tuple[int, IO[str]]]:
    """A bad line, as the process that it is, to an echo server; yields its port and what it says."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        to = str(target or server.server_address[1])
        command = child_command("replayfleet.scripts.fleet.tcp_link", "--to", to, *words)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as line:
            assert line.stdout is not None
            try:
                yield int(line.stdout.readline().removeprefix("port ")), line.stdout
            finally:
                line.terminate()
        server.shutdown()


def echoed(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def test_a_bad_line_keeps_every_byte_and_their_order_and_takes_its_time() -> None:
    data = random.Random(0).randbytes(200_000)
    with linked("--delay-ms", "50", "--rate-kb", "1000", "--cut-every-s", "0") as (port, _):
        began = time.monotonic()
        assert echoed(port, data) == data
        assert time.monotonic() - began > 0.25, "200 kB at 1 MB/s, and two delays"


def test_a_bad_line_breaks_and_can_be_taken_up_again() -> None:
    with linked("--cut-every-s", "0.3") as (port, said):
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection, contextlib.suppress(OSError):
                while connection.recv(1):
                    pass
            assert said.readline() == "cut a connection\n"


def test_a_line_to_nowhere_is_dead_and_does_not_hang() -> None:
    with (
        linked(target=free_port()) as (port, _),
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
        contextlib.suppress(OSError),
    ):
        assert connection.recv(1) == b""


def test_an_impossible_line_is_refused() -> None:
    with pytest.raises(ValueError, match="delay_s is nan, expected 0 or more"):
        LineQuality(delay_s=float("nan"))
    for loss in (1.0, float("nan")):  # a line that loses all would wait for ever
        with pytest.raises(ValueError, match="below 1"):
            LineQuality(loss=loss)


def test_a_line_that_can_not_be_is_refused_in_one_line() -> None:
    for words in (["--delay-ms", "-4"], ["--rate-kb", "nan"]):
        done = CliRunner().invoke(tcp_link, ["--to", "1", *words])
        assert isinstance(done.exception, SettingsError)
        assert "expected 0 or more" in str(done.exception)


@pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto")
def test_a_broker_that_somebody_kills_is_started_again_where_it_was_and_one_killed_on_purpose_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with PrivateBroker() as broker:
        url, handle = broker.url, broker.handle
        assert not broker.keep()
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        while not handle.has_ended():
            time.sleep(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "run", Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
            assert not broker.keep(), "no embedded broker in its place"
        assert broker.keep()
        assert (broker.handle.url, broker.handle.has_ended()) == (url, False)
        broker.kill()
        assert not broker.keep()


def test_a_fleet_whose_time_is_up_names_options_that_it_has(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    plan = FleetPlan(logs=tmp_path, data_dir=tmp_path, aggregator=sleeper, clients={})
    with PrivateBroker() as broker, pytest.raises(ReplayfleetError) as late:
        RunningFleet(plan, broker, Console(file=io.StringIO()), Limit(time.monotonic(), 0.0, SMALLER)).run()
    known = {option for parameter in fleet.params for option in parameter.opts}
    named = set(re.findall(r"--[a-z-]+", str(late.value)))
    assert named == {"--time-limit-s", "--clients", "--rounds"}
    assert named <= known

"""The launcher with stand-ins for programs: what each does is a line of Python."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from replayfleet.federation.wire.transport.broker import PrivateBroker
from replayfleet.scripts.launch.fleet import Limit, RunningFleet
from replayfleet.scripts.launch.plan import FleetPlan
from replayfleet.scripts.launch.processes import ChildFailed

FINISHED = json.dumps({"event": "run finished", "rounds": 1})
STAYS = "import time; time.sleep(60)"


class NoBroker(PrivateBroker):
    """Nobody connects to it."""

    url = "mqtt://127.0.0.1:1"


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def a_fleet(folder: Path, aggregator: str, *clients: str, **plan: Any) -> tuple[RunningFleet, io.StringIO]:
    told = io.StringIO()
    commands = {f"client-{index}": program(code) for index, code in enumerate(clients)}
    wanted = FleetPlan(logs=folder, data_dir=folder, aggregator=program(aggregator), clients=commands, **plan)
    limit = Limit(time.monotonic(), 60.0)
    return RunningFleet(wanted, NoBroker(), Console(file=told), limit), told


def writes(folder: Path, line: str) -> str:
    """What an aggregator does that says one thing in its journal and ends."""
    return f"open({str(folder / 'events.jsonl')!r}, 'w').write({line + chr(10)!r})"


def test_a_fleet_ends_when_its_aggregator_clients_and_whatever_runs_beside_it_have_ended(tmp_path: Path):
    beside = {"beside": program("import time; time.sleep(1); print('done')")}
    fleet, told = a_fleet(tmp_path, writes(tmp_path, FINISHED), "import sys; print(sys.argv[1:])", beside=beside)
    assert fleet.run()
    assert (fleet.late, fleet.record.finished) == ([], True)
    assert "run finished, rounds: 1" in told.getvalue()
    assert (tmp_path / "client-0.log").read_text() == "['--broker', 'mqtt://127.0.0.1:1']\n"
    assert (tmp_path / "beside.log").read_text() == "done\n"


def test_an_aggregator_that_ends_before_its_run_is_finished_is_a_failure(tmp_path: Path):
    fleet, _ = a_fleet(tmp_path, "print('good bye')", STAYS)
    with pytest.raises(ChildFailed, match="aggregator ended with exit code 0 before the demo was done") as failed:
        fleet.run()
    assert failed.value.tail == "good bye"
    assert fleet.clients["client-0"].is_over, "nothing is left running"


def test_a_fleet_for_which_it_is_enough_is_ended(tmp_path: Path):
    fleet, _ = a_fleet(tmp_path, STAYS, STAYS, prefix="crops-")
    assert not fleet.run(enough=lambda: True)
    assert fleet.clients["client-0"].is_over
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["crops-aggregator.log", "crops-client-0.log"]


def test_clients_that_stay_after_the_end_are_named_and_ended(tmp_path: Path):
    fleet, _ = a_fleet(tmp_path, writes(tmp_path, FINISHED), STAYS, "pass", leave_s=1.5)
    assert fleet.run()
    assert fleet.late == ["client-0"]
    assert fleet.clients["client-0"].is_over


def test_a_client_that_is_killed_on_purpose_and_started_again_is_no_failure(tmp_path: Path):
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.05)\n"
    fleet, _ = a_fleet(tmp_path, waits + writes(tmp_path, FINISHED), waits)

    def step() -> None:
        if not (tmp_path / "go").exists():
            fleet.kill_client("client-0")
            fleet.start_client("client-0", again="-1")
            (tmp_path / "go").touch()

    assert fleet.run(step=step)
    assert fleet.late == []
    assert (tmp_path / "client-0-1.log").exists()


def test_what_stands_between_clients_and_broker_is_told_its_port_and_tells_its_own(tmp_path: Path):
    line = program("import sys, time; print(sys.argv[1:]); print('port 4711', flush=True); time.sleep(60)")
    fleet, _ = a_fleet(tmp_path, writes(tmp_path, FINISHED), "import sys; print(sys.argv[2])", line=line)
    assert fleet.run()
    assert (tmp_path / "line.log").read_text().startswith("['--to', '1']")
    assert (tmp_path / "client-0.log").read_text() == "mqtt://127.0.0.1:4711\n"

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from replayfleet.federation.service.words import duration
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.tables.estimate import Work, seconds_left
from replayfleet.federation.simulator.tables.paper import Column, Row
from replayfleet.federation.simulator.tables.plan import PlannedRun, State
from replayfleet.federation.simulator.tables.running import LOG, Runner, earlier_work
from tests.support.processes import is_gone
from tests.support.waiting import until


def planned(folder: Path, *, method: str = "fedavg", rounds: int = 4) -> PlannedRun:
    return PlannedRun(
        row=Row(label=method, method=method),
        column=Column(scenario="gradual", dataset="mnist"),
        spec=RunSpec(method=method, scenario="gradual", dataset="mnist", preset="tiny", out=folder),
        state=State.MISSING,
        num_rounds=rounds,
        num_clients=2,
    )


@dataclass
class World:
    """A clock that moves when somebody sleeps, and processes that finish a round per second."""

    now: float = 0.0
    log: list[str] = field(default_factory=list)
    alive: list[FakeProcess] = field(default_factory=list)
    most_alive: int = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for process in list(self.alive):
            process.work()

    def launch(self, run: PlannedRun) -> FakeProcess:
        process = FakeProcess(self, run, self.now)
        self.alive.append(process)
        self.most_alive = max(self.most_alive, len(self.alive))
        return process

    def runner(self, runs: list[PlannedRun], num_jobs: int = 1, **changes: object) -> Runner:
        given = {"launch": self.launch, "show": self.log.append, "clock": lambda: self.now, "sleep": self.sleep}
        return Runner(runs, num_jobs, **{**given, **changes})


@dataclass
class FakeProcess:
    world: World
    run: PlannedRun
    started: float
    code: int | None = None
    stops: float = math.inf

    def work(self) -> None:
        if self.code is not None:
            return
        state = self.run.folder / "state"
        state.mkdir(parents=True, exist_ok=True)
        for index in range(min(int(self.world.now - self.started), self.run.num_rounds)):
            (state / f"round-{index:04d}.json").touch()
        if self.world.now - self.started >= self.run.num_rounds:
            self.end()
        elif self.world.now >= self.stops:
            self.finish(3)

    def end(self) -> None:
        result = {"summary": {"average_accuracy": 0.5}, "rounds": [{"round_s": 1.0}] * self.run.num_rounds}
        (self.run.folder / "result.json").write_text(json.dumps(result))
        self.finish(0)

    def finish(self, code: int) -> None:
        self.code = code
        self.world.alive.remove(self)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        if self.code is None:
            self.finish(-signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        assert self.code is not None
        return self.code


def failing(code: int, last_words: str) -> Callable[[FakeProcess], None]:
    def end(process: FakeProcess) -> None:
        (process.run.folder / LOG).write_text(f"begins\n{last_words}\n\n")
        process.finish(code)

    return end


def test_no_more_runs_than_jobs_are_alive_and_all_are_run(tmp_path: Path):
    world = World()
    runs = [planned(tmp_path / str(index)) for index in range(5)]
    assert world.runner(runs, num_jobs=2).run_all() == []
    assert world.most_alive == 2
    assert all((run.folder / "result.json").exists() for run in runs)
    assert sum("finished: " in line and "average accuracy 50.00 %" in line for line in world.log) == 5


def test_a_run_that_fails_is_reported_with_its_last_words_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    world = World()
    runs = [planned(tmp_path / "bad"), planned(tmp_path / "good")]
    fail, end = failing(2, "fleet-sim: it broke"), FakeProcess.end
    monkeypatch.setattr(FakeProcess, "end", lambda self: (fail if self.run is runs[0] else end)(self))
    (failure,) = world.runner(runs).run_all()
    assert (failure.run, failure.reason) == (runs[0], "fleet-sim: it broke")
    assert (tmp_path / "good" / "result.json").exists()
    lines = [line for line in world.log if " done after " in line]
    assert lines[0].startswith("0 of 2 runs done after 4 s; 1 failed; ")
    assert lines[-1] == "1 of 2 runs done after 8 s; 1 failed"
    assert any(line.startswith("FAILED: ") for line in world.log)


def test_a_run_that_was_killed_says_by_which_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World()
    monkeypatch.setattr(FakeProcess, "end", failing(-9, "round 3"))
    (failure,) = world.runner([planned(tmp_path / "a")]).run_all()
    assert failure.reason == "killed by signal 9"


def test_success_without_a_result_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World()
    monkeypatch.setattr(FakeProcess, "end", failing(0, "odd"))
    assert len(world.runner([planned(tmp_path / "a")]).run_all()) == 1


def test_when_the_minutes_are_over_nothing_begins_and_what_was_not_finished_is_no_failure(tmp_path: Path):
    world = World()
    runs = [planned(tmp_path / str(index), rounds=50) for index in range(4)]

    def launch(run: PlannedRun) -> FakeProcess:
        asked.append(run.spec.minutes)
        process = world.launch(run)
        process.stops = world.now + 60 * (run.spec.minutes or 0)
        return process

    asked: list[float | None] = []
    runner = world.runner(runs, minutes=1.0, launch=launch)
    assert runner.run_all() == []
    assert asked == pytest.approx([1.0, 10 / 60], abs=1 / 60)
    assert runner.unfinished == [runs[2], runs[3], runs[1]]
    assert (runs[0].folder / "result.json").exists()
    assert any(line.startswith(f"stopped: {runs[1].name}, round 1") for line in world.log)
    assert any(line.startswith("1 of 4 runs done") for line in world.log)
    assert world.log.count(f"begins: {runs[2].name}") == 0


def test_a_run_that_stops_by_itself_without_being_asked_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World()
    monkeypatch.setattr(FakeProcess, "end", failing(3, "odd"))
    assert len(world.runner([planned(tmp_path / "a")]).run_all()) == 1


def test_an_interruption_ends_every_process(tmp_path: Path):
    world, before = World(), signal.getsignal(signal.SIGTERM)

    def interrupted(seconds: float) -> None:
        world.sleep(seconds)
        if world.now > 1.5:
            raise KeyboardInterrupt

    runs = [planned(tmp_path / str(index)) for index in range(3)]
    runner = world.runner(runs, num_jobs=2, sleep=interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run_all()
    assert world.alive == []
    assert signal.getsignal(signal.SIGTERM) == before


_PARENT = """
import sys, time, types
from pathlib import Path
from replayfleet.federation.simulator.tables import running
running.child_command = lambda *_, **__: (sys.executable, "-c", "import time; time.sleep(60)")
run = types.SimpleNamespace(folder=Path(sys.argv[1]), spec=types.SimpleNamespace(encode=bytes))
print(running.launch_process(run).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_runs_end_with_a_table_that_is_killed(tmp_path: Path):
    """Or the same command, given again, would run beside them in the same folders."""
    command = [sys.executable, "-c", _PARENT, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert not is_gone(child)
        parent.kill()
    until(lambda: is_gone(child), 20)


def test_the_line_says_what_is_done_and_how_long_the_rest_takes(tmp_path: Path):
    world = World()
    runs = [planned(tmp_path / str(index), rounds=100) for index in range(3)]
    world.runner(runs).run_all()
    lines = [line for line in world.log if "runs done" in line]
    assert lines[0].startswith("0 of 3 runs done after 60 s")
    assert f"{runs[0].name} round 60 of 100" in lines[0]
    assert "about 4 min left" in lines[0]
    assert lines[-1] == "3 of 3 runs done after 5 min"


def test_rounds_from_before_an_interruption_dont_make_the_rest_look_fast(tmp_path: Path):
    world = World()
    run = planned(tmp_path / "a", rounds=100)
    (run.folder / "state").mkdir(parents=True)
    for index in range(20):
        (run.folder / "state" / f"round-{index:04d}.json").touch()
    waiting = planned(tmp_path / "b", rounds=160)
    world.runner([run, waiting]).run_all()
    line = next(line for line in world.log if "runs done" in line)
    assert f"{run.name} round 60 of 100" in line
    assert "about 5 min left" in line  # 40 rounds in the 60 s since; 200 are left, at 1.5 s each


def test_finished_runs_tell_how_long_others_will_take(tmp_path: Path):
    world = World()
    first = planned(tmp_path / "first")
    world.runner([first]).run_all()
    assert earlier_work([first]) == [Work("fedavg/mnist", 8, 4.0)]
    waiting = [planned(tmp_path / "second", rounds=30)]
    assert world.runner(waiting, earlier=earlier_work([first])).estimate() == "about 30 s"
    assert world.runner(waiting).estimate() == "time not known before the first round"


def test_what_is_left_is_dealt_to_the_processes_in_order():
    done = [Work("a", 10, 10.0), Work("b", 10, 30.0)]
    assert seconds_left(done, [Work("a", 5)], [Work("b", 2), Work("a", 1)], 2) == pytest.approx(6.0)
    assert seconds_left(done, [], [Work("a", 5), Work("a", 5), Work("a", 5)], 2) == pytest.approx(10.0)
    assert seconds_left([], [], [Work("a", 5)], 2) is None
    assert seconds_left([Work("a", 0, 5.0)], [], [Work("a", 5)], 2) is None


def test_a_method_never_measured_is_taken_for_the_slowest():
    assert seconds_left([Work("a", 10, 10.0), Work("b", 10, 30.0)], [], [Work("c", 2)], 1) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (89, "89 s"), (120, "2 min"), (7200, "2.0 h"), (864000, "10.0 days")]
)
def test_durations_read_well(seconds: float, text: str):
    assert duration(seconds) == text

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from replayfleet.scripts.launch import processes
from replayfleet.scripts.launch.processes import Child, ChildFailed, Children, environment, tail
from tests.support.processes import is_gone
from tests.support.waiting import until


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for_text(path: Path) -> str:
    until(lambda: path.exists() and path.read_text().endswith("\n"), 20, lambda: f"nothing was written to {path}")
    return path.read_text()


def test_a_failed_process_is_named_with_the_end_of_its_log(tmp_path: Path):
    with Children(tmp_path) as children:
        child = children.start("client-1", python("print('first'); print('the reason'); raise SystemExit(3)"))
        child.process.wait(20)
        with pytest.raises(ChildFailed, match="client-1 ended with exit code 3") as failed:
            children.check(may_end=[child])
    assert failed.value.tail.splitlines() == ["first", "the reason"]


def test_a_killed_process_is_told_by_its_signal(tmp_path: Path):
    with Children(tmp_path) as children:
        child = children.start("client-1", python("import time; time.sleep(60)"))
        child.process.send_signal(signal.SIGKILL)
        child.process.wait(20)
        with pytest.raises(ChildFailed, match="was ended by SIGKILL"):
            children.check()


def test_a_process_that_may_end_ends_without_complaint(tmp_path: Path):
    with Children(tmp_path) as children:
        child = children.start("aggregator", python("pass"))
        child.process.wait(20)
        children.check(may_end=[child])
        with pytest.raises(ChildFailed, match="exit code 0 before the demo was done"):
            children.check()


def test_leaving_ends_processes_and_what_they_started(tmp_path: Path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\n"
        "time.sleep(60)\n"
    )
    with Children(tmp_path) as children:
        parent = children.start("client-0", python(code))
        grandchild = int(wait_for_text(tmp_path / "client-0.log"))
        assert not is_gone(grandchild)
    until(lambda: is_gone(grandchild), 20)
    assert parent.process.returncode == -signal.SIGTERM


def test_what_a_crashed_process_started_is_ended_too(tmp_path: Path):
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    with Children(tmp_path) as children:
        parent = children.start("client-0", python(f"{code}; sys.stdout.flush(); raise SystemExit(1)"))
        parent.process.wait(20)
        grandchild = int(wait_for_text(tmp_path / "client-0.log"))
    until(lambda: is_gone(grandchild), 20)


def test_a_process_that_ignores_the_polite_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "_STOP_TIMEOUT_S", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    with Children(tmp_path) as children:
        child = children.start("client-0", python(code))
        wait_for_text(tmp_path / "client-0.log")
    assert child.process.returncode == -signal.SIGKILL


def test_children_get_one_thread_that_sleeps_when_idle():
    found = environment({"OMP_NUM_THREADS": "8", "HOME": "/root"})
    assert (found["OMP_NUM_THREADS"], found["OMP_WAIT_POLICY"], found["HOME"]) == ("1", "PASSIVE", "/root")


def test_our_commands_are_found_whatever_lies_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "click.py").write_text("raise SystemExit('planted')")
    with Children(tmp_path) as children:
        child = children.start("sim", ["fleet-sim", "--no-such-option"])
        assert child.process.wait(60) == 2
    assert child.log.read_text().startswith("fleet-sim: No such option")


def test_the_tail_is_the_end_of_a_log(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("\n".join(map(str, range(100))))
    assert tail(path, 2) == "98\n99"
    path.write_text("")
    assert tail(path) == "(the log is empty)"
    assert "can't be read" in tail(tmp_path / "absent")


def test_a_child_knows_its_log(tmp_path: Path):
    with Children(tmp_path) as children:
        child = children.start("aggregator", python("print('hello')"))
        child.process.wait(20)
        assert isinstance(child, Child)
        assert child.log == tmp_path / "aggregator.log"
        assert child.log.read_text() == "hello\n"

"""A model that hangs is told from one that others leave no time: a good one that is sent away was a hang to nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from replayfleet.edge_client.serving import proc, process
from replayfleet.edge_client.serving.messages import Answered, Run, packet

PID = 7
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class World:
    """A process as Linux tells of it; while we sleep it computes, and others may hold us up."""

    def __init__(self, folder: Path, state: str, *, computes_s: float, sleeps_s: float) -> None:
        self.now = 0.0
        self._folder, self._state, self._computes_s, self._sleeps_s = folder, state, computes_s, sleeps_s
        self._write(0.0)

    def sleep(self, _: float) -> None:
        self.now += self._sleeps_s
        self._write(self._computes_s)

    def monotonic(self) -> float:
        return self.now

    def _write(self, cpu_s: float) -> None:
        fields = [self._state, *("0" * 10), str(round(cpu_s / TICK_S)), "0"]
        for place in (self._folder / str(PID), self._folder / str(PID) / "task" / "1"):
            place.mkdir(parents=True, exist_ok=True)
            (place / "stat").write_text(f"{PID} (a model) {' '.join(fields)}", encoding="ascii")


@pytest.mark.parametrize(
    ("state", "computes_s", "sleeps_s", "starves"),
    [
        ("R", 0.0, 0.05, True),
        ("R", 0.05, 0.05, False),  # it computes for ever
        ("S", 0.0, 0.05, False),  # it sleeps
        ("R", 0.05, 1.0, True),  # nor do we get a core: what it had was for a second
    ],
)
def test_who_starves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    computes_s: float,
    sleeps_s: float,
    starves: bool,
) -> None:
    monkeypatch.setattr(proc, "_PROC", tmp_path)
    monkeypatch.setattr(proc, "time", World(tmp_path, state, computes_s=computes_s, sleeps_s=sleeps_s))
    assert proc.is_starved(PID) is starves


def test_an_answer_that_comes_while_somebody_looks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def looks(_: int) -> bool:
        theirs.send(packet(Answered()))
        return False

    with ours, theirs:
        monkeypatch.setattr(process, "is_starved", looks)
        assert process._ask(ours, Run(1), 0.01, PID) == Answered()
        monkeypatch.setattr(process, "is_starved", lambda _: False)
        with pytest.raises(TimeoutError):
            process._ask(ours, Run(1), 0.01, PID)

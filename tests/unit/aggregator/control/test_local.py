from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from replayfleet.aggregator.control import caller, local
from replayfleet.aggregator.control.caller import SOCKET, LocalControl, Request
from replayfleet.aggregator.control.local import MAX_CONNECTIONS, LocalSocket
from replayfleet.aggregator.control.verbs import Pause, VerbRefused


class Named(SimpleNamespace):
    """Refuses whatever is asked, in its own name."""

    def look(self) -> Any:
        raise VerbRefused(self.name)


class LaterRequest(Request, frozen=True, omit_defaults=False):
    """One that a later version asks."""

    urgent: bool = False


def test_a_socket_is_taken_away_by_who_bound_it_and_by_nobody_else(tmp_path: Path) -> None:
    """The first of two processes that ended left the other one without its socket, until a restart."""
    first: Any = LocalSocket(tmp_path, Named(name="first"))  # type: ignore[arg-type]
    second: Any = LocalSocket(tmp_path, Named(name="second"))  # type: ignore[arg-type]
    first.stop()
    with pytest.raises(VerbRefused, match="second"):
        LocalControl(tmp_path).look()
    second.stop()
    assert not (tmp_path / SOCKET).exists()
    second.stop()


def test_nobody_is_answered_but_the_aggregators_own_user_and_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever mode the file system gives the socket."""
    running = LocalSocket(tmp_path, Named(name="running"))  # type: ignore[arg-type]
    for user, says in ((os.geteuid() + 1, "broke off"), (os.geteuid(), "running"), (0, "running")):
        monkeypatch.setattr(local, "_peer", lambda _, user=user: (1, user, 1))
        with pytest.raises(VerbRefused, match=says):
            LocalControl(tmp_path).look()
    running.stop()


def test_a_program_that_asks_what_the_running_aggregator_doesnt_know_says_to_restart_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update beneath it: ``agreed`` was new, and an older aggregator only said that it is no request."""
    running = LocalSocket(tmp_path, Named(name="running"))  # type: ignore[arg-type]
    monkeypatch.setattr(caller, "Request", LaterRequest)
    with pytest.raises(VerbRefused, match=r"of another version .*`urgent`.*; restart it"):
        LocalControl(tmp_path).do(Pause())
    running.stop()
    assert msgspec.json.encode(Request("look")) == b'{"ask":"look"}'


def test_where_no_thread_is_to_be_had_for_a_while_it_answers_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = LocalSocket(tmp_path, Named(name="running"))  # type: ignore[arg-type]
    control = LocalControl(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(MAX_CONNECTIONS + 1):
            with pytest.raises(VerbRefused, match="broke off"):
                control.look()
    with pytest.raises(VerbRefused, match="running"):
        control.look()
    running.stop()

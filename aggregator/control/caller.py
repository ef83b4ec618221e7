"""Asks the aggregator that runs on a data dir, over the socket there: one line of JSON each way.

The request is ``{"ask": "plan" | "do", "verb": {...}}``, the same with ``"classes": [...]`` to add, or
``{"ask": "look"}``; the answer has ``plan``, ``view`` or ``refused``.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from replayfleet.aggregator.control.membership import Plan
from replayfleet.aggregator.control.verbs import ANSWER_S, Verb, VerbRefused
from replayfleet.aggregator.control.view import FleetView
from replayfleet.federation.errors import UNREADABLE

SOCKET = "control.sock"
MAX_ANSWER_BYTES = 64 << 20
NO_REQUEST = "not a request"
"""So a refusal begins that was no plan's."""
REQUEST_S = 10.0
"""A request that isn't there by then is given up."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is asked; ``verb`` or ``classes`` unless it is to look. What says nothing is left out: older ones hear it.

    ``who``: for whom a program asks that checked who that is. ``agreed``: the mark of the plan that was shown to them.
    """

    ask: Literal["plan", "do", "look"]
    verb: Verb | None = None
    who: str = ""
    classes: tuple[str, ...] = ()
    agreed: str = ""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the three."""

    plan: Plan | None = None
    view: FleetView | None = None
    refused: str = ""


class LocalControl:
    """The other end, with the methods of ``Control``.

    Args:
        folder: the data dir of a running aggregator.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def plan(self, verb: Verb) -> Plan:
        """Say what a verb would do now; raises as ``Control.plan``."""
        plan = self._ask(Request("plan", verb)).plan
        assert plan is not None
        return plan

    def do(self, verb: Verb, who: str = "", agreed: str = "") -> Plan:
        """Do a verb in the name of ``who``, or of this process's user; raises as ``Control.do``."""
        plan = self._ask(Request("do", verb, who, agreed=agreed)).plan
        assert plan is not None
        return plan

    def add_classes(self, names: tuple[str, ...], *, only_plan: bool = False) -> Plan:
        """Let the fleet learn more classes, or only say what that would do; raises as ``Control.add_classes``.

        The aggregator begins anew for it, so it is done a moment after it said that it will be.
        """
        plan = self._ask(Request("plan" if only_plan else "do", classes=names)).plan
        assert plan is not None
        return plan

    def look(self) -> FleetView:
        """Return where the run stands; raises as ``Control.look``."""
        view = self._ask(Request("look")).view
        assert view is not None
        return view

    def _ask(self, request: Request) -> Answer:
        """Ask.

        Raises:
            ConnectionError: No aggregator runs there.
            VerbRefused: It can't be done, or the aggregator doesn't answer.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(ANSWER_S + REQUEST_S)
            try:
                with short_place(self._folder) as place:
                    line.connect(str(place / SOCKET))
            except PermissionError as error:
                raise VerbRefused(f"{self._folder / SOCKET} is another user's; ask as the aggregator's user") from error
            except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
                raise ConnectionError(f"no aggregator runs on {self._folder}") from error
            except OSError as error:
                raise VerbRefused(f"the aggregator on {self._folder} is asked too much at once; try again") from error
            try:
                line.sendall(msgspec.json.encode(request) + b"\n")
                with line.makefile("rb") as file:
                    said = file.readline(MAX_ANSWER_BYTES)
                answer = msgspec.json.decode(said, type=Answer)
            except (OSError, *UNREADABLE) as error:
                raise VerbRefused(f"the aggregator broke off ({error}); see its log") from error
        if answer.refused.startswith(NO_REQUEST):
            raise VerbRefused(
                f"the aggregator that runs is of another version than this program, and doesn't know what is asked "
                f"({answer.refused}); restart it"
            )
        if answer.refused:
            raise VerbRefused(answer.refused)
        return answer


@contextlib.contextmanager
def short_place(folder: Path) -> Iterator[Path]:
    """Yield a short name of a folder: a socket's path has room for 107 bytes."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)

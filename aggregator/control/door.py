"""The way to the verbs from any thread: the loop does the work, the caller waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import replace
from typing import Protocol, TypeAlias, TypeVar

from replayfleet.aggregator.control.desk import ControlDesk
from replayfleet.aggregator.control.membership import Plan
from replayfleet.aggregator.control.verbs import ANSWER_S, Verb, VerbRefused
from replayfleet.aggregator.control.view import FleetView
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.waits import Waits

_T = TypeVar("_T")
Grow: TypeAlias = Callable[[tuple[str, ...], str, bool], Plan]


class Put(Protocol):
    """Hands work to the loop; ``federation.service.loop.Loop.put``."""

    def __call__(self, what: str, work: Callable[[float], None]) -> None: ...


class Control:
    """What command line, local socket, HTTP and console use; every method may be called on any thread but the loop's.

    Args:
        put: hands work to the loop.
        desk: does it there.
        waits: looks at what keeps the aggregator from its work; on the loop's thread.
        grow: (classes, who, whether only to plan it) -> what adding them does; the aggregator begins anew then.
    """

    def __init__(self, put: Put, desk: ControlDesk, waits: Callable[[float], Waits], grow: Grow | None = None) -> None:
        self._put = put
        self._desk = desk
        self._waits = waits
        self._grow = grow

    def plan(self, verb: Verb) -> Plan:
        """Say what a verb would do now.

        Raises:
            VerbRefused: It can't be done now, or nobody answers.
            MalformedMessage: It is no verb that anybody could do.
        """
        return self._ask(lambda now: self._desk.plan(verb))

    def do(self, verb: Verb, who: str, agreed: str = "") -> Plan:
        """Do a verb, durably, and return what was done.

        Args:
            verb: what to do.
            who: asks for it: a printable name, for the journal.
            agreed: mark of the plan that ``who`` was shown; empty for any.

        Raises:
            VerbRefused: It can't be done, or not as agreed, and nothing was changed; or nobody answers, then it may
                still be done.
            MalformedMessage: It is no verb that anybody could do, or ``who`` no name.
        """
        return self._ask(lambda now: self._desk.do(verb, who, now, agreed))

    def add_classes(self, names: tuple[str, ...], who: str, *, only_plan: bool = False) -> Plan:
        """Let the fleet learn more classes, or only say what that would do.

        Raises:
            VerbRefused: It can't be done now.
            SettingsError: The fleet can't take these classes.
        """
        grow = self._grow
        if grow is None:
            raise VerbRefused("this aggregator takes no classes while it runs; stop it, and ask again")
        return self._ask(lambda now: grow(names, who, only_plan))

    def look(self) -> FleetView:
        """Return where the run stands, and every client.

        Raises:
            VerbRefused: Nobody answers.
        """

        def look(now: float) -> FleetView:
            waits = self._waits(now)
            return replace(self._desk.look(now), waits=waits.told, healthy=not waits.hurt)

        return self._ask(look)

    def _ask(self, question: Callable[[float], _T]) -> _T:
        answer: Future[_T] = Future()

        def work(now: float) -> None:
            if not answer.set_running_or_notify_cancel():
                return  # nobody waits any more
            try:
                answer.set_result(question(now))
            except Exception as error:
                answer.set_exception(error)
                if not isinstance(error, ReplayfleetError):
                    raise

        self._put("control", work)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            answer.cancel()
            raise VerbRefused("the aggregator doesn't answer; look at its log") from None

"""Does what operators ask for. On the loop's thread; ``control.door`` leads here from others."""

from __future__ import annotations

import sqlite3
from typing import Protocol

from msgspec.structs import replace

from replayfleet.aggregator.control.look import facts_of, look
from replayfleet.aggregator.control.membership import Plan
from replayfleet.aggregator.control.plans import Planner
from replayfleet.aggregator.control.verbs import (
    CloseRound,
    Drain,
    Exclude,
    ExtendRound,
    OpenRound,
    Pause,
    Readmit,
    Resume,
    RollBack,
    Verb,
    VerbRefused,
    check_verb,
    check_words,
    client_of,
    name_of,
    reason_of,
)
from replayfleet.aggregator.control.view import FleetView
from replayfleet.aggregator.control.waits import Facts
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.records.deeds import Deed
from replayfleet.aggregator.records.roll import Exclusion
from replayfleet.aggregator.rounds.machine import Course, Rounds
from replayfleet.aggregator.steps import Step
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.messages import spoken

_COURSES = {Pause: Course.PAUSED, Drain: Course.DRAINING, Resume: Course.RUNNING}


class Levers(Protocol):
    """What a verb sets in motion; the coordinator."""

    def tell_fleet(self, now: float) -> None:
        """Announce how things stand; the next tick sees whether the round is over."""

    def left_out(self, client_id: str) -> None:
        """Send a client nothing more, and receive nothing."""

    def provide(self, client_id: str, now: float) -> None:
        """Offer a client that is there its download."""

    def round_closed(self, now: float) -> None:
        """Aggregate the round that an operator closed."""


class ControlDesk:
    """Plans verbs and does them; each is one transaction, and a line of the journal follows it.

    Args:
        parts: collaborators.
        rounds: the round machine.
        levers: the coordinator.
    """

    def __init__(self, parts: Parts, rounds: Rounds, levers: Levers) -> None:
        self._parts = parts
        self._rounds = rounds
        self._levers = levers
        self._planner = Planner(parts, rounds)
        self._told = 0  # the newest deed that the journal has from us

    def plan(self, verb: Verb) -> Plan:
        """Say what a verb would do now.

        Raises:
            VerbRefused: It can't be done now.
            MalformedMessage: It is no verb that anybody could do.
        """
        return self._planner.plan(check_verb(verb))

    def do(self, verb: Verb, who: str, now: float, agreed: str = "") -> Plan:
        """Do a verb, durably; returns what was done.

        Args:
            verb: what to do.
            who: asks for it, for the journal.
            now: the loop's clock.
            agreed: mark of the plan that ``who`` was shown; empty for any.

        Raises:
            VerbRefused: It can't be done, or would do something else than was agreed; nothing was changed.
            MalformedMessage: It is no verb that anybody could do, or ``who`` no name.
        """
        verb = check_verb(verb)
        plan = self._planner.plan(verb)
        if agreed not in {"", plan.mark}:
            raise VerbRefused(f"the fleet has changed meanwhile, and nothing was done; now {plan.text}")
        told = plan.text + reason_of(verb)
        deed = Deed(self._parts.wall_clock(), check_words(who, "name"), name_of(verb), client_of(verb), told)
        try:
            with self._parts.store.doing(deed):
                self._carry_out(verb, deed)
                self._parts.checkpoint(Step.DEED_BEGUN)
        except (OSError, sqlite3.Error) as error:
            if not self._parts.disk.takes(error):
                raise
            raise VerbRefused(f"{self._parts.disk.problem}; nothing was changed") from error
        self._parts.checkpoint(Step.DEED_DONE)
        self._follow_up(verb, now)
        try:
            self.tell()
        except (OSError, sqlite3.Error) as error:  # it is done; the next deed or start tells of this one
            if not self._parts.disk.takes(error):
                raise
        return plan

    def tell(self, *, recovering: bool = False) -> None:
        """Write deeds to the journal that it lacks; ``recovering`` from a crash, it may have what isn't marked."""
        deeds, journal = self._parts.store.deeds, self._parts.journal
        untold = deeds.untold()
        known = journal.numbers("operator", "deed") if recovering and untold else set()
        for deed in untold:
            if deed.number > self._told and deed.number not in known:
                journal.add("operator", details={"time": round(deed.at, 3)}, **deed.event)  # when it was done
            self._told = max(self._told, deed.number)
        if untold:
            deeds.told(self._told)

    def look(self, now: float) -> FleetView:
        """Where the run stands, and every client."""
        return look(self._parts, self._rounds, now, self._planner.refusals())

    def facts(self, now: float) -> Facts:
        """What decides why the round waits."""
        return facts_of(self._parts, self._rounds, now)

    def _carry_out(self, verb: Verb, deed: Deed) -> None:
        """Make it durable; called in one transaction with the deed."""
        store, rounds = self._parts.store, self._rounds
        match verb:
            case Exclude(client, because):
                store.exclude(client, Exclusion(deed.at, deed.who, because))
            case Readmit(client):
                store.roll.readmit(client)
            case Pause() | Drain() | Resume():
                store.set_course(_COURSES[type(verb)])
            case CloseRound():
                store.close_round(rounds.index, deed.at)
            case ExtendRound(by_s):
                store.extend(rounds.index, by_s or rounds.rules.deadline_s)
            case OpenRound():
                store.begin(rounds.index)
            case RollBack():
                for target in self._planner.targets(verb).values():
                    notice = f"an operator rolled this client back to version {spoken(target.origin)}"
                    store.put_download(replace(target.manifest, round=rounds.index, notice=notice))

    def _follow_up(self, verb: Verb, now: float) -> None:
        """Let memory and fleet follow what is durable."""
        rounds, levers = self._rounds, self._levers
        match verb:
            case Exclude(client):
                rounds.withdraw(client)
                levers.left_out(client)
            case Pause() | Drain() | Resume():
                rounds.steer(_COURSES[type(verb)], now)
            case CloseRound():
                rounds.close()
                levers.round_closed(now)
                return
            case ExtendRound(by_s):
                rounds.extend(by_s or rounds.rules.deadline_s, now)
            case OpenRound():
                rounds.open(now)
        levers.tell_fleet(now)
        match verb:
            case Readmit(client):
                levers.provide(client, now)
            case RollBack(client):
                for each in self._parts.presence.live if client == EVERYBODY else (client,):
                    levers.provide(each, now)

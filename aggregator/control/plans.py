"""What verbs would do, in words; and why they can't be done."""

from __future__ import annotations

import dataclasses

from replayfleet.aggregator.control.membership import Plan, excluding, known, readmitting
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
    name_of,
)
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.records.roll import Exclusion, Standing, expected_uploads
from replayfleet.aggregator.records.versions import Kept
from replayfleet.aggregator.rounds.machine import Course, Phase, Rounds
from replayfleet.federation.service.words import count_of
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.messages import spoken

MAX_EXTENSION_S = 366 * 86400.0
"""Of one round, all extensions together."""
_EACH = (
    Exclude(""), Readmit(""), RollBack(EVERYBODY), Pause(), Drain(), Resume(), OpenRound(), CloseRound(), ExtendRound()
)  # fmt: skip
_SOMEBODYS = Exclusion(0.0, "", "")


class Planner:
    """Plans verbs against the run as it stands; changes nothing.

    Args:
        parts: collaborators.
        rounds: the round machine.
    """

    def __init__(self, parts: Parts, rounds: Rounds) -> None:
        self._parts = parts
        self._rounds = rounds

    def plan(self, verb: Verb) -> Plan:  # noqa: PLR0911 -- one for each verb
        """Say what a verb would do now.

        Raises:
            VerbRefused: It can't be done now.
        """
        standings = self._parts.store.roll.refresh()
        self._leads()
        match verb:
            case Exclude(client):
                return self._exclusion(known(client, standings))
            case Readmit(client):
                return self._readmission(known(client, standings))
            case RollBack():
                return self._rollback(verb)
            case Pause() | Drain() | Resume():
                return self._course(verb)
            case CloseRound():
                return self._close()
            case ExtendRound(by_s):
                return self._extension(by_s)
            case OpenRound():
                return self._opening()

    def refusals(self) -> dict[str, str]:
        """Return why verbs can't be done now, by name, whatever client they name."""
        return {name_of(verb): why for verb in _EACH if (why := self._refusal(verb))}

    def _refusal(self, verb: Verb) -> str:
        try:
            match verb:
                case Exclude() | Readmit():
                    self._leads()
                case RollBack():
                    self._may_roll_back()
                case _:
                    self.plan(verb)
        except VerbRefused as error:
            return str(error)
        return ""

    def targets(self, verb: RollBack) -> dict[str, Kept]:
        """Return to which content each client goes back; those that have none stay as they are.

        Raises:
            VerbRefused: One that is asked for by name has none.
        """
        store = self._parts.store
        versions, roll = store.versions, store.roll
        if verb.client != EVERYBODY:
            client = known(verb.client, roll.standings).client
            if why := store.shut_out(client):
                raise VerbRefused(f"{client} {why}")
            if roll.excludes(client):
                raise VerbRefused(
                    f"{client} is excluded, and gets no models; `aggregator readmit {client}` comes first"
                )
            target = target_of(versions.of(client), verb.to)
            if target is None:
                raise VerbRefused(f"{client} has no such version to go back to; {_kept(versions.of(client))}")
            return {client: target}
        there = [client for client in store.clients() if not store.leaves_out(client)]
        found = {client: target_of(versions.of(client), verb.to) for client in there}
        targets = {client: target for client, target in found.items() if target is not None}
        if not targets:
            raise VerbRefused("no client has such a version to go back to")
        return targets

    def _exclusion(self, standing: Standing) -> Plan:
        plan, rounds, client = excluding(standing), self._rounds, standing.client
        text, rules = plan.text, rounds.rules
        excluded = {**self._parts.store.roll.standings, client: dataclasses.replace(standing, exclusion=_SOMEBODYS)}
        expected = expected_uploads(rules.num_clients, excluded.values())
        if rounds.counts(client):
            left = "is taken out" if rounds.is_open else "is being aggregated already, and counts"
            text += f". Its upload of round {rounds.index} {left}"
        if rounds.is_open:
            there = len(set(rounds.accepted) - {client})
            needed = count_of(max(expected, rules.min_clients), "upload")
            text += f". Round {rounds.index} closes with {needed}, and has {there}"
        if expected < rules.min_clients:
            text += (
                f". Then {count_of(expected, 'member')} can train, and a round closes with {rules.min_clients} at "
                "least: no round ends until another one takes part, or --min-clients is lower"
            )
        return Plan(text, plan.undo)

    def _readmission(self, standing: Standing) -> Plan:
        plan = readmitting(standing)
        waits = ", and the round waits for it" if standing.trains else "; it only serves, so no round waits for it"
        return Plan(f"{plan.text} It gets the models of round {self._rounds.index}{waits}", plan.undo)

    def _course(self, verb: Pause | Drain | Resume) -> Plan:
        rounds, course = self._rounds, self._rounds.course
        self._still_runs()
        match verb, course:
            case Resume(), Course.RUNNING:
                raise VerbRefused("the fleet isn't paused")
            case Resume(), _:
                then = "which begins as it would have" if rounds.rests else "and its deadline counts on"
                return Plan(f"rounds go on with round {rounds.index}, {then}", "aggregator pause")
            case (Pause(), Course.PAUSED) | (Drain(), Course.PAUSED):
                raise VerbRefused("the fleet is paused already; `aggregator resume` lets it go on")
            case Drain(), Course.DRAINING:
                raise VerbRefused("the fleet pauses after this round already; `aggregator resume` lets it go on")
            case Drain(), _:
                return Plan(
                    f"round {rounds.index} {'begins and ' if rounds.rests else ''}ends as usual; then nobody begins to "
                    "train until `aggregator resume`",
                    "aggregator resume",
                )
        held = (
            f"round {rounds.index} stays open, its uploads count, and its deadline stands still"
            if rounds.is_open
            else f"round {rounds.index} is aggregated to its end"
        )
        return Plan(
            f"nobody begins to train from now on until `aggregator resume`; who trains ends it; {held}; all serve on",
            "aggregator resume",
        )

    def _rollback(self, verb: RollBack) -> Plan:
        self._may_roll_back()
        targets, versions = self.targets(verb), self._parts.store.versions
        words, undo = [], ""
        for client, target in targets.items():
            current = versions.current(client)
            words.append(f"{client} serves version {_spoken(target)} again")
            if verb.client == client and current is not None:
                undo = f"aggregator rollback {client} --to {spoken(current.origin)}"
        others = sorted(set(self._parts.store.clients()) - set(targets)) if verb.client == EVERYBODY else []
        stay = (
            f"; {', '.join(others)} stay as they are: excluded or revoked, or nothing earlier is kept of them"
            if others
            else ""
        )
        return Plan(
            f"{', '.join(words)}, as a new version, and trains from that{stay}. The next round's models follow as "
            "usual; `aggregator pause` keeps them back",
            undo,
        )

    def _close(self) -> Plan:
        rounds, there = self._rounds, self._rounds.accepted
        self._is_open()
        if len(there) < rounds.rules.min_clients:
            raise VerbRefused(
                f"round {rounds.index} has {count_of(len(there), 'upload')}, and closes with "
                f"{rounds.rules.min_clients} at least (--min-clients)"
            )
        awaited = [
            client
            for client, standing in self._parts.store.roll.standings.items()
            if standing.is_expected and client not in there
        ]
        fate = "can count in a later one" if rounds.rules.late_rounds else "is lost"
        without = f", without {', '.join(sorted(awaited))}, whose work of this round {fate}" if awaited else ""
        return Plan(f"round {rounds.index} closes with the uploads of {', '.join(there)}{without}")

    def _extension(self, by_s: float | None) -> Plan:
        rounds = self._rounds
        self._is_open()
        if self._parts.store.extension_s(rounds.index) + (by_s or rounds.rules.deadline_s) > MAX_EXTENSION_S:
            raise VerbRefused(
                f"round {rounds.index} would stay open for more than a year; `aggregator pause` stops time"
            )
        return Plan(
            f"round {rounds.index} stays open {by_s or rounds.rules.deadline_s:g} s longer, unless its uploads are "
            "there before"
        )

    def _opening(self) -> Plan:
        rounds = self._rounds
        self._is_open()
        if not rounds.rests:
            raise VerbRefused(f"round {rounds.index} has begun already")
        if rounds.course is Course.PAUSED:
            raise VerbRefused("the fleet is paused; `aggregator resume` comes first")
        return Plan(f"round {rounds.index} begins now: members train, and its deadline counts")

    def _leads(self) -> None:
        if not self._parts.leadership.leads:
            notice = self._parts.leadership.notice
            raise VerbRefused(f"this aggregator doesn't lead the fleet ({notice}); ask the one that does")

    def _may_roll_back(self) -> None:
        rounds = self._rounds
        self._leads()
        self._still_runs()
        if rounds.phase is Phase.AGGREGATING:
            raise VerbRefused(f"round {rounds.index} is being aggregated, and brings new models; try again after that")

    def _is_open(self) -> None:
        self._still_runs()
        if not self._rounds.is_open:
            raise VerbRefused(f"round {self._rounds.index} is closed, and being aggregated")

    def _still_runs(self) -> None:
        if self._rounds.phase is Phase.FINISHED:
            raise VerbRefused(f"the run is finished after {count_of(self._rounds.index, 'round')}")


def target_of(kept: tuple[Kept, ...], to: int | None) -> Kept | None:
    """Return the content to go back to: the one of version ``to``, else the one that was served before the present one.

    Right behind a roll back, the one that first came before it: two would else swing to and fro.

    Args:
        kept: all of one client.
        to: any version by which that content was given.

    Returns:
        None if there is none, or it is the present one.
    """
    if not kept:
        return None
    current = max(kept, key=lambda one: one.manifest.version)
    if to is not None:
        earlier = [one for one in kept if to in {one.origin, one.manifest.version} and one is not current]
    elif current.manifest.version == current.origin:
        return max((one for one in kept if one is not current), key=lambda one: one.manifest.version, default=None)
    else:
        earlier = [one for one in kept if one.origin < current.origin]
    return max(earlier, key=lambda one: one.origin, default=None)


def _kept(kept: tuple[Kept, ...]) -> str:
    if not kept:
        return "it has no download yet"
    served = max(kept, key=lambda one: one.manifest.version)
    return f"kept are {', '.join(map(_spoken, kept))}; {spoken(served.origin)} is served"


def _spoken(kept: Kept) -> str:
    """A content by its first version, and the round that made it unless it was given again since, in a later one."""
    first = f" of round {kept.manifest.round}" if kept.manifest.version == kept.origin else ""
    return f"{spoken(kept.origin)}{first}"

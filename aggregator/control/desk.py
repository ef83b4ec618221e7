"""What verbs do, and what they would do. On the loop's thread; ``control.door`` leads here from others."""

from __future__ import annotations

import dataclasses
import sqlite3
from dataclasses import dataclass
from typing import Any, Protocol

from replayfleet.aggregator.control.verbs import Exclude, Readmit, Verb, VerbRefused, check_words, client_of, name_of
from replayfleet.aggregator.control.view import FleetView, MemberView
from replayfleet.aggregator.control.waits import wait_of
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.records.deeds import Deed
from replayfleet.aggregator.records.roll import Exclusion, Standing, expected_uploads
from replayfleet.aggregator.rounds import Phase, Rounds
from replayfleet.aggregator.steps import Step
from replayfleet.federation.errors import nearest

_SOMEBODYS = Exclusion(0.0, "", "")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a verb would do now.

    Attributes:
        text: in words, one sentence or more.
        undo: the command line that takes it back; empty if nothing does.
    """

    text: str
    undo: str = ""


class Levers(Protocol):
    """What a verb sets in motion; the coordinator."""

    def members_changed(self, now: float) -> None:
        """Tell the fleet, and see whether the round waits for fewer."""

    def left_out(self, client_id: str) -> None:
        """Send a client nothing more, and receive nothing."""

    def provide(self, client_id: str, now: float) -> None:
        """Offer a client the round's download."""


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

    def plan(self, verb: Verb) -> Plan:
        """Say what a verb would do now.

        Raises:
            VerbRefused: It can't be done now.
        """
        if not self._parts.leadership.leads:
            raise VerbRefused(f"this aggregator doesn't lead the fleet ({self._parts.leadership.notice}); ask that one")
        match verb:
            case Exclude():
                return self._plan_exclusion(self._standing(verb.client))
            case Readmit():
                return self._plan_readmission(self._standing(verb.client))

    def do(self, verb: Verb, who: str, now: float) -> Plan:
        """Do a verb, durably; returns what was done.

        Args:
            verb: what to do.
            who: asks for it, for the journal.
            now: the loop's clock.

        Raises:
            VerbRefused: It can't be done; nothing was changed.
        """
        plan = self.plan(verb)
        deed = Deed(self._parts.wall_clock(), check_words(who, "name"), name_of(verb), client_of(verb), plan.text)
        try:
            self._carry_out(verb, deed)
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
        for deed in untold:
            doubtful = recovering or len(untold) > 1
            if not (doubtful and journal.has("operator", deed=deed.number)):
                about: dict[str, Any] = {"client": deed.client} if deed.client else {}
                journal.add("operator", who=deed.who, verb=deed.verb, deed=deed.number, detail=deed.detail, **about)
            deeds.told(deed.number)

    def look(self, now: float) -> FleetView:
        """Where the run stands, and every client."""
        parts, rounds = self._parts, self._rounds
        members = tuple(self._view(standing, now) for standing in parts.store.roll.refresh().values())
        return FleetView(
            fleet=parts.spec.fleet,
            method=parts.spec.method,
            leads=parts.leadership.leads,
            round=rounds.index,
            phase=rounds.phase.value,
            uploads=rounds.accepted,
            expected=rounds.quorum,
            at_least=rounds.rules.min_clients,
            remaining_s=rounds.remaining_s(now),
            members=members,
            waits=tuple(member.wait for member in members if member.is_awaited and member.wait is not None),
        )

    def _plan_exclusion(self, standing: Standing) -> Plan:
        if standing.exclusion is not None:
            raise VerbRefused(f"{standing.client} is excluded already, by {standing.exclusion.by}")
        rounds, client = self._rounds, standing.client
        text = (
            f"{client} takes no part from now on: no round waits for it, its uploads are refused and it gets no new "
            "models; it goes on serving what it has, and its status says that it is excluded"
        )
        excluded = {**self._parts.store.roll.standings, client: dataclasses.replace(standing, exclusion=_SOMEBODYS)}
        expected, rules = expected_uploads(rounds.rules.num_clients, excluded.values()), rounds.rules
        if client in rounds.accepted:
            left = "is taken out" if rounds.is_open else "is being aggregated already, and counts"
            text += f". Its upload of round {rounds.index} {left}"
        if rounds.is_open:
            there = len(set(rounds.accepted) - {client})
            text += f". Round {rounds.index} closes with {max(expected, rules.min_clients)} uploads, {there} are there"
        if expected < rules.min_clients:
            text += (
                f". Only {expected} clients are left that train, and a round closes with {rules.min_clients} at least: "
                "no round ends until another one takes part, or --min-clients is lower"
            )
        return Plan(text, f"aggregator readmit {client}")

    def _plan_readmission(self, standing: Standing) -> Plan:
        if standing.exclusion is None:
            raise VerbRefused(f"{standing.client} isn't excluded")
        text = f"{standing.client} takes part again: it gets the models of round {self._rounds.index}"
        text += ", and the round waits for it" if standing.trains else "; it only serves, so no round waits for it"
        return Plan(text, f"aggregator exclude {standing.client}")

    def _carry_out(self, verb: Verb, deed: Deed) -> None:
        """Make it durable, in one transaction with the deed."""
        store = self._parts.store
        match verb:
            case Exclude():
                store.exclude(verb.client, Exclusion(deed.at, deed.who, verb.because), deed)
            case Readmit():
                store.readmit(verb.client, deed)

    def _follow_up(self, verb: Verb, now: float) -> None:
        match verb:
            case Exclude():
                self._rounds.withdraw(verb.client)
                self._levers.left_out(verb.client)
                self._levers.members_changed(now)
            case Readmit():
                self._levers.members_changed(now)
                self._levers.provide(verb.client, now)

    def _standing(self, client: str) -> Standing:
        """Return a client that is known.

        Raises:
            VerbRefused: Nobody has ever heard of it.
        """
        standings = self._parts.store.roll.refresh()
        if client not in standings:
            raise VerbRefused(f"no client {client!r} belongs to the fleet{nearest(client, standings)}")
        return standings[client]

    def _view(self, standing: Standing, now: float) -> MemberView:
        parts, rounds, client = self._parts, self._rounds, standing.client
        presence, live = parts.presence.last(client), parts.presence.is_live(client)
        uploaded = client in rounds.accepted
        awaited = rounds.phase is Phase.OPEN and standing.is_expected and not uploaded
        download = parts.store.download(client)
        version = download.version if download is not None and download.round == rounds.index else 0
        age_s = parts.presence.age_s(client, now)
        return MemberView(
            client=client,
            is_member=standing.is_member,
            enrolled=standing.enrolled_at is not None,
            revoked=standing.revoked_at is not None,
            trains=standing.trains,
            exclusion=standing.exclusion,
            live=live,
            seen_at=standing.seen_at if age_s is None else parts.wall_clock() - age_s,
            device=presence.device if presence else "",
            provider=presence.provider if presence else "",
            phase=presence.phase if presence else "",
            round=presence.round if presence else -1,
            serving_version=presence.serving_version if presence else -1,
            version=standing.version,
            confirmed_version=standing.confirmed_version,
            uploaded=uploaded,
            is_awaited=awaited,
            wait=wait_of(standing, presence, live=live, awaited=awaited, version=version),
        )

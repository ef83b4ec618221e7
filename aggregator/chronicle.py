"""What the journal and the metrics learn about rounds, and what they missed in a crash."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import msgspec

from replayfleet.aggregator.aggregation import RoundResult
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.rounds.machine import Decision, Phase, Rounds
from replayfleet.federation.methods.kit.packing import weights_among
from replayfleet.federation.wire.protocol.facts import decode_facts

COMMITTED = "round committed"
MAX_ALL, MAX_LARGEST = 60, 16
"""Shares of up to so many clients in a model are written down, else so many of the largest: of a thousand clients'
models all would be 25 MB a round."""


class Chronicle:
    """Writes the story of the rounds.

    Args:
        parts: journal, metrics and store.
        rounds: the round machine.
        now: the loop's clock in seconds.
    """

    def __init__(self, parts: Parts, rounds: Rounds, now: float) -> None:
        self._parts = parts
        self._rounds = rounds
        open_s = parts.wall_clock() - parts.store.round().opened_at  # perhaps by a process before
        self._opened_at = now - max(0.0, open_s)
        self._told_exact: dict[str, str] = {}

    def started(self) -> None:
        """The process took up the run."""
        parts, rounds = self._parts, self._rounds
        parts.journal.add(
            "aggregator started",
            details={"spec": msgspec.to_builtins(parts.spec), "num_rounds": rounds.rules.num_rounds},
            fleet=parts.spec.fleet,
            method=parts.spec.method,
            stores_data=parts.method.stores_data,
            round=rounds.index,
            phase=rounds.phase.value,
            uploads=rounds.num_accepted,
            clients=rounds.quorum,
        )
        self._make_up_for_a_crash()
        self._opened()

    def began(self) -> None:
        """The round that rested was due."""
        opening, signs = self._rounds.rules.opening, self._rounds.signs
        because = "its interval is over" if opening is None else opening.because(signs)
        self._parts.journal.add("round began", round=self._rounds.index, because=because)

    def extended(self) -> None:
        """The deadline came with too few uploads."""
        rules = self._rounds.rules
        self._parts.journal.add(
            "round extended",
            round=self._rounds.index,
            uploads=self._rounds.num_accepted,
            expected=self._rounds.quorum,
            at_least=rules.min_clients,
            by_s=rules.deadline_s,
        )

    def closed(self, decision: Decision, now: float) -> None:
        """The set of uploads is fixed."""
        self._parts.journal.add(
            "round closed",
            round=self._rounds.index,
            by=decision.value,
            uploads=self._rounds.num_accepted,
            expected=self._rounds.quorum,
            open_s=round(now - self._opened_at, 3),
        )

    def committed(self, result: RoundResult, now: float) -> None:
        """A round ended, and the next one began unless it was the last."""
        self._parts.journal.add(
            COMMITTED,
            details={"weights": _told(result.weights), "counters": dict(self._parts.courier.counters)},
            round=result.round,
            downloads=len(result.drafts),
            round_s=round(now - self._opened_at, 3),
            aggregate_s=round(result.aggregate_s, 3),
            publish_s=round(result.publish_s, 3),
        )
        for client_id, reason in result.quarantined.items():
            event = "upload lost" if client_id in result.lost else "upload quarantined"
            self._parts.journal.add(event, client=client_id, round=result.round, detail=reason)
        for client_id, reason in result.kept.items():
            self._parts.journal.add("former model kept", client=client_id, round=result.round, detail=reason)
        for client_id, reason in result.exact.items():
            if self._told_exact.get(client_id) != reason:
                self._parts.journal.add("model not rounded", client=client_id, round=result.round, detail=reason)
        self._told_exact = dict(result.exact)
        self._opened_at = now
        self._opened()

    def _opened(self) -> None:
        rounds = self._rounds
        if rounds.phase is Phase.FINISHED:
            self._parts.journal.add("run finished", rounds=rounds.index)
        elif rounds.is_open:
            self._parts.journal.add(
                "round opened",
                round=rounds.index,
                expected=rounds.quorum,
                deadline_s=rounds.rules.deadline_s,
                paused=rounds.is_paused,
            )

    def _make_up_for_a_crash(self) -> None:
        """A crash between the commit and its line costs the line: write it from the store, durations unknown."""
        parts, last = self._parts, self._rounds.index - 1
        if last < 0 or last in parts.journal.numbers(COMMITTED, "round"):
            return
        manifests = [parts.store.download(client_id) for client_id in parts.store.clients()]
        current = [manifest for manifest in manifests if manifest is not None and manifest.round == self._rounds.index]
        weights = {m.client_id: weights_among(parts.method.Download, decode_facts(m.facts)) for m in current}
        parts.journal.add(
            COMMITTED,
            details={"weights": _told(weights)},
            round=last,
            downloads=len(current),
            recovered=True,
        )


def _told(weights: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """Return client -> client -> share as the journal has it, of those whose models are mixtures."""
    return {
        client: shares
        if len(shares) <= MAX_ALL
        else dict(heapq.nlargest(MAX_LARGEST, shares.items(), key=lambda share: share[1]))
        for client, shares in weights.items()
        if shares
    }

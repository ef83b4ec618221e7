"""What excluding and readmitting a client would do, from its standing alone: also where no aggregator runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from replayfleet.aggregator.control.verbs import VerbRefused
from replayfleet.aggregator.records.roll import Standing
from replayfleet.federation.errors import nearest


@dataclass(frozen=True, slots=True)
class Plan:
    """What a verb would do now.

    Attributes:
        text: in words, one sentence or more.
        undo: the command that takes it back; empty if none does.
    """

    text: str
    undo: str = ""

    @property
    def mark(self) -> str:
        """Stands for the text where it would be too long."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def known(client: str, standings: Mapping[str, Standing]) -> Standing:
    """Return a client's standing.

    Raises:
        VerbRefused: Nobody has ever heard of it, or it is revoked.
    """
    clients = [name for name, standing in standings.items() if standing.is_client]
    if client not in clients:
        hint = nearest(client, clients) if clients else "; nobody has come yet"
        raise VerbRefused(f"no client {client!r} belongs to the fleet{hint}")
    if standings[client].revoked_at is not None:
        raise VerbRefused(f"{client} is revoked; `aggregator enroll {client}` takes it in again")
    return standings[client]


def excluding(standing: Standing) -> Plan:
    """Say what excluding a client does, whatever the round does.

    Raises:
        VerbRefused: It is excluded.
    """
    client = standing.client
    if standing.exclusion is not None:
        raise VerbRefused(f"{client} is excluded already, by {standing.exclusion.spoken}")
    return Plan(
        f"{client} takes no part from now on: no round waits for it, its uploads are refused and it gets no new "
        "models; it goes on serving what it has, and its status says that it is excluded",
        f"aggregator readmit {client}",
    )


def readmitting(standing: Standing) -> Plan:
    """Say what readmitting a client does, whatever the round does.

    Raises:
        VerbRefused: It isn't excluded.
    """
    if standing.is_stranger:
        raise VerbRefused(f"{standing.client} isn't enrolled; `aggregator enroll {standing.client}` lets it in")
    if standing.exclusion is None:
        raise VerbRefused(f"{standing.client} isn't excluded")
    return Plan(f"{standing.client} takes part again.", f"aggregator exclude {standing.client}")

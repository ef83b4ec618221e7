"""What simulated clients serve where the fleet lets them choose: as devices do, with the same evidence."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters, RoundData, Sampler
from replayfleet.federation.methods.steps.serving import (
    CHOICE,
    Chosen,
    Served,
    Standing,
    choose,
    seed_of_evidence,
    with_choice,
)
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.streams.datasets import AnyDataset
from replayfleet.federation.streams.held_out import held_out
from replayfleet.federation.streams.stream import Indices

_PARAMETERS = "served"


@dataclass(slots=True)
class ServedModels:
    """What every client serves, where it isn't what it downloaded, and what it chose by.

    Attributes:
        parameters: client id -> what it serves.
        choices: client id -> its last choice, which its next upload tells.
        chosen: client id -> its choice after this round.
        cpu_s: client id -> what that took.
    """

    parameters: dict[ClientId, Parameters] = field(default_factory=dict)
    choices: dict[ClientId, Served] = field(default_factory=dict)
    chosen: dict[ClientId, Chosen] = field(default_factory=dict)
    cpu_s: dict[ClientId, float] = field(default_factory=dict)
    _held_out: dict[ClientId, RoundData] = field(default_factory=dict)

    def parted(self, dataset: AnyDataset, indices: Indices, run_seed: int, round_index: int, name: ClientId) -> Indices:
        """Return which of a round's samples a client trains on; it keeps the others to judge by."""
        out = held_out(dataset.train.labels[indices], run_seed, round_index, name)
        self._held_out[name] = round_data(dataset.train, indices[out])
        return indices[~out]

    def told(self, name: ClientId, upload: Any) -> Any:
        """Return an upload that says what its client chose before, if its record has a place for it."""
        return with_choice(upload, self.choices.get(name))

    def choose(
        self,
        method: Any,
        run_seed: int,
        round_index: int,
        sampler: Sampler,
        clients: Mapping[ClientId, tuple[Any, Any, Parameters | None]],
    ) -> None:
        """Let each client choose after a round.

        Args:
            method: of the fleet.
            run_seed: of the run.
            round_index: the round that is over.
            sampler: how clients run their sub-generators.
            clients: client id -> its state, its download, and what it trained in the round, or None.
        """
        self.chosen.clear()
        for name, (state, download, own) in clients.items():
            began = time.thread_time()
            client = Standing(state, own, self.parameters.get(name), self._held_out.pop(name, None))
            rng = seed_of_evidence(run_seed, round_index, name)
            found = choose(method, client, download, rng, sampler=sampler)
            self.cpu_s[name] = time.thread_time() - began
            if found is None:
                self.choices.pop(name, None)
                self.parameters[name] = download.task_parameters
            else:
                self.chosen[name], self.choices[name] = found, found.served
                self.parameters[name] = found.parameters

    def packed(self, name: ClientId, state: Artefacts) -> Artefacts:
        """Return a client's state with what it serves beside it."""
        if name not in self.parameters:
            return state
        told = CHOICE.pack(self.choices.get(name), _PARAMETERS)
        return replace(
            state,
            parameter_sets={**state.parameter_sets, _PARAMETERS: self.parameters[name]},
            facts={**state.facts, **told.facts},
        )

    def restore(self, name: ClientId, state: Artefacts) -> None:
        """Take what ``packed`` put beside a client's state."""
        if _PARAMETERS not in state.parameter_sets:
            return
        self.parameters[name] = state.parameter_sets[_PARAMETERS]
        choice = CHOICE.unpack(state, _PARAMETERS, None)
        if choice is not None:
            self.choices[name] = choice

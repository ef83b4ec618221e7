"""Scenario ``driving``: clients that drive through all towns of a recording, each in an order of its own.

The T rounds are divided over the towns as evenly as possible, at the same rounds for every client, so that all of them
change town at once. A round is a stretch of consecutive frames of the client's town. Its round data are the crops of
the stretch's training frames, in driving order, at most ``samples_per_class`` of one class (which ones is drawn from
the seed); the crops of its held-out frames join the client's test set for good. Nothing is met twice. Of whole pictures
with boxes, ``samples_per_class`` are the most of a round: a picture has no one class.

Orders: the seed draws one permutation of the P towns for every P clients, and each of those begins one town further
along. So P clients at most are in P different towns at any time, and what one meets doesn't depend on how many there
are.

A late change of domain (FedGP, section 5.2: at round 60 of 70 one of two vehicles gets on the highway): with
``late_town`` all clients drive through the other towns, and in the last ``late_rounds`` the first client alone is in
that one. The others stay where they are: the stretches of their last town go on over those rounds.

Rounds that bring (nearly) nothing: a client whose stretch has fewer than ``MIN_SAMPLES`` crops (or pictures) to learn
from sits the round out as if it were absent, and the stretch passes it by, for tests too. Streams in which nobody takes
part in some round, or somebody not in round 0, are refused.

Torch-free, and drawn as in ``federation.streams.stream``, so a device could draw the same.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.streams.driving.crops import DrivingCrops
from replayfleet.federation.streams.driving.pictures import DrivingPictures
from replayfleet.federation.streams.stream import (
    DRIVING,
    Indices,
    StreamSettings,
    absences,
    client_id,
    joined,
    shuffled,
)

ROUNDS_PER_TOWN = 4
"""Unless the operator asks for a number of rounds."""

LATE_CLIENT = 0
"""Who gets to the late town."""

ROUNDS_PER_LATE_ROUND = 7
"""FedGP's vehicle is on the highway for the last 10 of 70 rounds."""

MIN_SAMPLES = 2
"""Training crops that make a round: BatchNorm can't be trained on fewer."""


class DrivingStream:
    """The rounds of every client of a fleet, like ``Stream``: values computed from the settings.

    Attributes:
        settings: with ``num_rounds`` and, where there is a late town, ``late_rounds`` filled in.
        num_rounds: T.
        place_names: the towns.
        change_round: the first round in the late town; T without one.
    """

    def __init__(
        self, settings: StreamSettings, train: DrivingCrops | DrivingPictures, test: DrivingCrops | DrivingPictures
    ) -> None:
        """Divide the towns into stretches.

        Args:
            settings: of the stream; ``test_samples_per_class`` None is all test crops of a stretch.
            train: the training part.
            test: the test part of the same recording.

        Raises:
            SettingsError: There are fewer rounds than towns, so many that one brings nothing to learn from, or
                no such late town.
        """
        self._train, self._test = train, test
        self.place_names = train.place_names
        self._early = _early_places(self.place_names, settings.late_town)
        default = ROUNDS_PER_TOWN * len(self.place_names)
        self.num_rounds = default if settings.num_rounds is None else settings.num_rounds
        num_late = 0
        if settings.late_town:
            num_late = settings.late_rounds or max(1, self.num_rounds // ROUNDS_PER_LATE_ROUND)
        self.change_round = self.num_rounds - num_late
        if self.change_round < len(self._early):
            late = f", of which {num_late} are for {settings.late_town}," if num_late else ""
            raise SettingsError(
                f"scenario {DRIVING} with {self.num_rounds} rounds{late} can't reach all of {len(self._early)} towns; "
                f"ask for at least {len(self._early) + num_late} rounds"
            )
        late_rounds = num_late or None
        self.settings = dataclasses.replace(settings, num_rounds=self.num_rounds, late_rounds=late_rounds)
        num_early = len(self._early)
        self._starts = [self.change_round * leg // num_early for leg in range(num_early + 1)]
        self._picked: dict[tuple[int, int], tuple[Indices, Indices]] = {}
        self._check_rounds()

    def present(self, round_index: int) -> tuple[int, ...]:
        """The clients that take part in a round, rising."""
        everybody = range(self.settings.num_clients)
        return tuple(client for client in everybody if len(self.train_indices(client, round_index)))

    def class_ids(self, client: int, round_index: int) -> tuple[int, ...]:
        """The classes that a client learns from in a round, rising; none if it doesn't take part."""
        return self._train.classes_of(self.train_indices(client, round_index))

    def train_indices(self, client: int, round_index: int) -> Indices:
        """Training crops of one round, indices into the training part, in driving order; none without taking part."""
        return self._met(client, round_index)[0]

    def test_indices(self, client: int, round_index: int) -> Indices:
        """The client's cumulative test set after a round: the held-out crops of its stretches so far, in order."""
        return joined([self._met(client, earlier)[1] for earlier in range(round_index + 1)])

    def test_places(self, client: int, round_index: int) -> Indices:
        """The town of each of ``test_indices``, an index into ``place_names``."""
        return self._test.place_ids[self.test_indices(client, round_index)]

    def num_seen(self, client: int, round_index: int) -> int:
        """n_i^t of Eq. 4: training crops that a client has met after a round."""
        return sum(len(self.train_indices(client, earlier)) for earlier in range(round_index + 1))

    def route(self, client: int) -> tuple[int, ...]:
        """The towns in the order in which a client drives through them; leg by leg they begin at 0 and ``changes``."""
        num_places = len(self._early)
        group, shift = divmod(client, num_places)
        order = self._early[shuffled(np.arange(num_places), self.settings.seed, f"towns/{group}")]
        late = [self.place_names.index(self.settings.late_town)] if self._gets_to_late_town(client) else []
        return (*np.roll(order, -shift).tolist(), *late)

    def changes(self) -> list[int]:
        """The rounds at which every client is in another town than before, and the one at which the late town comes."""
        return [*self._starts[1:-1], *([self.change_round] if self.settings.late_town else [])]

    @property
    def change_name(self) -> str:
        """What happens at ``changes``."""
        name = "every client reaches its next town"
        if self.settings.late_town:
            name += f"; at the last, {client_id(LATE_CLIENT)} alone reaches {self.settings.late_town}"
        return name

    def described(self) -> dict[str, Any]:
        """Return what results say of the stream, as JSON values."""
        routes = {
            client_id(index): [self.place_names[place] for place in self.route(index)]
            for index in range(self.settings.num_clients)
        }
        found = {"changes": self.changes(), "change_name": self.change_name, "routes": routes}
        if self.settings.late_town:
            late = {"client": client_id(LATE_CLIENT), "town": self.settings.late_town, "round": self.change_round}
            found["late_change"] = late
        return found

    def _gets_to_late_town(self, client: int) -> bool:
        return bool(self.settings.late_town) and client == LATE_CLIENT

    @functools.cached_property
    def _absent(self) -> list[frozenset[int]]:
        return absences(self.settings, self.num_rounds)

    def _met(self, client: int, round_index: int) -> tuple[Indices, Indices]:
        """Return (training, test) indices of one round."""
        known = self._picked.get((client, round_index))
        if known is None:
            known = self._picked[client, round_index] = self._pick(client, round_index)
        return known

    def _pick(self, client: int, round_index: int) -> tuple[Indices, Indices]:
        nothing: Indices = np.empty(0, dtype=np.int64)
        if client in self._absent[round_index]:
            return nothing, nothing
        who, settings = f"client-{client}/round/{round_index}", self.settings
        train = self._quota(self._train, client, round_index, settings.samples_per_class, f"{who}/train")
        if len(train) < MIN_SAMPLES:
            return nothing, nothing
        return train, self._quota(self._test, client, round_index, settings.test_samples_per_class, f"{who}/test")

    def _quota(
        self, part: DrivingCrops | DrivingPictures, client: int, round_index: int, most: int | None, what: str
    ) -> Indices:
        """Return a stretch's crops (or pictures) in driving order, at most ``most`` of one kind."""
        place, first, end = self._stretch(client, round_index)
        there = np.flatnonzero((part.place_ids == place) & (part.frames >= first) & (part.frames < end))
        kinds = part.kinds()[there]
        pieces = [
            shuffled(there[kinds == kind], self.settings.seed, f"{what}/{kind}")[:most]
            for kind in np.unique(kinds).tolist()
        ]
        return np.sort(joined(pieces))

    def _stretch(self, client: int, round_index: int) -> tuple[int, int, int]:
        """Return a round's town, its first frame there, and the first frame after it."""
        starts = self._leg_starts(client)
        leg = int(np.searchsorted(starts, round_index, side="right")) - 1
        start, num_stretches = starts[leg], starts[leg + 1] - starts[leg]
        place = self.route(client)[leg]
        num_frames, index = self._train.num_frames[place], round_index - start
        return place, num_frames * index // num_stretches, num_frames * (index + 1) // num_stretches

    def _leg_starts(self, client: int) -> list[int]:
        """Return the first round of each of a client's towns, and T."""
        if self._gets_to_late_town(client):
            return [*self._starts, self.num_rounds]
        return [*self._starts[:-1], self.num_rounds]

    def _check_rounds(self) -> None:
        noun = self._train.noun
        for client in range(self.settings.num_clients):
            train, test = self._met(client, 0)
            if not (len(train) and self._test.num_objects(test)):
                place = self.place_names[self.route(client)[0]]
                raise SettingsError(
                    f"client {client} begins in {place} with a stretch that has fewer than {MIN_SAMPLES} {noun} to "
                    f"learn from or none to be tested on; ask for fewer than {self.num_rounds} rounds"
                )
        for round_index in range(self.num_rounds):
            if not self.present(round_index):
                raise SettingsError(
                    f"in round {round_index} no client meets {MIN_SAMPLES} {noun} to learn from; "
                    f"ask for fewer than {self.num_rounds} rounds, or for fewer absent clients"
                )


def _early_places(place_names: tuple[str, ...], late_town: str) -> Indices:
    """Return the towns that everybody drives through."""
    if late_town and late_town not in place_names:
        raise SettingsError(f"late_town {late_town!r} is no town of the recording{nearest(late_town, place_names)}")
    early = [place for place, name in enumerate(place_names) if name != late_town]
    if not early:
        raise SettingsError(f"late_town is {late_town!r}, the only town of the recording; expected others beside it")
    return np.array(early, dtype=np.int64)

"""Mixtures for a whole fleet (Eq. 3 of pFedGRP): whose models each takes, and which clients are solved for at once.

Axes: N clients that mix, M clients that are mixed for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from replayfleet.federation.methods.kit.each import by_groups, each
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.steps.personalisation.personalise import (
    Mixture,
    StackedParameters,
    WeightSearch,
    personalised_weights,
)
from replayfleet.federation.methods.steps.personalisation.together import MixtureJob, mixtures_together
from replayfleet.federation.methods.steps.replay import Replay
from replayfleet.models.specs import TaskSpec

_log = logging.getLogger(__name__)

AT_ONCE = 32
"""Clients whose descents run as one, which bounds a GPU's memory; what more of them would gain wasn't measured."""

BYTES_AT_ONCE = 4 << 30
"""Of the models of clients whose descents run as one, where each mixes others."""


@dataclass(frozen=True, slots=True)
class _Wish:
    places: tuple[int, ...]
    own_index: int
    replay: Replay
    rng: torch.Generator


def personalise_all(  # noqa: PLR0913  # the last three have defaults
    spec: TaskSpec,
    stacked: StackedParameters,
    replays: Sequence[tuple[int, Replay]],
    search: WeightSearch,
    rng: torch.Generator,
    trusted: Sequence[int] | None = None,
    near: Sequence[Sequence[int]] | None = None,
    *,
    together: bool | None = None,
) -> list[Mixture]:
    """Return Eq. 3's mixture for each of M (own index, replay); the N models are stacked once for all.

    Every client gets a generator of its own split off ``rng``, so one client's replay never changes another's weights.

    Args:
        spec: the task.
        stacked: the N models to mix.
        replays: (which of them is the client's own, labelled images that stand for its distribution), for M clients.
        search: length and step size of the descents.
        rng: draws the order of samples.
        trusted: which of the N may take part in everybody's mixture, rising; None means all. In its own client's a
            model always may: that harms nobody else. The others' weights are 0.
        near: for each of the N clients those of whom its mixture may take; None means all.
        together: solve for several clients as one, which differs in rounding. None does so on a GPU.
    """
    shared_places = tuple(trusted if trusted is not None else range(len(stacked)))
    shared = stacked.only(shared_places)
    wishes: list[_Wish] = []
    # made once: from Python 3.12 on each of the threads that ask at the same time would make it
    _ = shared.matrix if near is None and replays else None
    for own_index, replay in replays:
        allowed = shared_places if near is None else set(shared_places).intersection(near[own_index])
        wishes.append(_Wish(tuple(sorted({*allowed, own_index})), own_index, replay, split_generator(rng)))

    def made(wish: _Wish) -> MixtureJob:  # for as long as it is solved for: a thousand clients' matrices are 28 GB
        members = shared if wish.places == shared_places else stacked.only(wish.places)
        return MixtureJob(members, wish.places.index(wish.own_index), wish.replay, wish.rng)

    def alone(wish: _Wish) -> Mixture:
        job = made(wish)
        return personalised_weights(spec, job.members, job.own_index, job.replay, search, job.rng)

    def as_one(alike: list[_Wish]) -> list[Mixture]:
        if len(alike) == 1:
            return [alone(alike[0])]
        own_bytes = 0 if alike[0].places == shared_places else len(alike[0].places) * stacked.num_bytes
        most = min(AT_ONCE, max(1, BYTES_AT_ONCE // max(1, own_bytes)))
        portions = [alike[first : first + most] for first in range(0, len(alike), most)]
        return [mixture for portion in portions for mixture in at_once(portion)]

    def at_once(portion: list[_Wish]) -> list[Mixture]:
        begun = [wish.rng.get_state() for wish in portion]
        # A package's task model may be one that vmap can't take, and memory too little for so many. What an attempt
        # held is free once its exception is gone.
        try:
            return mixtures_together(spec, [made(wish) for wish in portion], search)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            _log.warning("Eq. 3 is solved one by one for %d clients, for as one it failed: %s", len(portion), reason)
        for wish, state in zip(portion, begun, strict=True):
            wish.rng.set_state(state)
        return [alone(wish) for wish in portion]

    if together is None:
        together = any(replay.images.device.type != "cpu" for _, replay in replays)
    found = (
        by_groups(wishes, lambda wish: (len(wish.replay.labels), len(wish.places)), as_one)
        if together
        else each(alone, wishes)
    )
    return [
        replace(mixture, weights=_spread(mixture, wish.places, len(stacked)))
        for mixture, wish in zip(found, wishes, strict=True)
    ]


def _spread(mixture: Mixture, places: Sequence[int], num: int) -> torch.Tensor:
    spread = torch.zeros(num)
    spread[list(places)] = mixture.weights
    return spread


def nearest(counts: Sequence[Mapping[int, int]], number: int) -> list[tuple[int, ...]]:
    """Return for each client the others whose classes are most alike, rising: by total variation of their shares.

    Eq. 3 asks for a model that is good at the client's own classes, so those who met the same have most to give.

    Args:
        counts: class id -> samples, of N clients.
        number: how many others; of clients equally near the first.
    """
    classes = sorted({class_id for own in counts for class_id in own})
    met = torch.tensor([[own.get(class_id, 0) for class_id in classes] for own in counts], dtype=torch.float64)
    shares = met / met.sum(dim=1, keepdim=True).clamp_min(1)
    found = []
    for place, own in enumerate(shares):
        apart = (shares - own).abs().sum(dim=1)
        apart[place] = math.inf
        found.append(tuple(sorted(apart.argsort(stable=True)[: min(number, len(counts) - 1)].tolist())))
    return found

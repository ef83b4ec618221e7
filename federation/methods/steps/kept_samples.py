"""Real samples that a client keeps: all of them, or a buffer in which each ever met is equally likely to be.

Axes: S samples in the buffer, B samples of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.packing import COUNT, OPTIONAL_COUNT, OneSet, Record
from replayfleet.federation.methods.kit.records import Artefacts, Parameters, RoundData
from replayfleet.federation.methods.steps.data_free import from_bytes, to_bytes

IMAGES, LABELS, LOGITS = "images", "labels", "logits"


@dataclass(frozen=True, slots=True)
class Reservoir(Record):
    """Real samples that a client keeps, at most ``capacity`` of them, chosen uniformly among all that it ever met.

    Attributes:
        capacity: most samples it holds.
        num_seen: samples ever offered to it.
        samples: S = min(num_seen, capacity) samples: ``images`` (S, C, H, W), ``as_bytes`` if they can be, ``labels``
            (S, ...) and perhaps ``logits`` (S, ...), what the model answered when the sample was met. Empty before the
            first one.
        latest: ``fingerprint_of`` the samples of the last round; 0 before the first one.
    """

    capacity: Annotated[int, COUNT] = 200
    num_seen: Annotated[int, COUNT] = 0
    samples: Annotated[Mapping[str, Tensor], OneSet("buffer")] = field(default_factory=dict)
    latest: Annotated[int, OPTIONAL_COUNT] = 0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"a reservoir has capacity {self.capacity}, expected at least 1")
        if self.num_seen and not {IMAGES, LABELS} <= self.samples.keys() <= {IMAGES, LABELS, LOGITS}:
            raise ValueError(f"a reservoir holds {sorted(self.samples)}, expected images, labels and perhaps logits")
        expected = min(self.num_seen, self.capacity)
        for name, tensor in self.samples.items():
            if len(tensor) != expected:
                raise ValueError(f"a reservoir has {len(tensor)} {name}, expected {expected}")

    def __len__(self) -> int:
        """S."""
        return min(self.num_seen, self.capacity)

    def met_last(self, images: Tensor) -> Reservoir:
        """Return the reservoir as if these samples (B, C, H, W), which it met before, were the last round's."""
        return replace(self, latest=fingerprint_of(images))

    def without_logits(self) -> Reservoir:
        """Return the reservoir without what the model answered."""
        return replace(self, samples={name: tensor for name, tensor in self.samples.items() if name != LOGITS})

    def with_batch(
        self, images: Tensor, labels: Tensor, rng: torch.Generator, *, logits: Tensor | None = None
    ) -> Reservoir:
        """Return the reservoir after a batch was offered to it, sample by sample.

        Vitter 1985, "Random Sampling with a Reservoir", algorithm R; FedGP, Algorithm 4. The n-th sample ever (from 0)
        draws a place from 0 to n: within the capacity it takes that place, otherwise it is passed over. FedGP's text
        counts from 1 and lets one sample more in at the start; this is Vitter's, under which all are equally likely.

        Args:
            images: (B, C, H, W).
            labels: (B, ...), of the shape and dtype of those that are kept.
            rng: on the CPU; draws B numbers, whatever becomes of the samples.
            logits: (B, ...), given with every batch or with none.

        Raises:
            ValueError: Lengths differ, or the batch isn't like what the reservoir holds; says where.
        """
        batch = {IMAGES: as_bytes(images), LABELS: labels} | ({} if logits is None else {LOGITS: logits})
        held = dict(self.samples)
        if held and held[IMAGES].dtype != batch[IMAGES].dtype:
            held[IMAGES], batch[IMAGES] = as_met(held[IMAGES]), images
        _check(batch, held)
        num_seen = self.num_seen + len(images)
        winners = {place: row for row, place in enumerate(self._places(len(images), rng)) if place < self.capacity}
        if not winners:
            return replace(self, num_seen=num_seen)
        places, rows = torch.tensor(list(winners)), torch.tensor(list(winners.values()))
        grown = min(num_seen, self.capacity) - len(self)
        samples = {}
        for name, tensor in batch.items():
            room = tensor.new_empty((grown, *tensor.shape[1:]))
            kept = torch.cat([held[name], room]) if held else room
            kept[places.to(kept.device)] = tensor.detach()[rows.to(tensor.device)]
            samples[name] = kept
        return replace(self, num_seen=num_seen, samples=samples)

    def drawn(self, count: int, rng: torch.Generator) -> dict[str, Tensor]:
        """Return ``min(count, S)`` of the samples, drawn without replacement, as they were met, under those names."""
        rows = torch.randperm(len(self), generator=rng)[:count]
        drawn = {name: tensor[rows.to(tensor.device)] for name, tensor in self.samples.items()}
        return drawn | ({IMAGES: as_met(drawn[IMAGES])} if drawn else {})

    def _places(self, count: int, rng: torch.Generator) -> list[int]:
        numbers = torch.arange(self.num_seen, self.num_seen + count, dtype=torch.float64)
        drawn = (torch.rand(count, generator=rng, dtype=torch.float64) * (numbers + 1)).floor()
        places: list[int] = torch.where(numbers < self.capacity, numbers, drawn).to(torch.int64).tolist()
        return places


def _check(batch: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    lengths = {name: len(tensor) for name, tensor in batch.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"a batch for the reservoir has {lengths}, expected as many of each")
    if held and held.keys() != batch.keys():
        raise ValueError(f"a batch for the reservoir has {sorted(batch)}, it holds {sorted(held)}")
    for name, kept in held.items():
        new = batch[name]
        if new.shape[1:] != kept.shape[1:] or new.dtype != kept.dtype:
            raise ValueError(
                f"{name} of a batch are (B, {_tail(new)}) {new.dtype}, the reservoir holds "
                f"(S, {_tail(kept)}) {kept.dtype}"
            )


def as_bytes(images: Tensor) -> Tensor:
    """Return float32 images (B, C, H, W) as uint8, a fourth of their size, if ``as_met`` gives every bit back.

    Images that were pixels do, unless they were resized as numbers; others are returned as they are. Where they lie is
    where it is tried: a GPU may divide otherwise.
    """
    pixels = to_bytes(images)
    return pixels if torch.equal(from_bytes(pixels), images) else images


def as_met(images: Tensor) -> Tensor:
    """Return images (B, C, H, W), kept ``as_bytes`` or not, as float32."""
    return from_bytes(images) if images.dtype == torch.uint8 else images


def fingerprint_of(images: Tensor) -> int:
    """Return 40 bits that tell the samples (B, C, H, W) of a round from those of another, whatever their order."""
    return int.from_bytes(hashlib.blake2b(b"".join(sorted(digests_of(images))), digest_size=5).digest(), "little")


def digests_of(images: Tensor) -> list[bytes]:
    """Return 64 bytes for each of B images (B, C, H, W), equal for equal ones."""
    return [hashlib.blake2b(image.numpy().tobytes()).digest() for image in images.detach().cpu().contiguous()]


def _tail(tensor: Tensor) -> str:
    return ", ".join(map(str, tensor.shape[1:]))


STORED = "stored/"

_ALL_ROUNDS = "samples"


@dataclass(frozen=True, slots=True)
class StoredRounds:
    """All real samples a client met, round by round: what is stored once is never written again.

    Attributes:
        rounds: in the order they were met, ``images`` (B, C, H, W), ``as_bytes`` if they can be, and ``labels``
            (B, ...) of each.
    """

    rounds: tuple[Parameters, ...] = ()

    def with_round(self, data: RoundData) -> StoredRounds:
        """Return the store with a round's samples behind the earlier ones; itself if they are the last ones."""
        if self.rounds and fingerprint_of(data.images) == fingerprint_of(as_met(self.rounds[-1][IMAGES])):
            return self
        return StoredRounds((*self.rounds, {IMAGES: as_bytes(data.images), LABELS: data.labels}))

    def met_last(self, images: Tensor) -> StoredRounds:
        """Return the store with the rounds that brought these samples (B, C, H, W) behind the others."""
        latest = fingerprint_of(images)
        return StoredRounds(tuple(sorted(self.rounds, key=lambda met: fingerprint_of(as_met(met[IMAGES])) == latest)))

    def all_of(self, name: str) -> Tensor:
        """Return the images as they were met, or the labels, of all rounds, (B, ...)."""
        return torch.cat([as_met(met[name]) if name == IMAGES else met[name] for met in self.rounds])

    def pack(self) -> Artefacts:
        """Return ``stored/0``, ``stored/1`` and so on."""
        sets = {f"{STORED}{index}": met for index, met in enumerate(self.rounds)}
        return Artefacts(sets, {"num_rounds": len(self.rounds)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> StoredRounds:
        """Return the store again, also one that Centralized packed when it kept all rounds as a single set."""
        if not artefacts.facts and artefacts.parameter_sets.keys() <= {_ALL_ROUNDS}:
            return cls(tuple(artefacts.parameter_sets.values()))
        num_rounds = COUNT.decoded(artefacts.facts.get("num_rounds"), "num_rounds")
        if num_rounds != len(artefacts.parameter_sets):
            raise ValueError(f"num_rounds is {num_rounds}, but {len(artefacts.parameter_sets)} sets are there")
        return cls(tuple(OneSet().unpack(artefacts, f"{STORED}{index}", MISSING) for index in range(num_rounds)))

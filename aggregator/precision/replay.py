"""The samples that rounded models are calibrated with and judged on: replay, or a file of the operator's.

Axes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from replayfleet.aggregator.store import StoredArtefacts
from replayfleet.export.calibration import MIN_JUDGED, SampleSet
from replayfleet.export.running.artefact import Array
from replayfleet.export.samples import shares, shuffled
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import Sampler
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.service.artefact_codec import BlobFiles, StoredParameters
from replayfleet.federation.service.words import count_of
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec
from replayfleet.models.specs import LATENT_SIZE

NUM_CALIBRATING, NUM_JUDGED = 256, 1000
"""Ranges need few samples; to tell a loss of a tenth of a point takes a thousand."""
MAX_SUB_GENERATORS = 64
"""More would draw few samples each, and have to be read."""

_SLOW_KINDS = ("ddpm",)
"""A diffusion model takes minutes for what others draw in a moment."""
_AT_A_TIME = 256


class NoSamples(Exception):
    """Nothing can be rounded; says why."""


class Replay:
    """Draws from the sub-generators that the aggregator holds, or takes the operator's images.

    Args:
        spec: the fleet.
        sampler: runs sub-generators.
        blobs: holds them.
        images: (N, C, H, W) to use in place of replay; None: replay.

    Raises:
        SettingsError: Too few images, or some that are no numbers.
    """

    def __init__(self, spec: FleetSpec, sampler: Sampler, blobs: BlobFiles, images: Array | None = None) -> None:
        if images is not None and len(images) < 2 * MIN_JUDGED:
            raise SettingsError(f"calibration: {len(images)} images, expected at least {2 * MIN_JUDGED}")
        if images is not None and not np.isfinite(images).all():
            raise SettingsError("calibration: images hold NaN or infinity, expected finite numbers")
        self._spec, self._sampler, self._blobs, self._images = spec, sampler, blobs, images

    def samples(
        self, clients: Collection[str], state: StoredArtefacts | None, round_index: int, *, calibrated: bool
    ) -> SampleSet:
        """Return samples for a model that these clients get: of their own sub-generators, else of everybody's.

        Args:
            clients: who.
            state: the method's, in which the sub-generators are.
            round_index: with the fleet's seed it decides what is drawn.
            calibrated: whether some are to calibrate with.

        Raises:
            NoSamples: There are none.
        """
        if self._images is not None:
            pool = shuffled(self._images, self._spec.run_seed)[: NUM_CALIBRATING + NUM_JUDGED]
            held_back = min(NUM_CALIBRATING, len(pool) - MIN_JUDGED) if calibrated else 0
        else:
            held_back = NUM_CALIBRATING if calibrated else 0
            pool = self._drawn(_chosen(clients, state), held_back + NUM_JUDGED, round_index)
            if not np.isfinite(pool).all():
                raise NoSamples("the sub-generators draw NaN or infinity")
        origin = "of replay" if self._images is None else "of the operator's"
        facts = {"calibration": f"{count_of(held_back, 'sample')} {origin}"} if held_back else {}
        return SampleSet(pool[:held_back], pool[held_back:], facts=facts)

    def _drawn(self, sub_generators: list[BlobEntry], count: int, round_index: int) -> Array:
        if self._spec.settings.get("sub_generator") in _SLOW_KINDS:
            raise NoSamples("drawing replay takes minutes with this kind of sub-generator; --calibration gives images")
        if not sub_generators:
            raise NoSamples("the aggregator holds no sub-generators to draw replay from; --calibration gives images")
        rng = seeded_generator(self._spec.run_seed, round_index, "rounding")
        images = []
        for entry, number in zip(sub_generators, shares(count, len(sub_generators)), strict=True):
            draw = self._sampler(StoredParameters(entry, self._blobs))
            latents = torch.randn(number, LATENT_SIZE, generator=rng)
            images += [draw(some).numpy() for some in latents.split(_AT_A_TIME)]
        return shuffled(np.concatenate(images), self._spec.run_seed)


def _chosen(clients: Collection[str], state: StoredArtefacts | None) -> list[BlobEntry]:
    """Return the sub-generators to draw from, evenly spread over all where there are many."""
    held = (
        [] if state is None else [entry for entry in state.blobs if entry.name.split("/")[-2:-1] == ["sub-generator"]]
    )
    own = [entry for entry in held if any(entry.name.startswith(f"clients/{client}/") for client in clients)]
    found = sorted(own or held, key=lambda entry: entry.name)
    return found[:: -(-len(found) // MAX_SUB_GENERATORS)] if found else found

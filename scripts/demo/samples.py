"""Pictures for the report: what the aggregator's cached sub-generators draw, and real images beside them.

Axes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.service.fleet.spec import method_class, method_of
from replayfleet.federation.service.pages import contact_sheet, picture_uri
from replayfleet.federation.streams.datasets import Dataset
from replayfleet.federation.streams.labelled_images import normalise
from replayfleet.federation.wire.protocol.messages import FleetSpec
from replayfleet.scripts.demo.facts import stored_state

NUM_COLUMNS = 2
NUM_ROWS = 3
_NUM_JUDGED = 64


@dataclass(frozen=True, slots=True)
class Picture:
    """A contact sheet of one class, as a PNG within a URI."""

    class_id: int | None  # None for a generator of all classes
    data_uri: str
    recognised: float | None = None  # share of generated samples that the client's own task model takes for the class


def draws_all_classes(spec: Mapping[str, Any]) -> bool:
    """Whether a client of a fleet with this spec has one generator of all classes (ablation AS3)."""
    return bool(spec["settings"].get("generators") == "single")


def why_nothing_is_drawn(spec: Mapping[str, Any]) -> str:
    """Return a sentence if ``generated_pictures`` has no pictures for a fleet with this spec, else nothing."""
    from replayfleet.federation.methods.pfedgrp import PFedGRP

    if not issubclass(method_class(spec["method"]), PFedGRP):
        return f"Nothing is drawn: with {spec['method']} the aggregator holds no sub-generators."
    if spec["settings"].get("sub_generator") == "ddpm":
        return "Nothing is drawn: a diffusion model takes minutes for what a WGAN-GP draws in a moment."
    return ""


def generated_pictures(aggregator_dir: Path, spec: Mapping[str, Any]) -> dict[str, list[Picture]]:
    """Return, for each client, a picture per sub-generator that the aggregator holds of it; unfiltered samples.

    Empty where ``why_nothing_is_drawn`` has a reason.

    Args:
        aggregator_dir: its store.
        spec: the fleet's, as JSON values.

    Raises:
        ReplayfleetError: The store has no state.
    """
    if why_nothing_is_drawn(spec):
        return {}
    from replayfleet.aggregator.aggregation import restore_artefacts
    from replayfleet.aggregator.console.drawing import samples
    from replayfleet.federation.methods.kit.packing import ALL_CLASSES
    from replayfleet.federation.methods.kit.seeding import seeded_generator
    from replayfleet.federation.service.torch_setup import prepare_torch

    prepare_torch(1)
    state, blobs = stored_state(aggregator_dir)
    method: Any = method_of(msgspec.convert(spec, type=FleetSpec))
    known = method.AggregatorState.unpack(restore_artefacts(state, blobs))
    pictures: dict[str, list[Picture]] = {}
    for name, client in sorted(known.clients.items()):
        rng = seeded_generator(int(spec["run_seed"]), 0, f"report/{name}")
        pictures[name] = [
            Picture(
                None if class_id == ALL_CLASSES else class_id,
                picture_uri(contact_sheet(images, NUM_COLUMNS, NUM_ROWS)),
                share,
            )
            for class_id, images, share in samples(method, client, rng, NUM_COLUMNS * NUM_ROWS, _NUM_JUDGED)
        ]
    return pictures


def real_pictures(data: Dataset) -> list[Picture]:
    """Return a picture of each class's first test images."""
    pictures = []
    for class_id in range(data.task.num_classes):
        first = np.flatnonzero(data.test.labels == class_id)[: NUM_COLUMNS * NUM_ROWS]
        pictures.append(Picture(class_id, _uri(normalise(data.test.images[first]))))
    return pictures


def _uri(images: NDArray[np.float32]) -> str:
    return picture_uri(contact_sheet(images, NUM_COLUMNS, NUM_ROWS))

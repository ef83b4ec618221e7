"""Pictures for the report: what the aggregator's cached sub-generators draw, and real images beside them.

Axes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.service.fleet.spec import method_of
from replayfleet.federation.service.pages import picture_uri
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
    if spec["method"] != "pfedgrp":
        return f"Nothing is drawn: with {spec['method']} the aggregator holds no sub-generators."
    if spec["settings"].get("sub_generator", "wgan-gp") != "wgan-gp":
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
    import torch

    from replayfleet.aggregator.aggregation import restore_artefacts
    from replayfleet.federation.methods.kit.packing import ALL_CLASSES
    from replayfleet.federation.methods.kit.seeding import seeded_generator
    from replayfleet.federation.methods.steps.memory import sampler_of
    from replayfleet.federation.methods.steps.replay import recognised_share
    from replayfleet.federation.methods.steps.task_model import judge_with
    from replayfleet.federation.service.torch_setup import prepare_torch
    from replayfleet.models.specs import LATENT_SIZE

    prepare_torch(1)
    state, blobs = stored_state(aggregator_dir)
    method: Any = method_of(msgspec.convert(spec, type=FleetSpec))
    known = method.AggregatorState.unpack(restore_artefacts(state, blobs))
    sampler = sampler_of(method)
    pictures: dict[str, list[Picture]] = {}
    for name, client in sorted(known.clients.items()):
        rng = seeded_generator(int(spec["run_seed"]), 0, f"report/{name}")
        judge = judge_with(method.task, client.task_parameters)
        pictures[name] = []
        for class_id, parameters in sorted(client.sub_generators.items()):
            draw = sampler(parameters)
            images = draw(torch.randn(NUM_COLUMNS * NUM_ROWS, LATENT_SIZE, generator=rng)).numpy()
            picture = Picture(None, picture_uri(contact_sheet(images)))
            if class_id != ALL_CLASSES:
                share = recognised_share(draw, class_id, judge, rng, _NUM_JUDGED)
                picture = replace(picture, class_id=class_id, recognised=share)
            pictures[name].append(picture)
    return pictures


def real_pictures(data: Dataset) -> list[Picture]:
    """Return a picture of each class's first test images."""
    pictures = []
    for class_id in range(data.task.num_classes):
        first = np.flatnonzero(data.test.labels == class_id)[: NUM_COLUMNS * NUM_ROWS]
        pictures.append(Picture(class_id, picture_uri(contact_sheet(normalise(data.test.images[first])))))
    return pictures


def contact_sheet(images: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return images (B, C, H, W) in [-1, 1] as one (rows x H, columns x W, C) uint8; places without an image are 0."""
    _, channels, height, width = images.shape
    sheet = np.zeros((NUM_ROWS * height, NUM_COLUMNS * width, channels), np.uint8)
    pixels = np.clip(np.rint((images + 1) * 127.5), 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    for index, picture in enumerate(pixels[: NUM_ROWS * NUM_COLUMNS]):
        top, left = index // NUM_COLUMNS * height, index % NUM_COLUMNS * width
        sheet[top : top + height, left : left + width] = picture
    return sheet

"""Pictures for the report: what the aggregator's cached sub-generators draw, and real images beside them.

Axes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from federation.errors import ReplayfleetError
from federation.streams.datasets import Dataset
from federation.streams.labelled_images import normalise
from models.specs import TaskSpec
from scripts.report.facts import stored_state

NUM_COLUMNS = 2
NUM_ROWS = 3
_NUM_JUDGED = 64


@dataclass(frozen=True, slots=True)
class Picture:
    """A contact sheet of one class.

    Attributes:
        class_id: which.
        data_uri: PNG.
        recognised: share of generated samples that the client's own task model takes for the class; None for real ones.
    """

    class_id: int
    data_uri: str
    recognised: float | None = None


def generated_pictures(aggregator_dir: Path, task: TaskSpec, run_seed: int) -> dict[str, list[Picture]]:
    """Return, for each client, a picture per sub-generator that the aggregator holds of it; unfiltered samples.

    Raises:
        ReplayfleetError: The store has no state.
    """
    import torch

    from aggregator.aggregation import restore_artefacts
    from federation.methods.pfedgrp import PFedGRP
    from federation.methods.seeding import seeded_generator
    from federation.methods.steps.replay import eager_sampler, recognised_share
    from federation.methods.steps.task_model import judge_with
    from federation.service.torch_setup import prepare_torch
    from models.specs import LATENT_SIZE

    prepare_torch(1)
    state, blobs = stored_state(aggregator_dir)
    known = PFedGRP.AggregatorState.unpack(restore_artefacts(state, blobs))
    sampler = eager_sampler(task)
    pictures: dict[str, list[Picture]] = {}
    for name, client in sorted(known.clients.items()):
        rng, judge = seeded_generator(run_seed, 0, f"report/{name}"), judge_with(task, client.task_parameters)
        pictures[name] = []
        for class_id, parameters in sorted(client.sub_generators.items()):
            draw = sampler(parameters)
            images = draw(torch.randn(NUM_COLUMNS * NUM_ROWS, LATENT_SIZE, generator=rng)).numpy()
            share = recognised_share(draw, class_id, judge, rng, _NUM_JUDGED)
            pictures[name].append(Picture(class_id, data_uri(contact_sheet(images)), share))
    return pictures


def real_pictures(data: Dataset) -> list[Picture]:
    """Return a picture of each class's first test images."""
    pictures = []
    for class_id in range(data.task.num_classes):
        first = np.flatnonzero(data.test.labels == class_id)[: NUM_COLUMNS * NUM_ROWS]
        pictures.append(Picture(class_id, data_uri(contact_sheet(normalise(data.test.images[first])))))
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


def data_uri(picture: NDArray[np.uint8]) -> str:
    """Return (H, W, C) uint8, grey or RGB, as a PNG within a URI.

    Raises:
        ReplayfleetError: It can't be encoded.
    """
    import cv2

    done, encoded = cv2.imencode(".png", np.ascontiguousarray(picture[..., ::-1]))
    if not done:
        raise ReplayfleetError(f"a picture of shape {picture.shape} can't be encoded as PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.tobytes()).decode()}"

"""Whole frames of recorded driving with their boxes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.streams.driving.boxes import read_pictures
from replayfleet.federation.streams.driving.recording import Driving
from replayfleet.models.specs import DetectionSpec
from tests.support.driving_folder import CLASS_NAMES, HEIGHT, SIDE, WIDTH, write_driving

SPEC = DetectionSpec(3, 32, 128, CLASS_NAMES, ((0.1, 0.2),), width=1, stride=16, max_boxes=3)


def test_frames_become_pictures_of_the_tasks_size_with_boxes_in_shares(tmp_path: Path):
    driving = Driving(write_driving(tmp_path / "carla", {"Town01": [[0, 3], []], "Town02": [[2]]}))
    part = read_pictures(driving, driving.frames(), SPEC)
    assert part.pixels.shape == (3, 32, 128, 3)
    assert len(part) == 3
    first = part.labels[0][np.argsort(part.labels[0, :, 1])]
    assert first[first[:, 0] >= 0, 0].tolist() == [0, 3]
    assert part.labels[0, 0, 3:].tolist() == pytest.approx([SIDE / WIDTH, SIDE / 2 / HEIGHT], rel=1e-4)
    assert (part.labels[1, :, 0] == -1).all()
    assert part.labels[2, 0, 0] == 2
    images = part.images()
    assert images.shape == (3, 3, 32, 128)
    assert -1 <= images.min() < images.max() <= 1
    RoundData(torch.from_numpy(images), torch.from_numpy(part.labels))


def test_a_box_stands_where_its_object_is_in_the_resized_picture(tmp_path: Path):
    driving = Driving(write_driving(tmp_path / "carla", {"Town01": [[3]]}))
    part = read_pictures(driving, driving.frames(), SPEC)
    _, x, y, width, height = part.labels[0, 0]
    inside = part.pixels[0, :, :, 1] > 100
    rows, columns = np.nonzero(inside)
    assert columns.mean() / 128 == pytest.approx(x, abs=0.02)
    assert rows.mean() / 32 == pytest.approx(y, abs=0.05)
    assert width * 128 * height * 32 > 0


@pytest.mark.parametrize("change", [{"class_names": ("vehicle", "bike")}, {"image_channels": 1}])
def test_another_task_is_refused(tmp_path: Path, change: dict[str, object]):
    driving = Driving(write_driving(tmp_path / "carla", {"Town01": [[0]]}))
    with pytest.raises(SettingsError, match="coloured pictures of vehicle, bike"):
        read_pictures(driving, driving.frames(), replace(SPEC, **change))

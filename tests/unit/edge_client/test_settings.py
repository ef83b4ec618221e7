"""What an operator may say about training, and what it makes of a board's allowance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayfleet.devices.budget import TrainingAllowance
from replayfleet.devices.limits import Reading
from replayfleet.edge_client.flow import Answers, Inputs, LabelProgress, Picture, Prediction, Shown
from replayfleet.edge_client.operator.metrics import Metrics
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.federation.errors import SettingsError

GIB = 1 << 30


def settings(**options: Any) -> ClientSettings:
    return ClientSettings(
        broker="mqtt://localhost", client_id="cam", source="synthetic://street", data_dir=Path("d"), **options
    )


def test_training_may_hold_what_the_operator_says_else_the_profile_else_half_of_the_memory() -> None:
    board = TrainingAllowance(memory_bytes=2 * GIB, core_gflops=2.4)
    assert settings().allowance(board, 8 * GIB) == board
    assert settings(training_memory_mb=512).allowance(board, 8 * GIB).memory_bytes == GIB // 2
    assert settings().allowance(TrainingAllowance(), 8 * GIB).memory_bytes == 4 * GIB
    assert settings().allowance(TrainingAllowance(), 0).memory_bytes is None


def test_limits_that_the_operator_writes_win() -> None:
    board = TrainingAllowance(max_temperature_c=75.0)
    found = settings(max_temperature_c=60.0, max_power_w=12.5).allowance(board, 0)
    assert (found.max_temperature_c, found.max_power_w) == (60.0, 12.5)
    assert settings().allowance(board, 0).max_temperature_c == 75.0


@pytest.mark.parametrize("name", ["training_memory_mb", "max_temperature_c", "max_power_w"])
def test_impossible_limits_are_refused_by_name(name: str) -> None:
    for value in (-1, math.nan, math.inf):
        with pytest.raises(SettingsError, match=f"{name} is {value}"):
            settings(**{name: value})


def test_metrics_show_frames_cameras_labels_and_accuracy() -> None:
    now = 100.0
    metrics = Metrics("cpu", "CPUExecutionProvider", lambda: now)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"replayfleet_client_{name}", labels)

    assert metrics.oldest_picture_s() == -1.0
    picture, inputs = (
        Picture("front", 0, np.zeros((2, 2, 3), np.uint8), 98.0),
        Inputs(np.zeros((1, 1, 2, 2), np.float32)),
    )
    metrics.shown(Shown(picture, inputs, None))
    assert (value("camera_age_seconds", camera="front"), value("latency_seconds_count")) == (2.0, 0.0)
    metrics.shown(Shown(picture, inputs, Prediction("front", 0, Answers.none(), 3, 98.0, 98.04)))
    assert (value("latency_seconds_bucket", le="0.025"), value("latency_seconds_bucket", le="0.05")) == (0.0, 1.0)
    now = 160.0
    assert metrics.oldest_picture_s() == 62.0
    assert value("camera_age_seconds", camera="front") == 62.0, "a camera that gives nothing grows old between scrapes"
    assert math.isnan(value("accuracy") or 0.0)
    metrics.learning({"accuracy": 0.75, "accuracy/Town01": 0.5}, LabelProgress(12, 40, 3, 5))
    assert (value("accuracy"), value("labels_waiting"), value("labels_needed")) == (0.75, 12.0, 40.0)


def test_metrics_show_what_slows_training_and_count_shortened_rounds_once() -> None:
    metrics = Metrics("cpu", "CPUExecutionProvider")
    metrics.training(1, 0.5, Reading(81.0, "cpu-thermal", 1.0, 11.5))
    metrics.training(1, 0.25, Reading(83.0, "gpu-thermal", 2.0, None))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert value("replayfleet_client_shortened_rounds_total") == 1.0
    assert value("replayfleet_client_training_time_share") == 0.25
    assert value("replayfleet_client_temperature_celsius", zone="gpu-thermal") == 83.0
    assert value("replayfleet_client_temperature_celsius", zone="cpu-thermal") is None
    power_w = value("replayfleet_client_power_watts")
    assert power_w is not None
    assert math.isnan(power_w)

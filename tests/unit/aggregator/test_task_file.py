"""What an operator can write into ``aggregator serve --task``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from replayfleet.aggregator.settings import AggregatorSettings
from replayfleet.federation.errors import SettingsError
from replayfleet.models.specs import DetectionSpec, TaskSpec

DETECTION = """
kind = "detection"
image_channels = 3
image_height = 192
image_width = 320
class_names = ["vehicle", "traffic_light"]
anchors = [[0.01, 0.03], [0.2, 0.25]]
width = 4
stride = 16
"""


def settings(tmp_path: Path, text: str) -> AggregatorSettings:
    path = tmp_path / "task.toml"
    path.write_text(text)
    return AggregatorSettings(data_dir=tmp_path, clients=1, method="fedavg", task=path)


def test_a_detection_task_is_one_by_its_kind(tmp_path: Path):
    expected = DetectionSpec(3, 192, 320, ("vehicle", "traffic_light"), ((0.01, 0.03), (0.2, 0.25)), 4, 16)
    made = settings(tmp_path, DETECTION)
    assert made.task_spec() == expected
    assert made.spec().task["kind"] == "detection"


def test_methods_have_the_names_that_the_simulator_knows_them_by(tmp_path: Path):
    made = dataclasses.replace(settings(tmp_path, DETECTION), method="der-fedgp", set={"alpha": "0.5"}).spec()
    assert (made.method, made.settings["base"], made.settings["alpha"]) == ("fedgp", "der", 0.5)


def test_a_task_without_a_kind_is_a_classification(tmp_path: Path):
    text = 'image_channels = 1\nimage_size = 28\nclass_names = ["a", "b"]\n'
    assert settings(tmp_path, text).task_spec() == TaskSpec(1, 28, ("a", "b"))
    assert settings(tmp_path, 'kind = "classification"\n' + text).task_spec() == TaskSpec(1, 28, ("a", "b"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (DETECTION.replace("detection", "detecting"), "unknown kind of task 'detecting'; did you mean 'detection'"),
        (DETECTION.replace("stride = 16", "strid = 16"), "unknown key 'strid'; did you mean 'stride'"),
        (
            DETECTION.replace("image_width = 320", "image_width = 300"),
            "image_width is 300, expected .* a multiple of 16",
        ),
        (DETECTION.replace("[[0.01, 0.03], [0.2, 0.25]]", "[[0.01], [0.2, 0.25]]"), "anchors"),
    ],
)
def test_what_is_wrong_with_a_detection_task_is_one_clear_line(tmp_path: Path, text: str, complaint: str):
    with pytest.raises(SettingsError, match=complaint):
        settings(tmp_path, text).task_spec()

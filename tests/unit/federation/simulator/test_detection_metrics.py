"""Average precision where it can be counted by hand."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from replayfleet.export.running.detections import Detections
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.simulator.measures.detection_metrics import detection_quality

CAR, LIGHT = 0, 3


def true(*boxes: tuple[int, float, float, float, float], padded_to: int = 4) -> np.ndarray:
    rows = [list(map(float, box)) for box in boxes] + [[-1.0, 0.5, 0.5, 0.5, 0.5]] * (padded_to - len(boxes))
    return np.array(rows, np.float32)


def found(*boxes: tuple[int, float, float, float, float, float]) -> Detections:
    """Each (class id, score, centre x, centre y, width, height)."""
    table = np.array(boxes, np.float32).reshape(-1, 6)
    ids, scores, centres, halves = table[:, 0], table[:, 1], table[:, 2:4], table[:, 4:] / 2
    return Detections(np.concatenate([centres - halves, centres + halves], axis=1), scores, ids.astype(np.int64))


def test_finding_everything_exactly_is_one():
    labels = np.stack([true((CAR, 0.5, 0.5, 0.2, 0.2), (LIGHT, 0.1, 0.1, 0.02, 0.04)), true((CAR, 0.3, 0.3, 0.4, 0.4))])
    quality = detection_quality(
        [
            found((CAR, 0.9, 0.5, 0.5, 0.2, 0.2), (LIGHT, 0.4, 0.1, 0.1, 0.02, 0.04)),
            found((CAR, 0.8, 0.3, 0.3, 0.4, 0.4)),
        ],
        labels,
    )
    assert quality.class_ap50 == {CAR: pytest.approx(1.0), LIGHT: pytest.approx(1.0)}
    assert quality.map50 == quality.map == pytest.approx(1.0)


@pytest.mark.parametrize(("shift", "num_thresholds"), [(0.099, 3), (0.12, 1), (0.14, 0)])
def test_a_box_counts_at_those_of_ten_thresholds_that_its_overlap_reaches(shift: float, num_thresholds: int):
    # Squares of side 0.4, one shifted: (0.4 - shift) / (0.4 + shift) is a little over 0.6, 0.54 or 0.48.
    moved = found((CAR, 0.9, 0.5 + shift, 0.5, 0.4, 0.4))
    quality = detection_quality([moved], true((CAR, 0.5, 0.5, 0.4, 0.4))[None])
    assert quality.map50 == pytest.approx(min(1, num_thresholds))
    assert quality.map == pytest.approx(num_thresholds / 10)


def test_the_area_under_a_known_precision_and_recall_curve():
    # Four true cars. By falling score: right, wrong, right. Precision is 1 up to recall 1/4 and 2/3 up to 1/2, then 0.
    labels = true(*[(CAR, x, 0.5, 0.1, 0.1) for x in (0.1, 0.3, 0.5, 0.7)])[None]
    answers = found((CAR, 0.9, 0.1, 0.5, 0.1, 0.1), (CAR, 0.8, 0.1, 0.1, 0.1, 0.1), (CAR, 0.7, 0.3, 0.5, 0.1, 0.1))
    recalls = np.linspace(0, 1, 101)
    expected = np.where(recalls <= 0.25, 1.0, np.where(recalls <= 0.5, 2 / 3, 0.0)).mean()
    assert detection_quality([answers], labels).map50 == pytest.approx(expected, abs=1e-6)


def test_a_recall_and_an_overlap_that_a_threshold_names_reach_it():
    # Three of five cars are found, each in 3/5 of its width and in binary fractions: at 0.5, 0.55 and 0.6.
    places = [n / 8 for n in range(5)]
    labels = true(*[(CAR, x + 5 / 128, 0.5, 5 / 64, 0.25) for x in places], padded_to=5)[None]
    answers = found(*[(CAR, 0.9, x + 3 / 128, 0.5, 3 / 64, 0.25) for x in places[:3]])
    quality = detection_quality([answers], labels)
    assert quality.map50 == pytest.approx(61 / 101, abs=1e-9)
    assert quality.map == pytest.approx(61 / 101 * 3 / 10, abs=1e-9)


def test_a_second_box_on_the_same_thing_is_wrong():
    labels = true((CAR, 0.3, 0.5, 0.1, 0.1), (CAR, 0.7, 0.5, 0.1, 0.1))[None]
    twice = found((CAR, 0.9, 0.3, 0.5, 0.1, 0.1), (CAR, 0.8, 0.3, 0.5, 0.1, 0.1), (CAR, 0.7, 0.7, 0.5, 0.1, 0.1))
    recalls = np.linspace(0, 1, 101)
    expected = np.where(recalls <= 0.5, 1.0, 2 / 3).mean()
    assert detection_quality([twice], labels).map50 == pytest.approx(expected, abs=1e-6)


def test_the_right_place_with_the_wrong_class_is_worth_nothing():
    quality = detection_quality([found((LIGHT, 0.9, 0.5, 0.5, 0.2, 0.2))], true((CAR, 0.5, 0.5, 0.2, 0.2))[None])
    assert quality.class_ap50 == {CAR: 0.0}
    assert quality.map50 == 0.0


def test_a_class_that_is_nowhere_has_no_precision_and_no_say():
    boxes = found((CAR, 0.9, 0.5, 0.5, 0.2, 0.2), (LIGHT, 0.9, 0.1, 0.1, 0.2, 0.2))
    quality = detection_quality([boxes], true((CAR, 0.5, 0.5, 0.2, 0.2))[None])
    assert quality.class_ap == {CAR: pytest.approx(1.0)}
    assert quality.map50 == pytest.approx(1.0)


def test_what_is_not_found_counts_as_zero():
    quality = detection_quality([found(), found()], np.stack([true((CAR, 0.5, 0.5, 0.2, 0.2)), true()]))
    assert quality.class_ap50 == {CAR: 0.0}


@pytest.mark.parametrize("boxes", [(), ((CAR, 0.9, 0.5, 0.5, 0.2, 0.2),)])
def test_where_nothing_is_to_be_found_there_is_no_number(
    boxes: tuple[tuple[int, float, float, float, float, float], ...],
):
    quality = detection_quality([found(*boxes)], true()[None])
    assert quality.class_ap50 == {}
    assert math.isnan(quality.map50)
    assert math.isnan(quality.map)


def test_pictures_and_labels_must_match():
    with pytest.raises(ValueError, match=r"labels are \(1, 4, 5\), expected \(2, M, 5\)"):
        detection_quality([found(), found()], true()[None])


@pytest.mark.parametrize("missing", ["torchmetrics.detection", "faster_coco_eval"])
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, missing: str):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=r"pip install 'replayfleet\[detection\]'"):
        detection_quality([found()], true()[None])

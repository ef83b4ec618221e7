from __future__ import annotations

import itertools
import time

import cv2
import numpy as np
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.street.looks import CLASS_NAMES, LENGTHS_M, SIGNS, TOWNS
from replayfleet.federation.streams.street.shapes import Shape, house, sign, tree, vehicle
from replayfleet.federation.streams.street.street import MIN_HEIGHT, MIN_WIDTH, NEAR_M, Street, View, paint
from replayfleet.federation.streams.street.traffic import Thing, Traffic

WIDTH, HEIGHT = 640, 380
VIEW = View((WIDTH, HEIGHT))
BACKGROUND = (255, 0, 255, 0)
RED, GREY = (200, 20, 20), (60, 60, 66)


def _painted(*things: Thing, town: str = "sunny") -> tuple[np.ndarray, list[list[float]], list[int]]:
    """Paint things on an empty background: (where something was painted, boxes, class ids)."""
    canvas = np.full((HEIGHT, WIDTH, 4), BACKGROUND, np.uint8)
    found = paint(cv2, canvas, VIEW, TOWNS[town], things)
    return (canvas[:, :, :3] != BACKGROUND[:3]).any(axis=2), found.corners.tolist(), found.class_ids.tolist()


def _vehicle(kind: str, phase: int = 0, *, away: bool = True) -> Shape:
    return vehicle(kind, RED, GREY, phase, away, False)


def _at(shape: Shape, x: float, z: float, class_id: int = 0, y: float = 0.0) -> Thing:
    return Thing(shape, x, y, z, class_id)


def _bounds(painted: np.ndarray) -> list[float]:
    rows, columns = np.flatnonzero(painted.any(axis=1)), np.flatnonzero(painted.any(axis=0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


@pytest.mark.parametrize("away", [True, False])
@pytest.mark.parametrize("kind", LENGTHS_M)
def test_a_box_bounds_the_very_pixels_of_its_object(kind: str, away: bool):
    mesh = _vehicle(kind, 1, away=away)
    for x, z in ((0.0, 8.0), (3.2, 12.3), (-5.1, 20.0), (-2.0, 33.3), (6.0, 15.0)):
        painted, boxes, _ = _painted(_at(mesh, x, z))
        assert boxes == [_bounds(painted)], (x, z)


@pytest.mark.parametrize(
    ("kind", "x", "z"), [("car", 3.2, 0.9), ("car", 2.6, -1.5), ("bus", -3.5, -3.0), ("van", -2.2, 1.2)]
)
def test_a_box_of_what_reaches_past_the_edge_bounds_what_is_in_the_picture(kind: str, x: float, z: float):
    painted, boxes, _ = _painted(_at(_vehicle(kind), x, z))
    assert painted[:, [0, -1]].any()
    assert boxes == [_bounds(painted)]


@pytest.mark.parametrize("kind", SIGNS)
def test_signs_and_lights_are_bounded_like_vehicles(kind: str):
    painted, boxes, class_ids = _painted(_at(sign(kind), 4.0, 14.0, 4, y=2.4))
    assert (boxes, class_ids) == ([_bounds(painted)], [4])
    painted, boxes, class_ids = _painted(_at(sign("green"), -4.0, 22.0, 3, y=4.0))
    assert (boxes, class_ids) == ([_bounds(painted)], [3])


def test_what_others_hide_has_no_box():
    bus, car = _at(_vehicle("bus"), 0.0, 10.0), _at(_vehicle("car"), 0.0, 24.0)
    _, boxes, _ = _painted(car, bus)
    assert len(boxes) == 1
    _, boxes, _ = _painted(_at(car.shape, 5.0, 24.0), bus)
    assert len(boxes) == 2
    _, boxes, _ = _painted(car, _at(house(14.0, 4, 1, 0, GREY, False), -6.0, 8.0, -1))
    assert boxes == []


def test_a_half_hidden_object_keeps_its_whole_box():
    behind = _at(_vehicle("car"), 1.4, 16.0)
    _, alone, _ = _painted(behind)
    _, boxes, _ = _painted(behind, _at(_vehicle("car"), 0.0, 8.0))
    assert boxes[0] == alone[0]


def test_tiny_objects_and_slivers_at_the_edge_have_no_box():
    car = _vehicle("car")
    assert _painted(_at(car, 0.0, 100.0))[1] == []
    painted, boxes, _ = _painted(_at(car, 9.5, 5.9))
    assert painted.any()
    assert boxes == []


def test_nothing_is_painted_for_what_is_behind_the_camera():
    assert not _painted(_at(_vehicle("bus"), 0.0, -12.0), _at(tree(6.0, (66, 112, 54)), 3.0, 0.0, -1))[0].any()


def test_the_view_is_a_pinhole_that_looks_ahead_and_stays_in_what_opencv_can_count():
    points = np.array([(0.0, 1.55, 10.0), (1.0, 0.0, 2.0), (0.0, 0.0, -3.0), (1e7, 0.0, 1.0)])
    rows = [190, 190 + 320 * 1.55 // 2, 190 + 320 * 1.55 // NEAR_M, 190 + 320 * 1.55]
    assert VIEW.project(points).tolist() == [[320, rows[0]], [480, rows[1]], [320, rows[2]], [30_000, rows[3]]]


def test_of_a_vehicle_the_end_towards_the_camera_shows_its_lamps():
    def lamps(away: bool) -> int:
        canvas = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
        shape = vehicle("car", GREY, GREY, 0, away, True)
        paint(cv2, canvas, VIEW, TOWNS["night"], [_at(shape, 0.0, 6.0)])
        return int((canvas[:, :, :3].min(axis=2) > 180).sum())

    assert lamps(away=False) > 20 > lamps(away=True) == 0


@pytest.mark.parametrize("town", TOWNS)
def test_vehicles_of_a_lane_never_touch(town: str):
    traffic = Traffic(TOWNS[town], seed=5)
    for moment in np.arange(0, 40, 2.7):
        for lane in TOWNS[town].lanes:
            own = sorted(
                (thing.z, thing.z + thing.shape.corners[:, :, 2].max())
                for thing in traffic.things(float(moment))
                if thing.x == lane.x and thing.class_id in (0, 1, 2)
            )
            assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(own))


@pytest.mark.parametrize("town", TOWNS)
def test_equal_arguments_give_equal_pictures_in_any_order(town: str):
    one, other = Street(town, seed=4), Street(town, seed=4)
    moments = [3.0, 0.4, 70.0]
    first = [one.draw(moment) for moment in moments]
    for moment, (pixels, annotation) in reversed(list(zip(moments, first, strict=True))):
        again, boxes = other.draw(moment)
        assert again.shape == (380, 640, 3)
        assert again.dtype == np.uint8
        assert (again == pixels).all()
        assert (boxes.corners == annotation.corners).all()
        assert (boxes.class_ids == annotation.class_ids).all()
    assert (first[0][0] != first[1][0]).any()
    assert (Street(town, seed=5).draw(3.0)[0] != first[0][0]).mean() > 0.1


@pytest.mark.parametrize("town", TOWNS)
def test_boxes_lie_in_the_picture_and_have_a_size(town: str):
    street = Street(town, seed=1)
    for moment in np.arange(0, 40, 4.3):
        corners = street.draw(float(moment))[1].corners
        assert corners.dtype == np.float32
        assert (corners >= 0).all()
        assert (corners <= (640, 380, 640, 380)).all()
        assert (corners[:, 2] - corners[:, 0] >= MIN_WIDTH).all()
        assert (corners[:, 3] - corners[:, 1] >= MIN_HEIGHT).all()


def test_every_class_is_met_in_town_and_the_motorway_lacks_some():
    def met(town: str) -> np.ndarray:
        street = Street(town, seed=2)
        return sum(np.bincount(street.draw(4.9 * n)[1].class_ids, minlength=len(CLASS_NAMES)) for n in range(24))

    assert (met("sunny") >= 3).all()
    vehicles, bikes, _, lights, signs = met("highway")
    assert min(vehicles, signs) >= 5
    assert bikes == lights == 0


def test_towns_look_different():
    pictures = {town: Street(town, seed=1).draw(1.0)[0] for town in TOWNS}
    mean = {town: float(pixels.mean()) for town, pixels in pictures.items()}
    assert mean["night"] < 0.6 * mean["sunny"]
    assert mean["rain"] < 0.9 * mean["sunny"] < mean["highway"]
    assert pictures["rain"].std() < pictures["sunny"].std()


@pytest.mark.parametrize(("width", "height"), [(64, 64), (416, 416), (1920, 1080)])
def test_the_picture_has_the_size_asked_for(width: int, height: int):
    street = Street("night", seed=1, width=width, height=height)
    sizes = [street.draw(moment) for moment in (0.0, 31.0)]
    assert {pixels.shape for pixels, _ in sizes} == {(height, width, 3)}
    assert all((annotation.corners <= (width, height, width, height)).all() for _, annotation in sizes)


def test_drawing_is_quick():
    street = Street("sunny", seed=3)
    taken, loops = [], []
    for number in range(40):
        began = time.process_time()
        street.draw(number / 10)
        drawn = time.process_time()
        sum(one * one for one in range(100_000))  # some 5 ms where drawing takes 5; both are slower on a slow core
        taken.append(drawn - began)
        loops.append(time.process_time() - drawn)
    assert sorted(taken)[10] < 4 * sorted(loops)[10]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"town": "nihgt"}, "unknown town 'nihgt'; did you mean 'night'"),
        ({"width": 63}, "width is 63, expected 64 to 1920 pixels"),
        ({"height": 1921}, "height is 1921"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
    ],
)
def test_an_impossible_street_is_refused(settings: dict[str, object], message: str):
    with pytest.raises(SettingsError, match=message):
        Street(**settings)  # type: ignore[arg-type]

"""Projection, near-plane clipping and occlusion against closed forms, and against every pixel's own ray."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from replayfleet.edge_client.cameras.carla.boxes import (
    NEAR_M,
    Array,
    Lens,
    Limits,
    Solids,
    _passage,
    annotate,
    box_in_picture,
    clipped_at_near_plane,
    corners,
    cuboid,
    in_camera_axes,
    moved,
    project,
    visible_share,
)

LENS = Lens(640, 380, 90.0)
EVERYTHING = Limits(min_visible=0.2, min_size_px=1.0, max_distance_m=1000.0)
IDENTITY = np.eye(4)


def solid(middle: Sequence[float], half: Sequence[float]) -> Array:
    """In camera axes (right, down, forward), edges along the axes."""
    return np.vstack([middle, np.diag(half)]).astype(np.float64)


def in_world(middle: Sequence[float], half: Sequence[float]) -> Array:
    """In CARLA's axes (forward, right, up)."""
    pose = np.eye(4)
    pose[:3, 3] = middle
    return cuboid(pose, half)


def nothing_in_the_way() -> NDArray[np.float32]:
    return np.full((LENS.height, LENS.width), 1000.0, np.float32)


def test_the_focal_length_follows_from_the_angle_of_view():
    assert LENS.focal == pytest.approx(320.0)
    assert Lens(800, 600, 60.0).focal == pytest.approx(400 / np.tan(np.pi / 6))


def test_carla_axes_become_pixels():
    # 10 m ahead, 1 m to the right, 2 m up: 32 px right of the middle, 64 px above it.
    ahead = in_camera_axes(in_world([10, 1, 2], [0.1, 0.1, 0.1])[None], IDENTITY)[0, :1]
    assert project(ahead, LENS)[0] == pytest.approx([320 + 32, 190 - 64])


def test_a_turned_and_moved_camera_sees_what_is_to_its_side():
    # Camera at (5, 0, 0), turned to the right (yaw 90): world +y is ahead of it.
    to_world = np.array([[0, -1, 0, 5], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=float)
    seen = in_camera_axes(in_world([5, 10, 0], [1, 1, 1])[None], np.linalg.inv(to_world))[0]
    assert box_in_picture(seen, LENS) == pytest.approx([320 - 320 / 9, 190 - 320 / 9, 320 + 320 / 9, 190 + 320 / 9])


def test_the_nearest_face_makes_the_box_of_a_cube_ahead():
    assert box_in_picture(solid([0, 0, 10], [1, 1, 1]), LENS) == pytest.approx(
        [320 - 320 / 9, 190 - 320 / 9, 320 + 320 / 9, 190 + 320 / 9]
    )


def test_motion_turns_half_edges_and_moves_middles():
    quarter = np.array([[0, -1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 3], [0, 0, 0, 1]], dtype=float)
    turned = moved(in_world([1, 0, 0], [3, 2, 1]), quarter)
    assert turned[0] == pytest.approx([1, 3, 3])
    assert np.abs(corners(turned) - turned[0]).max(axis=0) == pytest.approx([2, 3, 1])


@pytest.mark.parametrize("forward", [-10.0, -1.0])
def test_a_box_behind_the_camera_is_not_in_the_picture(forward: float):
    assert len(clipped_at_near_plane(corners(solid([0, 0, forward], [1, 1, 0.9])))) == 0
    assert box_in_picture(solid([0, 0, forward], [1, 1, 0.9]), LENS) is None


def test_edges_that_pass_through_the_near_plane_end_on_it():
    points = clipped_at_near_plane(corners(solid([0, 0, 0], [1, 2, 3])), near_m=0.5)
    assert sorted(map(tuple, points.round(9))) == sorted(
        (x, y, depth) for x in (-1, 1) for y in (-2, 2) for depth in (0.5, 3)
    )


def test_a_box_beside_the_camera_is_cut_at_the_camera_plane_and_at_the_picture():
    # From 5 m behind to 5 m ahead, 2 to 4 m to the right, 1 m up and down. Its inner far edge is seen at
    # 320 + 320 * 2/5 = 448; it leaves the picture, u = 640, where its inner side is 2 m away: 190 -/+ 320 * 1/2.
    assert box_in_picture(solid([3, 0, 0], [1, 1, 5]), LENS) == pytest.approx([448, 30, 640, 350])


def test_vertices_behind_the_camera_never_mirror_into_the_picture():
    # The naive projection of the four corners behind would land left of the middle.
    left, _, right, _ = box_in_picture(solid([3, 0, 0], [1, 1, 5]), LENS)
    assert left > 320
    assert right == 640


def test_a_huge_box_right_in_front_fills_the_picture():
    assert box_in_picture(solid([0, 0, 50.2], [50, 50, 50]), LENS) == pytest.approx([0, 0, 640, 380])


def test_a_camera_within_a_box_sees_it_everywhere():
    assert box_in_picture(solid([0.3, 0.2, 0.5], [2, 2, 2]), LENS) == pytest.approx([0, 0, 640, 380])


def test_a_box_across_the_left_edge_is_cut_there():
    # Its face is 10 m away, from -12 to -8 m, so from -64 px to 64 px.
    assert box_in_picture(solid([-10, 0, 11], [2, 1, 1]), LENS) == pytest.approx([0, 158, 320 - 320 * 8 / 12, 222])


def test_a_box_beyond_the_right_edge_is_not_in_the_picture():
    assert box_in_picture(solid([30, 0, 10], [1, 1, 1]), LENS) is None


def test_boxes_agree_with_the_rays_of_all_pixels():
    lens = Lens(80, 60, 100.0)
    u, v = (grid.ravel() + 0.5 for grid in np.meshgrid(np.arange(lens.width), np.arange(lens.height)))
    rays = np.stack([(u - 40) / lens.focal, (v - 30) / lens.focal, np.ones_like(u)], axis=1)
    rng = np.random.default_rng(5)
    compared = 0
    for _ in range(120):
        turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        middle = rng.uniform([-6, -6, -3], [6, 6, 8])
        seen = np.vstack([middle, turn * rng.uniform(0.3, 4, size=(3, 1))])
        enters, leaves = _passage(seen, rays)
        hit = enters < leaves
        box = box_in_picture(seen, lens)
        if hit.sum() < 4:
            continue
        compared += 1
        found = np.array([u[hit].min(), v[hit].min(), u[hit].max(), v[hit].max()])
        # Pixels' middles lie within the box, and a sliver of less than two pixels may hold none.
        assert (box[:2] <= found[:2]).all()
        assert (box[2:] >= found[2:]).all()
        assert np.abs(np.array(box) - found).max() < 5
        assert np.median(np.abs(np.array(box) - found)) < 1.5
    assert compared > 40


def test_an_object_in_the_open_is_wholly_visible():
    seen = solid([0, 0, 10], [2, 1, 1])
    assert visible_share(seen, box_in_picture(seen, LENS), nothing_in_the_way() * 0 + 9.5, LENS) == 1.0


def test_a_wall_over_the_left_half_hides_half_of_an_object():
    seen, depth = solid([0, 0, 10], [2, 1, 1]), nothing_in_the_way() * 0 + 9.5
    depth[:, :320] = 4.0
    assert visible_share(seen, box_in_picture(seen, LENS), depth, LENS) == pytest.approx(0.5, abs=0.02)


def test_an_object_behind_a_wall_is_not_visible():
    seen = solid([0, 0, 10], [2, 1, 1])
    assert visible_share(seen, box_in_picture(seen, LENS), nothing_in_the_way() * 0 + 5, LENS) == 0.0


def test_rays_through_holes_of_an_object_say_nothing():
    # A bicycle: a tenth of its rays meet it, the rest go through. Nothing hides it.
    seen, depth = solid([0, 0, 10], [2, 1, 1]), nothing_in_the_way()
    depth[::10] = 10.0
    assert visible_share(seen, box_in_picture(seen, LENS), depth, LENS) == 1.0


def test_where_nothing_of_an_object_is_met_it_is_not_visible():
    seen = solid([0, 0, 10], [2, 1, 1])
    assert visible_share(seen, box_in_picture(seen, LENS), nothing_in_the_way(), LENS) == 0.0


def test_depth_is_measured_along_the_axis_and_not_along_the_ray():
    # Far to the side a depth of 10 m belongs to a ray of 14 m; the object is met nonetheless.
    seen = solid([9.0, 0, 10], [0.5, 0.5, 0.3])
    assert visible_share(seen, box_in_picture(seen, LENS), nothing_in_the_way() * 0 + 10.1, LENS) == 1.0


def test_labels_leave_out_what_is_too_small_too_far_or_hidden():
    solids = Solids(
        np.stack(
            [
                in_world([10, -5, 0], [1, 1, 1]),  # seen
                in_world([10, 5, 0], [1, 1, 1]),  # hidden
                in_world([300, 0, 0], [0.2, 0.2, 0.2]),  # less than a pixel
                in_world([60, 0, 0], [5, 5, 5]),  # far
                in_world([-10, 0, 0], [1, 1, 1]),  # behind
            ]
        ),
        np.array([3, 1, 2, 0, 4]),
    )
    depth = nothing_in_the_way() * 0 + 9.5
    depth[:, 380:] = 3.0
    boxes = annotate(solids, IDENTITY, LENS, depth, Limits(0.2, 4.0, 50.0))
    assert boxes.class_ids.tolist() == [3]
    assert boxes.corners[0] == pytest.approx([320 - 320 * 6 / 9, 190 - 320 / 9, 320 - 320 * 4 / 11, 190 + 320 / 9])


def test_without_depth_hidden_objects_count_as_visible():
    solids = Solids(in_world([10, 0, 0], [1, 1, 1])[None], np.array([0]))
    assert len(annotate(solids, IDENTITY, LENS, None, EVERYTHING)) == 1


def test_an_empty_world_has_no_boxes():
    nothing = Solids(np.empty((0, 4, 3)), np.empty(0, np.int64))
    assert len(annotate(nothing, IDENTITY, LENS, nothing_in_the_way(), EVERYTHING)) == 0


def test_a_part_that_sticks_into_the_picture_must_be_large_enough_itself():
    # A wide wall of which only 3 px reach into the picture.
    solids = Solids(in_world([10, 10 * 317 / 320 + 20, 0], [0.01, 20, 5])[None], np.array([0]))
    assert len(annotate(solids, IDENTITY, LENS, None, Limits(0, 2.0, 100.0))) == 1
    assert len(annotate(solids, IDENTITY, LENS, None, Limits(0, 4.0, 100.0))) == 0


def test_flat_solids_get_a_centimetre():
    flat = in_world([10, 0, 0], [0, 1, 1])
    assert np.abs(corners(flat) - flat[0]).max(axis=0) == pytest.approx([0.01, 1, 1])
    assert NEAR_M > 0

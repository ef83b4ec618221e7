"""Drives through ``support.carla_double``, a stand-in for CARLA: no simulator runs where tests do."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from support import carla_double
from support.carla_double import BoundingBox, Client, Location, Rotation, Simulator, Transform, Vector3D

from replayfleet.edge_client.cameras.carla import session as carla_session
from replayfleet.edge_client.cameras.carla.drive import CarlaDrive, metres, rgb
from replayfleet.edge_client.cameras.carla.guard import Duty
from replayfleet.edge_client.cameras.carla.scene import vehicle_class
from replayfleet.edge_client.cameras.carla.settings import CLASS_NAMES, CarlaSettings, import_carla
from replayfleet.edge_client.flow import CameraError, Picture
from replayfleet.federation.errors import SettingsError

SMALL = {"width": 64, "height": 40, "fixed_step": 0.02, "rate": 50.0, "timeout_s": 1.0}
WAITING_S = 10.0


class PaperGuard:
    """Writes down what a guard process is told; ``test_carla_restores`` has real ones."""

    made: ClassVar[list[PaperGuard]] = []

    def __init__(self) -> None:
        self.duties: list[Duty] = []
        self.end = ""
        self.made.append(self)

    def promise(self, duty: Duty) -> None:
        self.duties.append(duty)

    def release(self) -> None:
        self.end += "released"

    def abandon(self) -> None:
        self.end += "abandoned"


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setitem(sys.modules, "carla", carla_double)
    monkeypatch.setattr(carla_session, "_TICK_PROBE_S", 0.3)
    monkeypatch.setattr(carla_session, "Guard", PaperGuard)
    PaperGuard.made.clear()
    yield Simulator(2000)
    del Simulator.running[2000]


def camera(**settings: Any) -> CarlaDrive:
    return CarlaDrive(carla_double, CarlaSettings(**{**SMALL, **settings}), "front")


@contextlib.contextmanager
def driving(**settings: Any) -> Iterator[Iterator[Picture]]:
    pictures = camera(**settings).pictures(threading.Event())
    with contextlib.closing(pictures):  # type: ignore[type-var]
        yield pictures


def frame_in(picture: Picture) -> int:
    """The stand-in paints a frame's number: blue, and 256 times green."""
    return int(picture.pixels[0, 0, 2]) + 256 * int(picture.pixels[0, 0, 1])


def car(x: float, y: float = 0.0, yaw: float = 0.0) -> BoundingBox:
    return BoundingBox(Location(x, y, 0.75), Vector3D(2.4, 0.95, 0.75), Rotation(yaw=yaw))


def left_as_found(simulator: Simulator) -> bool:
    return (
        not simulator.settings.synchronous_mode
        and simulator.settings.fixed_delta_seconds is None
        and not any(manager.synchronous for manager in simulator.traffic_managers.values())
        and not simulator.actors
    )


# Settings and the package


@pytest.mark.parametrize("look", [CarlaSettings().check, import_carla])
def test_without_the_package_the_operator_learns_where_it_exists(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[], object]
):
    monkeypatch.setitem(sys.modules, "carla", None)
    with pytest.raises(SettingsError, match=r"replayfleet\[carla\].*3\.10, 3\.11 and 3\.12 on x86_64 only"):
        look()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fixed_step": 0.2}, "fixed_step is 0.2, expected a number, 0.001 to 0.1"),
        ({"fixed_step": math.nan}, "fixed_step is nan"),
        ({"rate": 15.0}, "1.33333 frames per picture; expected a whole number, for example rate=20"),
        ({"rate": 30.0}, "expected a whole number, for example rate=20"),
        ({"port": 0}, "port is 0, expected a whole number, 1 to 65535"),
        ({"fov": 180.0}, "fov is 180.0, expected a number, 1 to 170"),
        ({"min_visible": 1.5}, "min_visible is 1.5, expected a number, 0 to 1"),
        ({"host": ""}, "host is ''"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message.replace(".", r"\.")):
        CarlaSettings(**values)


def test_a_client_that_only_waits_takes_the_step_of_the_one_that_ticks():
    assert CarlaSettings(tick=False, rate=15.0).frames_per_picture(0.05) == 1
    assert CarlaSettings(rate=10.0).frames_per_picture(0.05) == 2


# Versions, town, vehicle


def test_versions_are_compared_before_anything_else(simulator: Simulator):
    simulator.version = "0.9.15"
    with pytest.raises(CameraError, match=r"the simulator is 0\.9\.15, the package carla 0\.9\.16"), driving() as seen:
        next(seen)
    assert simulator.history == ["version asked"]
    assert left_as_found(simulator)


def test_another_version_is_used_where_the_operator_allows_it(simulator: Simulator):
    simulator.version = "0.9.15"
    with driving(allow_version_mismatch=True) as seen:
        assert next(seen).size == (64, 40)


def test_the_town_is_loaded_and_stands_in_pictures(simulator: Simulator):
    with driving(town="Town03") as seen:
        assert next(seen).place == "Town03"
    assert simulator.town == "Town03"
    assert left_as_found(simulator)
    assert simulator.complaints == []


def test_a_town_that_is_loaded_already_is_not_loaded_again(simulator: Simulator):
    with driving(town="Town10HD_Opt") as seen:
        next(seen)
    assert simulator.episode == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"town": "Town3"}, "unknown town 'Town3'; did you mean 'Town03'"),
        ({"vehicle": "vehicle.lincoln.mkz"}, "unknown vehicle .*did you mean 'vehicle.lincoln.mkz_2020'"),
    ],
)
def test_an_unknown_name_gets_the_nearest(simulator: Simulator, values: dict[str, Any], message: str):
    with pytest.raises(CameraError, match=message), driving(**values) as seen:
        next(seen)
    assert left_as_found(simulator)


def test_a_spot_that_is_taken_is_left_to_whoever_stands_there(simulator: Simulator):
    simulator.spawn_points = [Transform(Location(y=100.0 * lane)) for lane in range(2)]
    other = Client("h", 2000).get_world()
    library = other.get_blueprint_library()
    parked = [other.spawn_actor(library.find("vehicle.yamaha.yzf"), simulator.spawn_points[0])]
    with driving() as seen:
        assert next(seen).frame_id == 0
    parked.append(other.spawn_actor(library.find("vehicle.yamaha.yzf"), simulator.spawn_points[1]))
    with pytest.raises(CameraError, match="all 2 spawn points of Town10HD_Opt are taken"), driving() as seen:
        next(seen)
    assert set(simulator.actors.values()) == set(parked)


# The synchronous loop


def test_the_world_is_synchronous_while_driving_and_as_before_afterwards(simulator: Simulator):
    simulator.settings.no_rendering_mode = True
    simulator.settings.max_substeps = 12
    with driving() as seen:
        next(seen)
        assert simulator.settings.synchronous_mode
        assert simulator.settings.fixed_delta_seconds == 0.02
        assert simulator.traffic_managers[8000].synchronous
        assert simulator.traffic_managers[8000].seed == 0
    assert left_as_found(simulator)
    assert simulator.settings.no_rendering_mode
    assert simulator.settings.max_substeps == 12
    assert simulator.complaints == []


def test_each_picture_is_the_one_of_its_frame_although_sensors_lag_and_interleave(simulator: Simulator):
    simulator.lags = {carla_session.RGB: 1, carla_session.DEPTH: 3}
    simulator.rendering_s = {carla_session.RGB: 0.004}
    with driving() as seen:
        taken = list(islice(seen, 12))
    assert [picture.frame_id for picture in taken] == list(range(12))
    assert np.diff([frame_in(picture) for picture in taken]).tolist() == [1] * 11
    times = [picture.captured_at for picture in taken]
    assert all(after > before for before, after in pairwise(times))
    assert simulator.complaints == []


def test_boxes_are_those_of_the_pictures_own_moment(simulator: Simulator):
    # Ahead of the vehicle (10 m/s, camera 1.5 m before its middle) a car stands at x = 60: its box must be that of the
    # vehicle's place at the picture's frame, and not that of the frame at which the picture arrives, 5 frames later.
    simulator.lags = {carla_session.RGB: 5, carla_session.DEPTH: 5}
    simulator.spawn_points = [Transform()]
    simulator.parked = [car(60.0)]
    with driving(fixed_step=0.1, rate=10.0, min_visible=0.0, min_size_px=1.0, width=640) as seen:
        first = next(seen)
        later = next(islice(seen, 9, None))
    assert (later.frame_id, frame_in(later) - frame_in(first)) == (10, 10)
    widths = [picture.boxes.corners[0, 2] - picture.boxes.corners[0, 0] for picture in (first, later)]
    # The face is 1.9 m wide; between the two pictures lie 10 frames of 1 m.
    distances = [320 * 1.9 / width for width in widths]
    assert distances[0] - distances[1] == pytest.approx(10.0, abs=1e-3)
    travelled = frame_in(first) - 101  # the first frame after the world became synchronous is 102
    assert distances[0] == pytest.approx(60 - 2.4 - 1.5 - travelled, abs=1e-3)


def test_pictures_come_at_the_rate_and_not_with_every_frame(simulator: Simulator):
    with driving(fixed_step=0.01, rate=25.0) as seen:
        taken = list(islice(seen, 4))
    assert [frame_in(picture) % 4 for picture in taken] == [0] * 4
    assert [picture.frame_id for picture in taken] == [0, 1, 2, 3]


def test_simulated_time_never_runs_ahead_of_the_wall(simulator: Simulator):
    began = time.monotonic()
    with driving(fixed_step=0.05, rate=20.0) as seen:
        list(islice(seen, 7))
        num_steps = simulator.frame - 103  # which is the first that it drives
        assert num_steps > 5
        assert time.monotonic() - began >= num_steps * 0.05


def test_a_lost_picture_is_passed_over(simulator: Simulator):
    simulator.lags = {}
    simulator.loses = {(carla_session.DEPTH, frame) for frame in (107, 108)}
    with driving() as seen:
        frames = [frame_in(picture) for picture in islice(seen, 12)]
    assert frames == [frame for frame in range(frames[0], frames[-1] + 1) if frame not in (107, 108)]
    assert frames[0] < 107


def test_a_reader_that_stands_still_makes_the_world_wait_and_nothing_piles_up(simulator: Simulator):
    with driving() as seen:
        before = next(seen)
        standing = simulator.frame
        time.sleep(0.3)
        assert simulator.frame == standing
        assert next(seen).frame_id == before.frame_id + 1


def test_sensors_are_made_once_and_stopped_before_they_are_destroyed(simulator: Simulator):
    with driving() as seen:
        list(islice(seen, 20))
    made = [event for event in simulator.history if event.startswith("made")]
    assert made == ["made sensor.camera.rgb", "made sensor.camera.depth"]
    assert simulator.complaints == []
    assert left_as_found(simulator)


def test_settings_are_put_back_before_actors_are_destroyed(simulator: Simulator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulator, "remove", lambda actor_id: simulator.history.append(f"destroyed {actor_id}"))
    with driving() as seen:
        next(seen)
    end = [event for event in simulator.history if "False" in event or "destroyed" in event]
    assert end[:2] == ["traffic manager synchronous=False", "world synchronous=False"]
    assert len(end) == 5


def test_the_guard_knows_what_to_put_back_before_anything_changes(simulator: Simulator):
    simulator.settings.no_rendering_mode = True
    with driving(num_vehicles=1) as seen:
        next(seen)
        (guard,) = PaperGuard.made
        before = {"synchronous_mode": False, "fixed_delta_seconds": None, "no_rendering_mode": True}
        assert {tuple(duty.settings.items()) for duty in guard.duties} == {tuple(before.items())}
        assert guard.duties[0].actor_ids == ()
        assert set(guard.duties[-1].actor_ids) == set(simulator.actors)
        assert guard.duties[-1].episode == simulator.episode
    assert guard.end == "released"


def test_the_guard_knows_of_each_actor_before_the_next_is_spawned(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
):
    spawn, known = carla_double.World.try_spawn_actor, []

    def looked_at(world: carla_double.World, *what: Any) -> Any:
        known.append(set(PaperGuard.made[-1].duties[-1].actor_ids) == set(simulator.actors))
        return spawn(world, *what)

    monkeypatch.setattr(carla_double.World, "try_spawn_actor", looked_at)
    with driving(num_vehicles=3) as seen:
        next(seen)
    assert known == [True] * 6, "four vehicles and two sensors"


def test_who_only_waits_changes_no_settings_and_its_guard_none_either(simulator: Simulator):
    with driving() as first:
        next(first)
        with contextlib.suppress(CameraError):
            next(camera(tick=False, timeout_s=0.2).pictures(threading.Event()))
        assert [duty.settings for duty in PaperGuard.made[-1].duties] == [None, None]
        assert PaperGuard.made[-1].end != ""
        assert simulator.settings.synchronous_mode
        assert next(first) is not None


def test_one_seed_drives_one_way(simulator: Simulator):
    def places(seed: int) -> list[tuple[str, float]]:
        with driving(num_vehicles=4, seed=seed) as seen:
            next(seen)
            return [(actor.type_id, actor.pose.location.y) for actor in simulator.actors.values() if actor.speed]

    assert len(places(3)) == 5
    assert places(3) == places(3)
    assert places(3) != places(4)


def test_a_full_town_takes_as_many_vehicles_as_it_has_room_for(simulator: Simulator):
    with driving(num_vehicles=50) as seen:
        next(seen)
        assert len([actor for actor in simulator.actors.values() if actor.speed]) == 8
    assert left_as_found(simulator)


# Who ticks


def test_the_world_moves_on_while_much_traffic_is_spawned_so_that_nobody_takes_it_for_left_frozen(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
):
    simulator.spawn_points = [Transform(Location(y=100.0 * lane)) for lane in range(40)]
    spawn, ticks = carla_double.World.try_spawn_actor, []

    def noted(world: carla_double.World, *what: Any) -> Any:
        ticks.append(simulator.num_ticks)
        return spawn(world, *what)

    monkeypatch.setattr(carla_double.World, "try_spawn_actor", noted)
    with driving(num_vehicles=30) as seen:
        next(seen)
    assert max(map(ticks.count, ticks)) <= 10


def test_a_second_vehicle_only_waits_for_ticks(simulator: Simulator):
    stop, taken = threading.Event(), []
    with driving(seed=1) as first:
        next(first)
        waiting = camera(tick=False, timeout_s=5.0)
        thread = threading.Thread(target=lambda: taken.extend(islice(waiting.pictures(stop), 5)))
        thread.start()
        until = time.monotonic() + WAITING_S
        while thread.is_alive() and time.monotonic() < until:
            next(first)
        thread.join(1)
        assert simulator.settings.synchronous_mode
        assert simulator.traffic_managers[8000].synchronous
        assert next(first) is not None
    assert len(taken) == 5
    assert len({frame_in(picture) for picture in taken}) == 5
    assert [picture.frame_id for picture in taken] == sorted({picture.frame_id for picture in taken})
    assert simulator.complaints == []
    assert left_as_found(simulator)


@pytest.mark.parametrize(("rate", "nearest"), [(20.0, "25"), (25.0, None), (1000.0, "50"), (10.0, None)])
def test_who_only_waits_is_told_where_the_step_has_no_such_rate(
    simulator: Simulator, caplog: pytest.LogCaptureFixture, rate: float, nearest: str | None
):
    simulator.settings.synchronous_mode, simulator.settings.fixed_delta_seconds = True, 0.02
    with pytest.raises(CameraError, match="time-out"), driving(tick=False, rate=rate, timeout_s=0.1) as seen:
        next(seen)
    told = [record.fields["nearest"] for record in caplog.records if "carla rate" in record.message]
    assert told == [nearest] * (nearest is not None)


def test_who_only_waits_needs_somebody_who_ticks(simulator: Simulator):
    with pytest.raises(CameraError, match="no client ticks this simulator"), driving(tick=False) as seen:
        next(seen)
    assert simulator.history == ["version asked", "world asked"]


def test_who_only_waits_does_not_choose_the_town(simulator: Simulator):
    with driving() as first:
        next(first)
        with pytest.raises(CameraError, match="the town is Town10HD_Opt, expected Town03"):
            next(camera(tick=False, town="Town03").pictures(threading.Event()))


def test_who_waits_notices_when_the_ticking_client_is_gone(simulator: Simulator):
    found: list[CameraError] = []

    def wait() -> None:
        with pytest.raises(CameraError, match="the client that ticks is gone") as caught:
            list(camera(tick=False, timeout_s=5.0).pictures(threading.Event()))
        found.append(caught.value)

    with driving(fixed_step=0.025, rate=40.0) as first:
        next(first)
        thread = threading.Thread(target=wait)
        thread.start()
        until = time.monotonic() + WAITING_S
        while len(simulator.actors) < 6 and time.monotonic() < until:
            next(first)
    thread.join(WAITING_S)
    assert len(found) == 1


def test_a_second_ticking_client_is_turned_away(simulator: Simulator):
    with driving() as first:
        next(first)
        stop = threading.Event()
        thread = threading.Thread(target=lambda: [next(first) for _ in iter(stop.is_set, True)])
        thread.start()
        try:
            with pytest.raises(CameraError, match="another client ticks this simulator, exactly one may"):
                next(camera().pictures(threading.Event()))
        finally:
            stop.set()
            thread.join(WAITING_S)
        assert simulator.settings.synchronous_mode
        assert next(first) is not None


def test_foreign_ticks_while_driving_are_noticed(simulator: Simulator):
    def drive() -> None:
        with driving() as seen:
            for _ in seen:
                Client("h", 2000).get_world().tick()

    with pytest.raises(CameraError, match="another client ticks this simulator, too"):
        drive()
    assert left_as_found(simulator)


def test_a_picture_gets_no_boxes_of_another_moment(simulator: Simulator, monkeypatch: pytest.MonkeyPatch):
    look, looks = carla_double.World.get_snapshot, []

    def look_late_once(world: carla_double.World) -> carla_double.Snapshot:
        looks.append(simulator.frame)
        if len(looks) == 4:
            simulator.advance()
        return look(world)

    monkeypatch.setattr(carla_double.World, "get_snapshot", look_late_once)
    with driving() as seen:
        frames = [frame_in(picture) for picture in islice(seen, 6)]
    assert looks[3] not in frames
    assert frames[:2] == looks[1:3]
    assert frames[-1] > looks[3]


def test_a_server_that_a_dead_client_left_frozen_is_taken_over_and_set_free(simulator: Simulator):
    simulator.settings.synchronous_mode = True
    simulator.settings.fixed_delta_seconds = 0.05
    with driving(town="Town01") as seen:
        next(seen)
    assert left_as_found(simulator)
    assert simulator.complaints == []


# Faults


def test_a_server_that_is_gone_is_an_error_within_the_time_out(simulator: Simulator):
    simulator.gone = True
    began = time.monotonic()
    with pytest.raises(CameraError, match="time-out of 300ms"), driving(timeout_s=0.3) as seen:
        next(seen)
    assert time.monotonic() - began < 30


def test_a_server_that_freezes_is_an_error_within_bounded_time_and_comes_back(simulator: Simulator):
    pictures = camera(timeout_s=0.3).pictures(threading.Event())
    next(pictures)
    simulator.frozen = True
    began = time.monotonic()
    with pytest.raises(CameraError, match="time-out of 300ms"):
        list(pictures)
    assert time.monotonic() - began < 30
    assert PaperGuard.made[-1].end == "abandoned"
    simulator.frozen = False
    with driving() as again:
        assert next(again).size == (64, 40)


def test_sensors_that_deliver_nothing_are_an_error_that_names_them(simulator: Simulator):
    simulator.lags = {carla_session.DEPTH: 10**6}
    began = time.monotonic()
    with pytest.raises(CameraError, match=r"sensor\.camera\.depth delivered nothing for frame \d+"):
        list(camera(timeout_s=0.4).pictures(threading.Event()))
    assert time.monotonic() - began < 30
    assert left_as_found(simulator)


def test_an_actor_destroyed_by_others_is_an_error_and_settings_are_put_back(simulator: Simulator):
    with driving() as seen:
        next(seen)
        simulator.actors.clear()
        with pytest.raises(CameraError):
            list(seen)
    assert not simulator.settings.synchronous_mode


def test_an_exception_in_the_reader_puts_everything_back(simulator: Simulator):
    with contextlib.suppress(ZeroDivisionError), driving(num_vehicles=2) as seen:
        next(seen)
        assert simulator.settings.synchronous_mode
        raise ZeroDivisionError
    assert left_as_found(simulator)


@pytest.mark.parametrize("call", ["get_trafficmanager", "get_available_maps"])
def test_an_exception_while_opening_puts_everything_back(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, call: str
):
    monkeypatch.setattr(carla_double.Client, call, Mock(side_effect=RuntimeError("failed in the middle")))
    with pytest.raises(CameraError, match="failed in the middle"), driving(town="Town03") as seen:
        next(seen)
    assert left_as_found(simulator)


def test_stopping_ends_the_drive_and_puts_everything_back(simulator: Simulator):
    stop = threading.Event()
    taken = []
    for picture in camera().pictures(stop):
        taken.append(picture)
        if len(taken) == 3:
            stop.set()
    assert len(taken) == 3
    assert left_as_found(simulator)


# Boxes, end to end with rendered depth


def test_lights_signs_and_vehicles_get_their_classes_and_hidden_ones_get_none(simulator: Simulator):
    simulator.spawn_points = [Transform(), Transform(Location(x=25.0, y=-6.0))]
    simulator.parked = [car(20.0, y=6.0)]
    simulator.lights = [BoundingBox(Location(15.0, -3.0, 4.0), Vector3D(0.2, 0.3, 0.6))]
    simulator.signs = [BoundingBox(Location(15.0, 3.0, 2.5), Vector3D(0.1, 0.5, 0.5))]
    shown = {"fixed_step": 0.001, "rate": 1000.0, "width": 160, "height": 96, "mount_z": 2.0}
    with driving(**shown) as seen:
        open_view = next(seen)
    names = [CLASS_NAMES[class_id] for class_id in open_view.boxes.class_ids]
    assert sorted(names) == ["traffic_light", "traffic_sign", "vehicle"]
    simulator.walls = [BoundingBox(Location(10.0, 4.0, 2.0), Vector3D(0.1, 3.0, 3.0))]
    with driving(**shown) as seen:
        behind_wall = next(seen)
    assert [CLASS_NAMES[class_id] for class_id in behind_wall.boxes.class_ids] == ["traffic_light"]
    with driving(**shown, min_visible=0.0) as seen:
        assert len(next(seen).boxes) == 3
        assert [each for each in simulator.history if each.startswith("made")][-1] == "made sensor.camera.rgb"


def test_another_vehicle_that_drives_ahead_is_seen_and_the_own_one_never(simulator: Simulator):
    simulator.spawn_points = [Transform()]
    other = Client("h", 2000).get_world()
    bike = other.spawn_actor(
        other.get_blueprint_library().find("vehicle.bh.crossbike"), Transform(Location(x=12.0), Rotation(yaw=90))
    )
    bike.bounding_box = BoundingBox(Location(), Vector3D(0.0, 0.0, 0.8))  # CARLA issue 5841
    with driving(min_visible=0.0, fixed_step=0.001, rate=1000.0, width=640, height=380) as seen:
        boxes = next(seen).boxes
    assert [CLASS_NAMES[class_id] for class_id in boxes.class_ids] == ["bike"]
    left, _, right, _ = boxes.corners[0]
    # 1.8 m long, seen from the side, 0.35 m nearer than its middle.
    assert right - left == pytest.approx(320 * 1.8 / (12 - 1.5 - 0.35), rel=0.02)


@pytest.mark.parametrize(
    ("type_id", "attributes", "name"),
    [
        ("vehicle.x", {"base_type": "car"}, "vehicle"),
        ("vehicle.x", {"base_type": "Motorcycle"}, "motobike"),
        ("vehicle.x", {"base_type": "bicycle"}, "bike"),
        ("vehicle.x", {"base_type": "van"}, "vehicle"),
        ("vehicle.gazelle.omafiets", {"number_of_wheels": "2"}, "bike"),
        ("vehicle.kawasaki.ninja", {"number_of_wheels": "2"}, "motobike"),
        ("vehicle.x", {"number_of_wheels": "4"}, "vehicle"),
        ("vehicle.x", {}, "vehicle"),
    ],
)
def test_blueprints_have_the_recorded_sets_classes(type_id: str, attributes: dict[str, str], name: str):
    assert vehicle_class(type_id, attributes) == name


def test_pixels_are_rgb_and_depth_is_in_metres():
    bgra = np.zeros((2, 3, 4), np.uint8)
    bgra[...] = 1, 2, 3, 255
    image = carla_double.Image(7, Transform(), bgra, 90.0)
    assert rgb(image)[1, 2].tolist() == [3, 2, 1]
    assert metres(image)[0, 0] == pytest.approx(1000 * (3 + 2 * 256 + 65536) / (256**3 - 1))

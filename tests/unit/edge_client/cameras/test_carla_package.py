"""What the stand-in and the camera take for granted of CARLA's real package; skipped where it isn't installed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from support import carla_double

from replayfleet.edge_client.cameras.carla.drive import CarlaDrive
from replayfleet.edge_client.cameras.carla.guard import FIELDS, put_back, saved
from replayfleet.edge_client.cameras.carla.scene import _LEVEL_LABELS, _PARKED_LABELS
from replayfleet.edge_client.cameras.carla.settings import CarlaSettings
from replayfleet.edge_client.flow import CameraError

carla = pytest.importorskip("carla", reason="CARLA's package isn't installed (replayfleet[carla])")


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A server that takes connections and says nothing."""
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("Client", "set_timeout get_client_version get_server_version get_world get_available_maps load_world"),
        ("Client", "get_trafficmanager apply_batch"),
        ("World", "id get_settings apply_settings tick wait_for_tick get_snapshot get_map get_blueprint_library"),
        ("World", "get_actors try_spawn_actor spawn_actor get_level_bbs get_environment_objects"),
        ("TrafficManager", "set_synchronous_mode set_random_device_seed"),
        ("Sensor", "id listen stop destroy"),
        ("Vehicle", "id type_id attributes bounding_box set_autopilot destroy"),
        ("WorldSnapshot", "frame timestamp find"),
        ("Timestamp", "delta_seconds"),
        ("ActorSnapshot", "get_transform"),
        ("Image", "frame width height raw_data transform"),
        ("Map", "name get_spawn_points"),
        ("BlueprintLibrary", "filter find"),
        ("ActorBlueprint", "id has_attribute set_attribute"),
        ("EnvironmentObject", "bounding_box"),
        ("BoundingBox", "location extent rotation"),
    ],
)
def test_everything_that_is_used_exists(kind: str, members: str):
    assert set(members.split()) <= set(dir(getattr(carla, kind)))


def test_world_settings_have_what_is_changed_and_no_fixed_step_is_none():
    settings = carla.WorldSettings()
    assert saved(settings) == {"synchronous_mode": False, "fixed_delta_seconds": None, "no_rendering_mode": False}
    world = SimpleNamespace(get_settings=lambda: settings, apply_settings=lambda _: 1)
    put_back(world, {"synchronous_mode": True, "fixed_delta_seconds": 0.05, "no_rendering_mode": True})
    assert [getattr(settings, field) for field in FIELDS] == [True, 0.05, True]
    put_back(world, {"synchronous_mode": False, "fixed_delta_seconds": None, "no_rendering_mode": False})
    assert settings.fixed_delta_seconds is None


def test_labels_exist():
    for label in (*_LEVEL_LABELS, *_PARKED_LABELS):
        assert hasattr(carla.CityObjectLabel, label)


def test_the_stand_ins_transforms_are_carlas():
    rng = np.random.default_rng(3)
    for x, y, z, pitch, yaw, roll in rng.uniform(-170, 170, size=(20, 6)):
        theirs = carla.Transform(carla.Location(x=x, y=y, z=z), carla.Rotation(pitch=pitch, yaw=yaw, roll=roll))
        ours = carla_double.Transform(carla_double.Location(x, y, z), carla_double.Rotation(pitch, yaw, roll))
        for method in ("get_matrix", "get_inverse_matrix"):
            assert np.array(getattr(theirs, method)()) == pytest.approx(np.array(getattr(ours, method)()), abs=1e-3)


def test_commands_take_ids():
    assert carla.command.DestroyActor(7) is not None


def test_a_simulator_that_says_nothing_is_an_error_within_the_time_out(mute_port: int):
    drive = CarlaDrive(carla, CarlaSettings(host="127.0.0.1", port=mute_port, timeout_s=0.5), "front")
    began = time.monotonic()
    with pytest.raises(CameraError, match="time-out of 500ms while waiting for the simulator"):
        list(drive.pictures(threading.Event()))
    assert time.monotonic() - began < 60


def test_time_outs_of_the_stand_in_read_like_carlas(mute_port: int):
    simulator = carla_double.Simulator(mute_port)
    simulator.gone = True
    messages = []
    for package in (carla, carla_double):
        client = package.Client("127.0.0.1", mute_port)
        client.set_timeout(0.2)
        with pytest.raises(RuntimeError) as caught:
            client.get_server_version()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    del carla_double.Simulator.running[mute_port]

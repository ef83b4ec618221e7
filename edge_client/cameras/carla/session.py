"""One stay of one vehicle in one CARLA world: come, tick or wait, and leave everything as it was.

Facts and their sources: Docs/adv_synchrony_timestep.md, Docs/adv_traffic_manager.md, Docs/ref_sensors.md and the
Python API reference of CARLA 0.9.16.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfleet.edge_client.cameras.carla.boxes import Solids
from replayfleet.edge_client.cameras.carla.frames import FrameMatcher
from replayfleet.edge_client.cameras.carla.guard import Duty, Guard, put_back, saved, somebody_ticks
from replayfleet.edge_client.cameras.carla.scene import Scene
from replayfleet.edge_client.cameras.carla.settings import LOAD_TOWN_S, CarlaSettings
from replayfleet.edge_client.flow import CameraError
from replayfleet.federation.errors import nearest
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

RGB, DEPTH = "sensor.camera.rgb", "sensor.camera.depth"

_TICK_PROBE_S = 2.0
_GOODBYE_S = 3.0
"""Longest wait for one answer of a simulator that has failed already."""

_FOREIGN_TICKS_ALLOWED = 3
_VEHICLES_PER_TICK = 8
_STEP_TOLERANCE_S = 1e-3
_RATE_TOLERANCE = 1e-3  # steps are float32 in places


@dataclass(frozen=True, slots=True)
class Moment:
    """One frame of the simulation.

    Attributes:
        frame: its number.
        at: time of the clock at which the simulator had computed it.
        solids: what stood where; None where no picture of it is wanted.
    """

    frame: int
    at: float
    solids: Solids | None


class CarlaSession:
    """All methods are called one at a time, and speak to the simulator.

    Args:
        carla: the package.
        settings: the operator's.
    """

    def __init__(self, carla: Any, settings: CarlaSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._carla = carla
        self._settings = settings
        self._clock = clock
        self._sensors: list[Any] = []
        self._vehicles: list[Any] = []
        self._before: dict[str, Any] | None = None
        self._traffic_manager: Any = None
        self._guard: Guard | None = None
        self._frame: int | None = None
        self._foreign_ticks = 0
        self.failed = False
        self.town = ""
        self.fixed_step_s = settings.fixed_step
        sensors = (RGB, DEPTH) if settings.min_visible > 0 else (RGB,)
        self.frames = FrameMatcher(sensors, clock)

    def open(self) -> None:
        """Connect, check versions, prepare the world, spawn vehicle and sensors.

        Raises:
            CameraError: The simulator isn't what the settings expect.
            RuntimeError: It doesn't answer; ``close`` still has to be called.
        """
        settings = self._settings
        self._client = self._carla.Client(settings.host, settings.port)
        self._client.set_timeout(settings.timeout_s)
        self._check_versions()
        self._guard = Guard()
        self._world = self._client.get_world()
        if settings.tick:
            self._take_over()
        else:
            self._join()
        self._spawn_vehicles()
        self._next_frame()  # sensors are made only on a server that moves on: each one made costs it something
        self._scene = Scene(self._carla, self._world, self._vehicles[0].id)
        self._spawn_sensors()

    def step(self) -> Moment:
        """Move on by one frame, or wait until another client does.

        Raises:
            CameraError: Somebody else ticks, too; or, while waiting, nobody does any more.
            RuntimeError: The simulator doesn't answer within ``timeout_s``.
        """
        frame, snapshot = self._next_frame()
        at = self._clock()
        due = frame % self._settings.frames_per_picture(self.fixed_step_s) == 0
        wanted = (
            due and snapshot.frame == frame
        )  # else somebody ticked in between, and boxes would be of another moment
        return Moment(frame, at, self._scene.at(snapshot) if wanted else None)

    def close(self) -> None:
        """Put everything back; what can't be reached is left to the guard. Idempotent."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        if self.failed:
            self._client.set_timeout(min(_GOODBYE_S, self._settings.timeout_s))
        try:
            self._put_everything_back()
        except RuntimeError as error:
            guard.abandon()
            log.warning("carla session left to its guard", server=self._settings.place, reason=error)
        else:
            guard.release()
            log.info("carla session closed", server=self._settings.place, town=self.town)

    def _check_versions(self) -> None:
        ours, theirs = self._client.get_client_version(), self._client.get_server_version()
        if ours == theirs:
            return
        if not self._settings.allow_version_mismatch:
            raise CameraError(
                f"carla {self._settings.place}: the simulator is {theirs}, the package carla {ours}; expected equal "
                f"versions, others may crash this process (pip install carla=={theirs}, or allow_version_mismatch=true)"
            )
        log.warning("carla versions differ", server=self._settings.place, simulator=theirs, package=ours)

    def _take_over(self) -> None:
        """Make the world synchronous, with this client as the one that ticks."""
        settings, world = self._settings, self._world
        found = world.get_settings()
        before = saved(found)
        if found.synchronous_mode:
            if somebody_ticks(world, min(_TICK_PROBE_S, settings.timeout_s)):
                raise CameraError(
                    f"carla {settings.place}: another client ticks this simulator, exactly one may; "
                    "expected tick=false on all others"
                )
            log.warning("carla simulator was left frozen by a client that is gone", server=settings.place)
            before |= {"synchronous_mode": False, "fixed_delta_seconds": None}
            put_back(world, before)
        self._load_town()
        self._before = before
        self._promise()
        self._traffic_manager = self._client.get_trafficmanager(settings.tm_port)
        self._traffic_manager.set_random_device_seed(settings.seed)
        self._traffic_manager.set_synchronous_mode(True)
        put_back(
            self._world,
            {"synchronous_mode": True, "fixed_delta_seconds": settings.fixed_step, "no_rendering_mode": False},
        )

    def _join(self) -> None:
        """Check that a client ticks this world as this camera expects."""
        settings = self._settings
        found = self._world.get_settings()
        if not (found.synchronous_mode and found.fixed_delta_seconds):
            raise CameraError(
                f"carla {settings.place}: no client ticks this simulator; tick=false expects one that does (tick=true)"
            )
        if found.no_rendering_mode:
            raise CameraError(f"carla {settings.place}: the simulator renders nothing (no_rendering_mode)")
        self.fixed_step_s = float(found.fixed_delta_seconds)
        rate = 1 / (settings.frames_per_picture(self.fixed_step_s) * self.fixed_step_s)
        if not abs(rate - settings.rate) <= _RATE_TOLERANCE * settings.rate:
            log.warning("carla rate isn't to be had", server=settings.place, asked=settings.rate, nearest=f"{rate:g}")
        self.town = _town(self._world.get_map().name)
        if settings.town not in ("", self.town):
            raise CameraError(
                f"carla {settings.place}: the town is {self.town}, expected {settings.town}; the ticking client chooses"
            )
        self._promise()

    def _load_town(self) -> None:
        wanted = self._settings.town
        self.town = _town(self._world.get_map().name)
        if wanted in ("", self.town):
            return
        towns = {_town(name): name for name in self._client.get_available_maps()}
        if wanted not in towns:
            raise CameraError(f"carla {self._settings.place}: unknown town {wanted!r}{nearest(wanted, towns)}")
        self._client.set_timeout(LOAD_TOWN_S)
        self._world = self._client.load_world(wanted, reset_settings=False)
        self._client.set_timeout(self._settings.timeout_s)
        self.town = wanted

    def _spawn_vehicles(self) -> None:
        """The camera's own vehicle, then traffic; all drive by themselves."""
        settings = self._settings
        library = self._world.get_blueprint_library()
        models = {blueprint.id: blueprint for blueprint in library.filter("vehicle.*")}
        if settings.vehicle not in models:
            raise CameraError(
                f"carla {settings.place}: unknown vehicle {settings.vehicle!r}{nearest(settings.vehicle, models)}"
            )
        rng = np.random.default_rng(settings.seed)
        points = self._world.get_map().get_spawn_points()
        places = iter([points[index] for index in rng.permutation(len(points))])
        own = models[settings.vehicle]
        if own.has_attribute("role_name"):
            own.set_attribute("role_name", "hero")
        if not self._spawn_on(own, places):
            raise CameraError(f"carla {settings.place}: all {len(points)} spawn points of {self.town} are taken")
        names = sorted(models)
        for count, index in enumerate(rng.integers(len(names), size=settings.num_vehicles), 1):
            if not self._spawn_on(models[names[index]], places):
                log.warning("carla town is full", server=settings.place, vehicles=len(self._vehicles) - 1)
                break
            if settings.tick and count % _VEHICLES_PER_TICK == 0:
                self._next_frame()  # whoever sees no tick for _TICK_PROBE_S takes the world for left frozen
        for vehicle in self._vehicles:
            vehicle.set_autopilot(True, settings.tm_port)

    def _spawn_on(self, blueprint: Any, places: Iterator[Any]) -> bool:
        for place in places:
            vehicle = self._world.try_spawn_actor(blueprint, place)
            if vehicle is not None:
                self._vehicles.append(vehicle)
                self._promise()
                return True
        return False

    def _spawn_sensors(self) -> None:
        """Once per session; all look along the same axis, so that their pixels match."""
        carla, settings = self._carla, self._settings
        mount = carla.Transform(carla.Location(x=settings.mount_x, z=settings.mount_z))
        library = self._world.get_blueprint_library()
        values = {"image_size_x": settings.width, "image_size_y": settings.height, "fov": settings.fov}
        for kind in self.frames.sensors:
            blueprint = library.find(kind)
            for key, value in values.items():
                blueprint.set_attribute(key, str(value))
            sensor = self._world.spawn_actor(blueprint, mount, attach_to=self._vehicles[0])
            self._sensors.append(sensor)
            self._promise()
            sensor.listen(self.frames.receiver(kind))

    def _next_frame(self) -> tuple[int, Any]:
        timeout_s = self._settings.timeout_s
        if not self._settings.tick:
            snapshot = self._world.wait_for_tick(timeout_s)
            if not abs(snapshot.timestamp.delta_seconds - self.fixed_step_s) <= _STEP_TOLERANCE_S:
                raise CameraError(f"carla {self._settings.place}: the client that ticks is gone, or changed its step")
            return int(snapshot.frame), snapshot
        frame = int(self._world.tick(timeout_s))
        snapshot = self._world.get_snapshot()
        self._foreign_ticks += int(self._frame not in (None, frame - 1))
        self._frame = frame
        if self._foreign_ticks > _FOREIGN_TICKS_ALLOWED:
            raise CameraError(f"carla {self._settings.place}: another client ticks this simulator, too")
        return frame, snapshot

    def _promise(self) -> None:
        """Keep the guard informed of what there is to put back."""
        assert self._guard is not None
        settings = self._settings
        actor_ids = tuple(int(actor.id) for actor in (*self._sensors, *self._vehicles))
        self._guard.promise(Duty(settings.host, settings.port, int(self._world.id), self._before, actor_ids))

    def _put_everything_back(self) -> None:
        """Settings before actors: a server that waits for a tick is the worse legacy."""
        for sensor in self._sensors:
            with contextlib.suppress(RuntimeError):  # destroyed by others; nothing is asked of the simulator
                sensor.stop()
        try:
            if self._traffic_manager is not None:
                self._traffic_manager.set_synchronous_mode(False)
        finally:
            if self._before is not None:
                put_back(self._world, self._before)
        for actor in (*self._sensors, *self._vehicles):
            actor.destroy()


def _town(map_name: str) -> str:
    """``Carla/Maps/Town03`` or ``Town03`` -> ``Town03``."""
    return map_name.rsplit("/", 1)[-1]

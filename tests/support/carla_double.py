"""A stand-in for CARLA's Python package and, behind it, a simulator; tests put it into ``sys.modules["carla"]``.

It follows what CARLA 0.9.16 documents, not its code: ``tick`` returns the frame that it started; camera data lag a
couple of frames and come on a thread per sensor, so that sensors interleave; a synchronous server stands still until
somebody ticks; every answer has a time-out, which is a RuntimeError; actors can't be used once they are destroyed, and
stay when their client is gone. What the documentation forbids (a synchronous world with a variable step, a traffic
manager that isn't synchronous, destroying a sensor that listens, ...) is written down in ``Simulator.complaints``.

With ``$CARLA_DOUBLE_STATE`` the few things that outlive a client live in that file, so that several processes see them;
``$CARLA_DOUBLE_FAULT`` names what goes wrong with a process's tenth tick: ``deadlock``, ``crash`` or ``freeze``.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import math
import os
import queue
import signal
import threading
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

PACKAGE_VERSION = "0.9.16"
FAR_M = 1000.0


class Vector3D:
    def __init__(self, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> None:
        self.x, self.y, self.z = x, y, z


class Location(Vector3D):
    def distance(self, other: Vector3D) -> float:
        return math.dist((self.x, self.y, self.z), (other.x, other.y, other.z))


class Rotation:
    def __init__(self, pitch: float = 0.0, yaw: float = 0.0, roll: float = 0.0) -> None:
        self.pitch, self.yaw, self.roll = pitch, yaw, roll


class Transform:
    """Unreal's axes: x forward, y right, z up; yaw turns to the right, pitch up."""

    def __init__(self, location: Location | None = None, rotation: Rotation | None = None) -> None:
        self.location = location or Location()
        self.rotation = rotation or Rotation()

    def get_matrix(self) -> list[list[float]]:
        (sp, cp), (sy, cy), (sr, cr) = (
            (math.sin(math.radians(angle)), math.cos(math.radians(angle)))
            for angle in (self.rotation.pitch, self.rotation.yaw, self.rotation.roll)
        )
        yaw = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
        pitch = np.array([[cp, 0, -sp], [0, 1, 0], [sp, 0, cp]])
        roll = np.array([[1, 0, 0], [0, cr, sr], [0, -sr, cr]])
        matrix = np.eye(4)
        matrix[:3, :3] = yaw @ pitch @ roll
        matrix[:3, 3] = self.location.x, self.location.y, self.location.z
        return matrix.tolist()

    def get_inverse_matrix(self) -> list[list[float]]:
        return np.linalg.inv(np.array(self.get_matrix())).tolist()


class BoundingBox:
    def __init__(self, location: Location, extent: Vector3D, rotation: Rotation | None = None) -> None:
        self.location, self.extent, self.rotation = location, extent, rotation or Rotation()


class EnvironmentObject:
    def __init__(self, identity: int, bounding_box: BoundingBox) -> None:
        self.id, self.bounding_box = identity, bounding_box


CityObjectLabel = types.SimpleNamespace(
    TrafficLight="TrafficLight",
    TrafficSigns="TrafficSigns",
    Car="Car",
    Truck="Truck",
    Bus="Bus",
    Motorcycle="Motorcycle",
    Bicycle="Bicycle",
)


class _DestroyActor:
    def __init__(self, actor_id: int) -> None:
        self.actor_id = actor_id


command = types.SimpleNamespace(DestroyActor=_DestroyActor)


class WorldSettings:
    def __init__(self) -> None:
        self.synchronous_mode = False
        self.no_rendering_mode = False
        self.fixed_delta_seconds: float | None = None
        self.substepping = True
        self.max_substep_delta_time = 0.01
        self.max_substeps = 10


class ActorBlueprint:
    def __init__(self, identity: str, **attributes: str) -> None:
        self.id = identity
        self.attributes = attributes

    def has_attribute(self, key: str) -> bool:
        return key in self.attributes

    def set_attribute(self, key: str, value: str) -> None:
        if key not in self.attributes:
            raise IndexError(f"blueprint {self.id!r} doesn't have attribute {key!r}")
        if not isinstance(value, str):
            raise TypeError("attributes are strings")
        self.attributes[key] = value


class BlueprintLibrary(list[ActorBlueprint]):
    def filter(self, pattern: str) -> BlueprintLibrary:
        return BlueprintLibrary(blueprint for blueprint in self if fnmatch.fnmatch(blueprint.id, pattern))

    def find(self, identity: str) -> ActorBlueprint:
        for blueprint in self:
            if blueprint.id == identity:
                return blueprint
        raise IndexError(f"blueprint {identity!r} not found")


def _library() -> BlueprintLibrary:
    car = {"role_name": "autopilot", "number_of_wheels": "4", "base_type": "car"}
    bike = {"role_name": "autopilot", "number_of_wheels": "2"}
    camera = {"image_size_x": "800", "image_size_y": "600", "fov": "90.0", "sensor_tick": "0.0"}
    return BlueprintLibrary(
        [
            ActorBlueprint("vehicle.lincoln.mkz_2020", **car),
            ActorBlueprint("vehicle.carlamotors.firetruck", **{**car, "base_type": "truck"}),
            ActorBlueprint("vehicle.yamaha.yzf", **bike, base_type="motorcycle"),
            ActorBlueprint("vehicle.bh.crossbike", **bike, base_type="bicycle"),
            ActorBlueprint("walker.pedestrian.0001", role_name="pedestrian"),
            ActorBlueprint("sensor.camera.rgb", **camera, lens_k="-1.0"),
            ActorBlueprint("sensor.camera.depth", **camera),
        ]
    )


class ActorList(list["Actor"]):
    def filter(self, pattern: str) -> ActorList:
        return ActorList(actor for actor in self if fnmatch.fnmatch(actor.type_id, pattern))


class Actor:
    def __init__(self, simulator: Simulator, client: Client, blueprint: ActorBlueprint, pose: Transform) -> None:
        self._simulator, self._client = simulator, client
        self.id = simulator.new_id()
        self.type_id = blueprint.id
        self.attributes = dict(blueprint.attributes)
        self.pose = copy.deepcopy(pose)
        self.speed = 0.0
        self.is_alive = True
        self.bounding_box = BoundingBox(Location(z=0.75), Vector3D(2.4, 0.95, 0.75))

    def get_transform(self) -> Transform:
        self._use()
        return copy.deepcopy(self.pose)

    def set_autopilot(self, enabled: bool = True, tm_port: int = 8000) -> None:
        self._use()
        self._client.answer()
        self.speed = 10.0 if enabled else 0.0
        self._simulator.driven_by[self.id] = tm_port

    def destroy(self) -> bool:
        if not self.is_alive:
            return False
        self._client.answer()
        if getattr(self, "is_listening", False):
            self._simulator.complaints.append(f"{self.type_id} destroyed while it listens")
        self.is_alive = False
        self._simulator.remove(self.id)
        return True

    def _use(self) -> None:
        if not self.is_alive or self.id not in self._simulator.actors:
            raise RuntimeError(
                "trying to operate on a destroyed actor; an actor's function was called, but the actor is already "
                "destroyed."
            )


class Image:
    """BGRA. The blue and green of an RGB picture are its frame's number."""

    def __init__(self, frame: int, transform: Transform, bgra: np.ndarray, fov: float) -> None:
        self.frame, self.transform, self.fov = frame, transform, fov
        self.height, self.width = bgra.shape[:2]
        self.raw_data = bgra.tobytes()


class Sensor(Actor):
    def __init__(self, simulator: Simulator, client: Client, blueprint: ActorBlueprint, pose: Transform) -> None:
        super().__init__(simulator, client, blueprint, pose)
        self.parent: Actor | None = None
        self.is_listening = False
        self._due: queue.Queue[Any] = queue.Queue()

    def listen(self, callback: Any) -> None:
        self._use()
        self.is_listening = True
        threading.Thread(target=self._deliver, args=(callback,), daemon=True).start()

    def stop(self) -> None:
        self._use()
        if not self.is_listening:
            self._simulator.complaints.append(f"{self.type_id} stopped, but it wasn't listening")
        self.is_listening = False
        self._due.put(None)

    def expose(self, frame: int, scene: list[tuple[Transform, BoundingBox]]) -> None:
        """Keep what is in front of the sensor at this frame; it is rendered and sent later."""
        matrix = np.array(self.parent.pose.get_matrix()) @ np.array(self.pose.get_matrix())
        x, y, z = matrix[:3, 3]
        yaw = self.parent.pose.rotation.yaw
        self._due.put((frame, Transform(Location(x, y, z), Rotation(yaw=yaw)), scene))

    def _deliver(self, callback: Any) -> None:
        lag = self._simulator.lags.get(self.type_id, 0)
        while (shot := self._due.get()) is not None:
            frame, pose, scene = shot
            while self.is_listening and self._simulator.frame < frame + lag:
                time.sleep(0.001)
            time.sleep(self._simulator.rendering_s.get(self.type_id, 0.0))
            if self.is_listening and (self.type_id, frame) not in self._simulator.loses:
                callback(self._render(frame, pose, scene))

    def _render(self, frame: int, pose: Transform, scene: list[tuple[Transform, BoundingBox]]) -> Image:
        width, height = int(self.attributes["image_size_x"]), int(self.attributes["image_size_y"])
        fov = float(self.attributes["fov"])
        bgra = np.zeros((height, width, 4), np.uint8)
        if self.type_id == "sensor.camera.rgb":
            bgra[:] = frame % 256, frame // 256 % 256, 200, 255
        else:
            code = np.round(_depth(pose, scene, width, height, fov) / FAR_M * (256**3 - 1)).astype(np.int64)
            bgra[..., 0], bgra[..., 1], bgra[..., 2] = code // 65536, code // 256 % 256, code % 256
        return Image(frame, pose, bgra, fov)


def _depth(
    pose: Transform, scene: list[tuple[Transform, BoundingBox]], width: int, height: int, fov: float
) -> np.ndarray:
    """Metres along the camera's axis to the nearest box, by walking every pixel's ray into every box's own axes."""
    focal = width / 2 / math.tan(math.radians(fov) / 2)
    across, down = np.meshgrid(np.arange(width) + 0.5 - width / 2, np.arange(height) + 0.5 - height / 2)
    rays = np.stack([np.ones_like(across), across / focal, -down / focal], axis=-1)  # x is depth
    camera = np.array(pose.get_matrix())
    nearest = np.full((height, width), FAR_M)
    for base, box in scene:
        own = np.array(base.get_matrix()) @ np.array(Transform(box.location, box.rotation).get_matrix())
        back = np.linalg.inv(own)
        start = (back @ camera[:, 3])[:3]
        slope = rays @ (back[:3, :3] @ camera[:3, :3]).T
        half = np.array([box.extent.x, box.extent.y, box.extent.z])
        with np.errstate(divide="ignore", invalid="ignore"):
            one, two = (half - start) / slope, (-half - start) / slope
        enters = np.nanmax(np.minimum(one, two), axis=-1)
        leaves = np.nanmin(np.maximum(one, two), axis=-1)
        hit = (enters <= leaves) & (enters > 0)
        nearest = np.where(hit & (enters < nearest), enters, nearest)
    return nearest


class Snapshot:
    def __init__(self, frame: int, delta_seconds: float, poses: dict[int, Transform]) -> None:
        self.frame = frame
        self.timestamp = types.SimpleNamespace(frame=frame, delta_seconds=delta_seconds)
        self._poses = poses

    def find(self, actor_id: int) -> Any:
        pose = self._poses.get(actor_id)
        return None if pose is None else types.SimpleNamespace(id=actor_id, get_transform=lambda: pose)


class TrafficManager:
    def __init__(self, simulator: Simulator, port: int) -> None:
        self._simulator, self._port = simulator, port
        self.synchronous = False
        self.seed: int | None = None

    def set_synchronous_mode(self, mode: bool) -> None:
        self.synchronous = mode
        self._simulator.history.append(f"traffic manager synchronous={mode}")

    def set_random_device_seed(self, value: int) -> None:
        self.seed = value

    def get_port(self) -> int:
        return self._port


class Simulator:
    """The server: what all clients of one port share."""

    running: ClassVar[dict[int, Simulator]] = {}

    def __init__(self, port: int = 2000) -> None:
        self.version = PACKAGE_VERSION
        self.towns = ["Town01", "Town03", "Town10HD_Opt"]
        self.town = "Town10HD_Opt"
        self.lags = {"sensor.camera.rgb": 0, "sensor.camera.depth": 2}
        self.rendering_s: dict[str, float] = {}
        self.loses: set[tuple[str, int]] = set()
        self.gone = False
        self.frozen = False
        self.num_ticks = 0
        self.fault = os.environ.get("CARLA_DOUBLE_FAULT", "")
        self.complaints: list[str] = []
        self.history: list[str] = []
        self.settings = WorldSettings()
        self.frame = 100
        self.episode = 7
        self.actors: dict[int, Actor] = {}
        self.orphans: list[int] = []
        self.driven_by: dict[int, int] = {}
        self.traffic_managers: dict[int, TrafficManager] = {}
        self.lights: list[BoundingBox] = []
        self.signs: list[BoundingBox] = []
        self.parked: list[BoundingBox] = []
        self.walls: list[BoundingBox] = []
        self.spawn_points = [Transform(Location(x=0.0, y=100.0 * lane, z=0.0)) for lane in range(8)]
        self.moved_on = threading.Condition()
        self.snapshot = Snapshot(self.frame, 0.02, {})
        self._ids = 20
        self._state = os.environ.get("CARLA_DOUBLE_STATE")
        Simulator.running[port] = self

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def remove(self, actor_id: int) -> None:
        self.actors.pop(actor_id, None)
        self.orphans = [orphan for orphan in self.orphans if orphan != actor_id]
        self.store()

    def advance(self) -> int:
        """Compute one frame: vehicles drive, sensors see."""
        with self.moved_on:
            step_s = self.settings.fixed_delta_seconds or 0.02
            self.frame += 1
            for actor in self.actors.values():
                if actor.speed:
                    self._drive(actor, step_s)
            poses = {actor.id: copy.deepcopy(actor.pose) for actor in self.actors.values()}
            self.snapshot = Snapshot(self.frame, step_s, poses)
            for sensor in list(self.actors.values()):
                if isinstance(sensor, Sensor) and sensor.is_listening and not self.settings.no_rendering_mode:
                    sensor.expose(self.frame, self._solids(sensor))
            self.store()
            self.moved_on.notify_all()
            return self.frame

    def solid_of(self, actor: Actor) -> tuple[Transform, BoundingBox]:
        return copy.deepcopy(actor.pose), actor.bounding_box

    def load(self) -> None:
        """Take over what other processes did."""
        if self._state and Path(self._state).exists():
            state = json.loads(Path(self._state).read_text())
            self.settings.__dict__.update(state["settings"])
            self.frame, self.episode = state["frame"], state["episode"]
            self.orphans = [actor_id for actor_id in state["actors"] if actor_id not in self.actors]

    def store(self) -> None:
        if self._state:
            state = {
                "settings": self.settings.__dict__,
                "frame": self.frame,
                "episode": self.episode,
                "actors": sorted({*self.actors, *self.orphans}),
            }
            scratch = Path(f"{self._state}.{os.getpid()}")
            scratch.write_text(json.dumps(state))
            scratch.replace(self._state)

    def _drive(self, actor: Actor, step_s: float) -> None:
        manager = self.traffic_managers.get(self.driven_by[actor.id])
        if self.settings.synchronous_mode and not (manager and manager.synchronous):
            self.complaints.append("the world is synchronous, the traffic manager isn't")
        yaw = math.radians(actor.pose.rotation.yaw)
        actor.pose.location.x += actor.speed * step_s * math.cos(yaw)
        actor.pose.location.y += actor.speed * step_s * math.sin(yaw)

    def _solids(self, sensor: Sensor) -> list[tuple[Transform, BoundingBox]]:
        still = [*self.lights, *self.signs, *self.parked, *self.walls]
        return [(Transform(), box) for box in still] + [
            self.solid_of(actor)
            for actor in self.actors.values()
            if actor.type_id.startswith("vehicle.") and actor is not sensor.parent
        ]


class Map:
    def __init__(self, simulator: Simulator) -> None:
        self.name = f"Carla/Maps/{simulator.town}"
        self._simulator = simulator

    def get_spawn_points(self) -> list[Transform]:
        return copy.deepcopy(self._simulator.spawn_points)


class World:
    def __init__(self, simulator: Simulator, client: Client) -> None:
        self._simulator, self._client = simulator, client
        self.id = simulator.episode

    def get_settings(self) -> WorldSettings:
        return copy.copy(self._answer().settings)

    def apply_settings(self, settings: WorldSettings) -> int:
        simulator = self._answer()
        if settings.synchronous_mode and not settings.fixed_delta_seconds:
            simulator.complaints.append("synchronous mode with a variable step")
        if (settings.fixed_delta_seconds or 0) > 0.1:
            simulator.complaints.append("a step of more than 0.1 s")
        simulator.settings = copy.copy(settings)
        simulator.history.append(f"world synchronous={settings.synchronous_mode}")
        return simulator.advance()

    def tick(self, seconds: float = 10.0) -> int:
        simulator = self._answer(seconds)
        simulator.num_ticks += 1
        if simulator.num_ticks == 10 and simulator.fault == "deadlock":
            threading.Event().wait()
        if simulator.num_ticks == 10 and simulator.fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        simulator.frozen |= simulator.num_ticks == 10 and simulator.fault == "freeze"
        if not simulator.settings.synchronous_mode:
            simulator.complaints.append("tick in a world that isn't synchronous")
        return simulator.advance()

    def wait_for_tick(self, seconds: float = 10.0) -> Snapshot:
        simulator = self._answer(seconds)
        if not simulator.settings.synchronous_mode:
            time.sleep(0.01)
            simulator.advance()
            return simulator.snapshot
        before, until = simulator.frame, time.monotonic() + seconds
        with simulator.moved_on:
            while simulator.frame == before:
                simulator.moved_on.wait(0.05)
                simulator.load()
                if time.monotonic() >= until:
                    raise self._client.time_out(seconds)
        return simulator.snapshot

    def get_snapshot(self) -> Snapshot:
        return self._simulator.snapshot

    def get_map(self) -> Map:
        return Map(self._answer())

    def get_blueprint_library(self) -> BlueprintLibrary:
        self._answer()
        return _library()

    def get_actors(self) -> ActorList:
        return ActorList(self._simulator.actors.values())

    def try_spawn_actor(
        self, blueprint: ActorBlueprint, transform: Transform, attach_to: Actor | None = None
    ) -> Actor | None:
        simulator = self._answer()
        if attach_to is None and any(
            transform.location.distance(actor.pose.location) < 4
            for actor in simulator.actors.values()
            if not isinstance(actor, Sensor)
        ):
            return None
        kind = Sensor if blueprint.id.startswith("sensor.") else Actor
        actor = kind(simulator, self._client, blueprint, transform)
        if isinstance(actor, Sensor):
            actor.parent = attach_to
            simulator.history.append(f"made {actor.type_id}")
        simulator.actors[actor.id] = actor
        simulator.store()
        return actor

    def spawn_actor(self, blueprint: ActorBlueprint, transform: Transform, attach_to: Actor | None = None) -> Actor:
        actor = self.try_spawn_actor(blueprint, transform, attach_to)
        if actor is None:
            raise RuntimeError("Spawn failed because of collision at spawn position")
        return actor

    def get_level_bbs(self, label: str) -> list[BoundingBox]:
        simulator = self._answer()
        return {"TrafficLight": simulator.lights, "TrafficSigns": simulator.signs}[label]

    def get_environment_objects(self, label: str) -> list[EnvironmentObject]:
        simulator = self._answer()
        return [EnvironmentObject(2**60 + at, box) for at, box in enumerate(simulator.parked)] if label == "Car" else []

    def _answer(self, seconds: float | None = None) -> Simulator:
        self._client.answer(seconds)
        return self._simulator


class Client:
    def __init__(self, host: str, port: int, worker_threads: int = 0) -> None:
        self._place = f"{host}:{port}"
        self._timeout_s = 5.0
        self._simulator = Simulator.running.get(port) or Simulator(port)

    def set_timeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def get_client_version(self) -> str:
        return PACKAGE_VERSION

    def get_server_version(self) -> str:
        self.answer()
        self._simulator.history.append("version asked")
        return self._simulator.version

    def get_world(self) -> World:
        self.answer()
        self._simulator.history.append("world asked")
        return World(self._simulator, self)

    def get_available_maps(self) -> list[str]:
        self.answer()
        return [f"/Game/Carla/Maps/{town}" for town in self._simulator.towns]

    def load_world(self, map_name: str, reset_settings: bool = True) -> World:
        self.answer()
        simulator = self._simulator
        if simulator.settings.synchronous_mode:
            simulator.complaints.append("a town loaded into a synchronous world, which stands still")
        simulator.town = map_name
        simulator.episode += 1
        simulator.actors.clear()
        if reset_settings:
            simulator.settings = WorldSettings()
        simulator.advance()
        return World(simulator, self)

    def get_trafficmanager(self, port: int = 8000) -> TrafficManager:
        self.answer()
        return self._simulator.traffic_managers.setdefault(port, TrafficManager(self._simulator, port))

    def apply_batch(self, commands: list[_DestroyActor]) -> None:
        self.answer()
        for each in commands:
            self._simulator.remove(each.actor_id)

    def answer(self, seconds: float | None = None) -> None:
        """What every call to the server begins with: it answers, or the call times out."""
        simulator = self._simulator
        simulator.load()
        if simulator.gone or simulator.frozen:
            seconds = self._timeout_s if seconds is None else seconds
            time.sleep(seconds)
            raise self.time_out(seconds)

    def time_out(self, seconds: float) -> RuntimeError:
        return RuntimeError(
            f"time-out of {seconds * 1000:.0f}ms while waiting for the simulator, make sure the simulator is ready and "
            f"connected to {self._place}"
        )

"""What an operator says about a vehicle in a CARLA simulator, and the package that talks to one."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from msgspec import Meta

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import check_settings

CLASS_NAMES = ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")
"""In the order of the recorded CARLA set."""

MAX_FIXED_STEP_S = 0.1
"""CARLA computes at most 6 physics steps of 0.016667 s per frame (Docs/adv_synchrony_timestep.md)."""

LOAD_TOWN_S = 120.0
GRACE_S = 5.0
"""Beyond CARLA's own time-outs, which end most waits."""

_WHOLE = 1e-6

Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
Side: TypeAlias = Annotated[int, Meta(ge=16, le=8192)]
Mount: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]


@dataclass(frozen=True, slots=True)
class CarlaSettings:
    """A camera on a vehicle of its own that drives by itself: ``carla://host:2000?town=Town03&rate=10``.

    Attributes:
        host: where the simulator runs.
        port: its RPC port.
        town: map to drive in; empty takes the one that is loaded. Only the client that ticks may change it.
        vehicle: blueprint of the vehicle.
        width: of a picture, in pixels.
        height: of a picture, in pixels.
        fov: horizontal angle of view in degrees.
        fixed_step: simulated seconds per frame, at most 0.1.
        rate: pictures per simulated second; a whole number of frames must lie between two of them.
        seed: of spawn points, traffic and the traffic manager.
        tick: this client moves the simulation on; exactly one per simulator does, all others wait for it.
        num_vehicles: other vehicles to drive about; the ticking client's.
        tm_port: port of the traffic manager; the vehicles of one simulator share it.
        timeout_s: longest wait for one answer of the simulator, or for one picture.
        allow_version_mismatch: go on although client and simulator differ; that may crash this process.
        mount_x: of the camera, metres ahead of the vehicle's middle.
        mount_z: of the camera, metres above the ground.
        min_visible: share of an object's pixels that must not be hidden; 0 asks no depth camera and keeps hidden
            objects.
        min_size_px: shortest side of a box that is worth a label.
        max_distance_m: farthest object that is worth a label; a depth camera sees 1000 m.

    Raises:
        SettingsError: A value out of range.
    """

    scheme: ClassVar[str] = "carla"
    class_names: ClassVar[tuple[str, ...]] = CLASS_NAMES
    process_per_loss: ClassVar[bool] = True  # a client that failed once is trusted with nothing

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Port = 2000
    town: str = ""
    vehicle: str = "vehicle.lincoln.mkz_2020"
    width: Side = 640
    height: Side = 380
    fov: Annotated[float, Meta(ge=1, le=170)] = 90.0
    fixed_step: Annotated[float, Meta(ge=0.001, le=MAX_FIXED_STEP_S)] = 0.05
    rate: Annotated[float, Meta(ge=0.01, le=1000)] = 10.0
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    tick: bool = True
    num_vehicles: Annotated[int, Meta(ge=0, le=1000)] = 0
    tm_port: Port = 8000
    timeout_s: Annotated[float, Meta(ge=0.1, le=600)] = 10.0
    allow_version_mismatch: bool = False
    mount_x: Mount = 1.5
    mount_z: Mount = 2.0
    min_visible: Annotated[float, Meta(ge=0, le=1)] = 0.2
    min_size_px: Annotated[float, Meta(ge=1, le=8192)] = 4.0
    max_distance_m: Annotated[float, Meta(ge=1, le=1000)] = 80.0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.tick:
            frames = 1 / (self.rate * self.fixed_step)
            if not (abs(frames - round(frames)) <= _WHOLE * frames and round(frames) >= 1):
                possible = 1 / (max(1, round(frames)) * self.fixed_step)
                raise SettingsError(
                    f"carla: rate is {self.rate:g} and fixed_step {self.fixed_step:g} s, {frames:g} frames per "
                    f"picture; expected a whole number, for example rate={possible:g}"
                )

    def frames_per_picture(self, fixed_step_s: float) -> int:
        """Return how many frames of ``fixed_step_s`` pass from one picture to the next, at least 1."""
        return max(1, round(1 / (self.rate * fixed_step_s)))

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def open_timeout_s(self) -> float:
        return 4 * self.timeout_s + GRACE_S + (LOAD_TOWN_S if self.town else 0.0)

    @property
    def read_timeout_s(self) -> float:
        """Between two frames: a tick, and a picture that lags too far behind."""
        return 2 * self.timeout_s + GRACE_S

    @property
    def goodbye_s(self) -> float:
        return 3 * self.timeout_s + GRACE_S

    def check(self) -> None:
        """Raise SettingsError unless CARLA's Python package is installed; says for which machines it exists.

        It isn't imported: only the process that talks to the simulator does that. A client of another version may
        crash, its traffic manager may deadlock, and some of its calls hold Python's lock until they time out
        (``get_world`` of 0.9.16 does). None of that may reach the process that serves other cameras.
        """
        if importlib.util.find_spec("carla") is None:
            raise SettingsError(_no_package("not installed"))

    def describe(self) -> str:
        role = "ticks" if self.tick else "waits for ticks"
        return (
            f"carla {self.place} {self.town or 'as loaded'}, {self.vehicle}, {self.width}x{self.height}, "
            f"{self.rate:g} pictures/s, {role}"
        )


def import_carla() -> Any:
    """Return CARLA's Python package.

    Raises:
        SettingsError: It isn't there, or can't be loaded.
    """
    try:
        return importlib.import_module("carla")
    except ImportError as error:
        raise SettingsError(_no_package(str(error))) from error


def _no_package(reason: str) -> str:
    return (
        f"carla:// needs the package carla ({reason}); install 'replayfleet[carla]'. It exists for Python 3.10, 3.11 "
        f"and 3.12 on x86_64 only, this is Python {platform.python_version()} on {platform.machine()}; a Jetson takes "
        "a stream from an x86 machine that runs the bridge, or the recorded towns (carla-replay://)"
    )

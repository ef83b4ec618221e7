"""What the towns look like: light, weather, colours and who is on the road. Colours are RGB, 0 to 255."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from replayfleet.federation.streams.street.shapes import Colour

CLASS_NAMES = ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")
"""As recorded driving has them."""


class Lane(NamedTuple):
    """Where moving things follow one another."""

    x: float  # metres from the camera's lane
    speed: float  # m/s in the camera's direction
    gap: float  # metres of road per thing, which is longer than any of them
    fill: float  # share of these stretches that hold one
    kinds: Mapping[str, float]  # kind of vehicle -> share


@dataclass(frozen=True, kw_only=True, slots=True)
class Town:
    """One look of the street; what isn't said is that of a sunny day."""

    sky: tuple[Colour, Colour] = ((88, 146, 214), (196, 220, 238))  # above, and just above the horizon
    clouds: tuple[Colour, float] = ((246, 248, 250), 0.3)  # colour, and share of the sky
    haze: tuple[Colour, float] = ((196, 214, 228), 320.0)  # and the distance at which a third of a colour is left
    ambient: float = 1.0  # brightness of things that nothing lights up
    beam: float = 0.0  # brightness that the headlights add close by
    ground: Colour = (168, 164, 156)  # beside the road
    road: Colour = (92, 93, 96)
    noise: int = 6  # of the sensor, largest deviation
    rain: bool = False
    night: bool = False  # lamps and windows are lit
    motorway: bool = False  # three lanes each way instead of a street with houses
    speed: float = 8.0  # of the camera, m/s
    lanes: tuple[Lane, ...]
    leaders: Mapping[str, float]  # kinds that drive ahead of the camera, with shares


_ONCOMING = {"car": 0.6, "van": 0.12, "bus": 0.05, "truck": 0.05, "motobike": 0.18}
_BIKES = {"bike": 0.85, "motobike": 0.15}
_FAST = {"car": 0.62, "van": 0.12, "truck": 0.2, "motobike": 0.06}
_SUNNY = Town(
    lanes=(Lane(-3.5, -8, 24, 0.55, _ONCOMING), Lane(1.55, 4.2, 26, 0.4, _BIKES), Lane(-5.0, -4, 30, 0.4, _BIKES)),
    leaders={"car": 0.45, "van": 0.1, "bus": 0.05, "motobike": 0.22, "bike": 0.18},
)
TOWNS: dict[str, Town] = {
    "sunny": _SUNNY,
    "night": replace(
        _SUNNY,
        sky=((6, 8, 18), (34, 34, 52)),
        clouds=((30, 32, 46), 0.25),
        haze=((22, 22, 34), 120.0),
        ambient=0.16,
        beam=0.6,
        noise=18,
        night=True,
    ),
    "rain": replace(
        _SUNNY,
        sky=((118, 126, 134), (164, 170, 174)),
        clouds=((98, 104, 112), 0.8),
        haze=((156, 162, 168), 62.0),
        ambient=0.66,
        beam=0.1,
        ground=(122, 124, 126),
        road=(70, 74, 80),
        noise=10,
        rain=True,
        speed=7.0,
    ),
    "highway": Town(
        sky=((120, 168, 220), (232, 226, 208)),
        clouds=((250, 246, 238), 0.4),
        haze=((220, 216, 204), 240.0),
        ambient=1.05,
        ground=(150, 146, 84),
        road=(122, 121, 118),
        motorway=True,
        speed=25.0,
        lanes=(
            Lane(-3.6, 31, 46, 0.7, _FAST),
            Lane(3.6, 21, 40, 0.75, _FAST),
            Lane(-11.0, -29, 44, 0.7, _FAST),
            Lane(-14.6, -24, 36, 0.6, _FAST),
        ),
        leaders={"car": 0.5, "van": 0.15, "truck": 0.2, "motobike": 0.15},
    ),
}
"""Name of a look -> the look."""

"""What the towns look like: light, weather, colours and who is on the road. Colours are RGB, 0 to 255."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Colour = tuple[int, int, int]

CAR_COLOURS: tuple[Colour, ...] = (
    (196, 30, 36),
    (32, 74, 150),
    (225, 226, 228),
    (40, 42, 46),
    (140, 146, 152),
    (208, 168, 40),
    (36, 110, 66),
    (110, 40, 48),
    (96, 140, 180),
)
WALL_COLOURS: tuple[Colour, ...] = (
    (206, 186, 150),
    (178, 98, 74),
    (226, 214, 190),
    (158, 160, 162),
    (196, 148, 110),
    (170, 178, 160),
    (222, 190, 140),
)
COAT_COLOURS: tuple[Colour, ...] = (
    (40, 90, 170),
    (200, 60, 50),
    (235, 200, 50),
    (60, 130, 80),
    (60, 60, 66),
    (230, 120, 40),
)

PALETTE: Mapping[str, Colour] = {
    "body": (150, 150, 150),
    "load": (214, 214, 208),
    "glass": (42, 54, 64),
    "tyre": (24, 24, 26),
    "hub": (150, 152, 156),
    "dark": (34, 34, 38),
    "shadow": (30, 31, 33),
    "plate": (230, 230, 220),
    "tail": (150, 22, 24),
    "head": (236, 236, 226),
    "frame": (30, 120, 130),
    "skin": (206, 160, 130),
    "helmet": (230, 230, 235),
    "trousers": (50, 56, 78),
    "coat": (60, 60, 66),
    "wall": (200, 190, 170),
    "roof": (120, 62, 50),
    "trim": (120, 106, 92),
    "window": (70, 88, 106),
    "lit": (70, 88, 106),
    "door": (84, 58, 44),
    "trunk": (84, 66, 50),
    "leaf": (66, 112, 54),
    "pole": (112, 116, 118),
    "lamp": (216, 216, 206),
    "housing": (26, 28, 28),
    "red on": (255, 48, 40),
    "amber on": (255, 186, 40),
    "green on": (60, 255, 150),
    "red off": (70, 22, 20),
    "amber off": (74, 54, 20),
    "green off": (16, 62, 40),
    "sign red": (206, 28, 34),
    "sign white": (240, 240, 238),
    "sign black": (20, 20, 20),
    "sign blue": (24, 82, 168),
    "sign yellow": (246, 196, 30),
}
"""Role -> colour by day; a thing may have its own."""

GLOWING = frozenset({"red on", "amber on", "green on"})
"""Roles that shine by day."""

GLOWING_AT_NIGHT = GLOWING | {"tail", "head", "lit", "lamp"}

LIT: Mapping[str, Colour] = {
    "tail": (255, 40, 30),
    "head": (255, 250, 225),
    "lit": (250, 208, 120),
    "lamp": (255, 224, 160),
}
"""What shines at night only, in its colour then."""

BEAM_M = 26.0
"""Distance at which a third is left of what the headlights add."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Where moving things follow one another.

    Attributes:
        x: metres from the camera's lane.
        speed: m/s in the camera's direction.
        gap: metres of road per thing, which is longer than any of them.
        fill: share of these stretches that hold one.
        kinds: kind of vehicle -> share.
    """

    x: float
    speed: float
    gap: float
    fill: float
    kinds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Town:
    """One look of the street.

    Attributes:
        sky_top: above.
        sky_low: just above the horizon.
        clouds: colour and share of the sky.
        haze: what distant things fade into, and the distance in metres at which a third of their colour is left.
        ambient: brightness of things that nothing lights up.
        beam: brightness that the headlights add close by.
        ground: beside the road.
        road: asphalt.
        walk: pavement.
        hills: on the horizon.
        noise: of the sensor, largest deviation.
        rain: streaks in the picture.
        night: lamps and windows are lit.
        motorway: three lanes each way instead of a street with houses.
        speed: of the camera, m/s.
        lanes: other traffic.
        leaders: kinds that drive ahead of the camera, with shares.
    """

    sky_top: Colour
    sky_low: Colour
    clouds: tuple[Colour, float]
    haze: tuple[Colour, float]
    ambient: float
    beam: float
    ground: Colour
    road: Colour
    walk: Colour
    hills: Colour
    noise: int
    rain: bool
    night: bool
    motorway: bool
    speed: float
    lanes: tuple[Lane, ...]
    leaders: Mapping[str, float]


_ONCOMING = {"car": 0.6, "van": 0.12, "bus": 0.05, "truck": 0.05, "motobike": 0.18}
_LEADERS = {"car": 0.45, "van": 0.1, "bus": 0.05, "motobike": 0.22, "bike": 0.18}
_BIKES = {"bike": 0.85, "motobike": 0.15}
_MOTORWAY = {"car": 0.62, "van": 0.12, "truck": 0.2, "motobike": 0.06}


def _street(oncoming: float, bikes: float) -> tuple[Lane, ...]:
    """Return a street's lanes by how full they are."""
    return (
        Lane(-3.5, -8.0, 24.0, oncoming, _ONCOMING),
        Lane(1.55, 4.2, 26.0, bikes, _BIKES),
        Lane(-5.0, -4.0, 30.0, bikes, _BIKES),
    )


TOWNS: dict[str, Town] = {
    "sunny": Town(
        sky_top=(88, 146, 214),
        sky_low=(196, 220, 238),
        clouds=((246, 248, 250), 0.3),
        haze=((196, 214, 228), 320.0),
        ambient=1.0,
        beam=0.0,
        ground=(104, 132, 76),
        road=(92, 93, 96),
        walk=(168, 164, 156),
        hills=(116, 146, 140),
        noise=6,
        rain=False,
        night=False,
        motorway=False,
        speed=8.0,
        lanes=_street(0.6, 0.45),
        leaders=_LEADERS,
    ),
    "night": Town(
        sky_top=(6, 8, 18),
        sky_low=(34, 34, 52),
        clouds=((30, 32, 46), 0.25),
        haze=((22, 22, 34), 120.0),
        ambient=0.16,
        beam=0.6,
        ground=(60, 80, 52),
        road=(92, 93, 98),
        walk=(150, 146, 140),
        hills=(14, 16, 26),
        noise=18,
        rain=False,
        night=True,
        motorway=False,
        speed=8.0,
        lanes=_street(0.5, 0.3),
        leaders=_LEADERS,
    ),
    "rain": Town(
        sky_top=(118, 126, 134),
        sky_low=(164, 170, 174),
        clouds=((98, 104, 112), 0.8),
        haze=((156, 162, 168), 62.0),
        ambient=0.66,
        beam=0.1,
        ground=(80, 98, 72),
        road=(70, 74, 80),
        walk=(122, 124, 126),
        hills=(134, 142, 148),
        noise=10,
        rain=True,
        night=False,
        motorway=False,
        speed=7.0,
        lanes=_street(0.55, 0.3),
        leaders=_LEADERS,
    ),
    "highway": Town(
        sky_top=(120, 168, 220),
        sky_low=(232, 226, 208),
        clouds=((250, 246, 238), 0.4),
        haze=((220, 216, 204), 240.0),
        ambient=1.05,
        beam=0.0,
        ground=(150, 146, 84),
        road=(122, 121, 118),
        walk=(122, 121, 118),
        hills=(142, 146, 128),
        noise=6,
        rain=False,
        night=False,
        motorway=True,
        speed=25.0,
        lanes=(
            Lane(-3.6, 31.0, 46.0, 0.7, _MOTORWAY),
            Lane(3.6, 21.0, 40.0, 0.75, _MOTORWAY),
            Lane(-11.0, -29.0, 44.0, 0.7, _MOTORWAY),
            Lane(-14.6, -24.0, 36.0, 0.6, _MOTORWAY),
        ),
        leaders={"car": 0.5, "van": 0.15, "truck": 0.2, "motobike": 0.15},
    ),
}
"""Name of a look -> the look."""

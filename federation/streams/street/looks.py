"""What there is in the street, read from ``street.toml``: towns, vehicles, signs, colours."""

from __future__ import annotations

from importlib.resources import files

import msgspec

CLASS_NAMES = ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")
"""As recorded driving has them."""

Colour = tuple[int, int, int]
Outline = tuple[tuple[float, float], ...]


class Lane(msgspec.Struct, frozen=True):
    """Where moving things follow one another."""

    x: float
    speed: float
    gap: float
    fill: float
    kinds: dict[str, float]


class Town(msgspec.Struct, frozen=True, kw_only=True):
    """One look of the street: light, weather, and who is on the road."""

    sky: tuple[Colour, Colour]
    clouds: tuple[Colour, float]
    haze: tuple[Colour, float]
    ground: Colour
    road: Colour
    ambient: float = 1.0  # brightness of things that nothing lights up
    beam: float = 0.0  # brightness that the headlights add close by
    noise: int = 6  # of the sensor, largest deviation
    rain: bool = False
    night: bool = False  # lamps and windows are lit
    traffic: str = "street"  # or ``motorway``: three lanes each way instead of a street with houses
    speed: float
    lanes: tuple[Lane, ...]
    leaders: dict[str, float]

    @property
    def motorway(self) -> bool:
        return self.traffic == "motorway"


class Vehicle(msgspec.Struct, frozen=True):
    """A kind of vehicle: (length, half width, wheels' radius), and parts: role, half width, outline."""

    size: tuple[float, float, float]
    parts: tuple[tuple[str, float, Outline], ...]


_LOOKS = msgspec.toml.decode((files(__package__) / "street.toml").read_bytes())

TOWNS = {
    name: msgspec.convert({**_LOOKS["traffic"][own.get("traffic", "street")], **own}, Town)
    for name, own in _LOOKS["towns"].items()
}
VEHICLES = msgspec.convert(_LOOKS["vehicles"], dict[str, Vehicle])
LENGTHS_M = {kind: vehicle.size[0] for kind, vehicle in VEHICLES.items()}
SIGNS = msgspec.convert(_LOOKS["signs"], dict[str, tuple[tuple[int, float, float, Colour], ...]])
COLOURS = msgspec.convert(_LOOKS["colours"], dict[str, tuple[Colour, ...]])

"""What stands and drives about in a CARLA world, as solids with classes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from replayfleet.edge_client.cameras.carla.boxes import Array, Solids, cuboid, moved
from replayfleet.edge_client.cameras.carla.settings import CLASS_NAMES

_BICYCLES = frozenset({"vehicle.bh.crossbike", "vehicle.diamondback.century", "vehicle.gazelle.omafiets"})
_CLASS_OF_BASE_TYPE = {"bicycle": "bike", "motorcycle": "motobike"}
_LEVEL_LABELS = {"TrafficLight": "traffic_light", "TrafficSigns": "traffic_sign"}
_PARKED_LABELS = {
    "Car": "vehicle",
    "Truck": "vehicle",
    "Bus": "vehicle",
    "Motorcycle": "motobike",
    "Bicycle": "bike",
}

_RIDDEN_EXTENT_M = (0.9, 0.35, 0.85)
"""Half sizes of a two-wheeler with its rider, for those whose own box is empty."""

_SMALLEST_EXTENT_M = 0.05


class Scene:
    """Everything that gets a label in one world, but for the vehicle that carries the camera.

    Lights, signs and parked vehicles never move: they are asked for once. Vehicles are looked up in the snapshot of
    the frame, so that a picture which comes late still gets the boxes of its own moment.

    Args:
        carla: the package.
        world: a ``carla.World``.
        own_id: actor id of the vehicle that carries the camera.
    """

    def __init__(self, carla: Any, world: Any, own_id: int) -> None:
        self._carla = carla
        self._world = world
        self._own_id = own_id
        self._local: dict[int, tuple[int, Array]] = {}
        labels, parked = carla.CityObjectLabel, world.get_environment_objects
        still = [
            (name, box) for label, name in _LEVEL_LABELS.items() for box in world.get_level_bbs(getattr(labels, label))
        ]
        still += [
            (name, item.bounding_box)
            for label, name in _PARKED_LABELS.items()
            for item in parked(getattr(labels, label))
        ]
        self._still = [(CLASS_NAMES.index(name), self._cuboid(box)) for name, box in still]

    def at(self, snapshot: Any) -> Solids:
        """Return what stood where at the moment of a ``carla.WorldSnapshot``."""
        found = list(self._still)
        for actor in self._world.get_actors().filter("vehicle.*"):
            state = snapshot.find(actor.id)
            if actor.id == self._own_id or state is None:
                continue
            if actor.id not in self._local:
                self._local[actor.id] = self._of_vehicle(actor)
            class_id, local = self._local[actor.id]
            found.append((class_id, moved(local, state.get_transform().get_matrix())))
        return Solids(
            np.stack([solid for _, solid in found]) if found else np.empty((0, 4, 3)),
            np.array([class_id for class_id, _ in found], dtype=np.int64),
        )

    def _of_vehicle(self, actor: Any) -> tuple[int, Array]:
        name = vehicle_class(actor.type_id, actor.attributes)
        box = actor.bounding_box
        extent = (box.extent.x, box.extent.y, box.extent.z)
        if name != "vehicle" and not min(extent) >= _SMALLEST_EXTENT_M:  # CARLA issues 3670, 5841, 7596
            carla = self._carla
            pose = carla.Transform(carla.Location(z=_RIDDEN_EXTENT_M[2]), carla.Rotation())
            return CLASS_NAMES.index(name), cuboid(pose.get_matrix(), _RIDDEN_EXTENT_M)
        return CLASS_NAMES.index(name), self._cuboid(box)

    def _cuboid(self, box: Any) -> Array:
        pose = self._carla.Transform(box.location, box.rotation)
        return cuboid(pose.get_matrix(), (box.extent.x, box.extent.y, box.extent.z))


def vehicle_class(type_id: str, attributes: dict[str, str]) -> str:
    """Return the recorded set's class of a vehicle.

    Args:
        type_id: of its blueprint.
        attributes: of its blueprint; ``base_type`` says it from 0.9.14 on, before that the wheels do.
    """
    base_type = attributes.get("base_type", "").lower()
    if base_type:
        return _CLASS_OF_BASE_TYPE.get(base_type, "vehicle")
    if math.isclose(float(attributes.get("number_of_wheels") or 4), 2):
        return "bike" if type_id in _BICYCLES else "motobike"
    return "vehicle"

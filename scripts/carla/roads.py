"""Where the demo's vehicles drive: recorded towns, or drawn ones; and held-out pictures of the same towns.

A recorded town is thinned to the same number of frames as all others, so that each lasts equally long. Of these every
fourth is held out: both vehicles keep it for testing and neither learns from it. The thinned towns are a folder of
links, so that nothing is copied.

Axes: N boxes.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Boxes
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.driving import recording
from replayfleet.federation.streams.driving.recording import Driving, DrivingFrame
from replayfleet.federation.streams.street.street import Street

HOLD_OUT = 4
"""Of so many pictures in a row the last is held out; ``edge-client start --hold-out``."""

STREET_TOWNS = ("sunny", "night", "rain", "highway")
_TEST_SEED = 1_000_003
_FIT_SEED = 2_000_003
_SECONDS_APART = 3.0
_UNIT = (1_000_000, 1_000_000)
"""Label files hold shares; so do anchors."""


class Scene(NamedTuple):
    """A picture, (H, W, 3) uint8, RGB, and what is really in it."""

    pixels: NDArray[np.uint8]
    boxes: Boxes


class Drive(NamedTuple):
    """One vehicle's way through the towns."""

    towns: tuple[str, ...]  # in this order
    rate_hz: float  # pictures per second
    seed: int  # of what is random on the way


class Roads(Protocol):
    """Towns that vehicles can drive through."""

    towns: tuple[str, ...]
    class_names: tuple[str, ...]
    synthetic: bool
    origin: str
    """Folder of the whole recording; empty where there is none."""
    frames_per_town: int
    """Pictures that a vehicle takes in one town, held-out ones included."""

    def source(self, drive: Drive) -> str:
        """Return what ``edge-client start --source`` takes."""

    def num_pictures(self, drive: Drive) -> int | None:
        """Return after how many pictures the drive is over; None if it never is."""

    def held_out(self, town: str) -> Iterator[Scene]:
        """Yield pictures of a town that no vehicle learns from."""

    def box_sizes(self) -> NDArray[np.float64]:
        """Return widths and heights (N, 2) of boxes that anchors may be fitted to, in shares of a picture's."""

    def describe(self) -> str:
        """Say in a few words where this is."""


class RecordedRoads:
    """Towns of recorded driving.

    Args:
        driving: the thinned recording that ``thin`` made.
        origin: the whole one.
    """

    synthetic = False

    def __init__(self, driving: Driving, origin: Path) -> None:
        self._driving = driving
        self.origin = str(origin)
        self.towns = driving.towns
        self.class_names = driving.class_names
        self.frames_per_town = min(len(driving.frames([town])) for town in driving.towns)

    def source(self, drive: Drive) -> str:
        query = urllib.parse.urlencode({"towns": ",".join(drive.towns), "rate": f"{drive.rate_hz:g}"}, safe=",")
        return f"carla-replay://{urllib.parse.quote(str(self._driving.root.absolute()))}?{query}"

    def num_pictures(self, drive: Drive) -> int | None:
        return len(self._driving.frames(drive.towns))

    def held_out(self, town: str) -> Iterator[Scene]:
        return self._scenes(town, held_out=True)

    def learned(self, town: str) -> Iterator[Scene]:
        """Yield the other pictures, which vehicles learn from, in driving order."""
        return self._scenes(town, held_out=False)

    def _scenes(self, town: str, *, held_out: bool) -> Iterator[Scene]:
        for index, frame in enumerate(self._driving.frames([town])):
            if (index % HOLD_OUT == HOLD_OUT - 1) == held_out:
                pixels = frame.pixels()
                found = self._driving.annotation(frame, (pixels.shape[1], pixels.shape[0]))
                yield Scene(pixels, Boxes(found.corners, found.class_ids))

    def box_sizes(self) -> NDArray[np.float64]:
        corners = [
            self._driving.annotation(frame, _UNIT).corners
            for town in self.towns
            for index, frame in enumerate(self._driving.frames([town]))
            if index % HOLD_OUT != HOLD_OUT - 1
        ]
        return _sizes(np.concatenate(corners), _UNIT)

    def describe(self) -> str:
        return f"recorded CARLA towns of {self.origin}"


class StreetRoads:
    """Towns that are drawn: ``synthetic://street``. What is held out comes from streets with another seed.

    Args:
        towns: looks of the street.
        frames_per_town: pictures that a vehicle takes in one town before it goes on.
    """

    synthetic = True
    origin = ""
    class_names: tuple[str, ...] = Street.class_names

    def __init__(self, towns: Sequence[str], frames_per_town: int) -> None:
        self.towns = tuple(towns)
        self.frames_per_town = frames_per_town

    def source(self, drive: Drive) -> str:
        query = {
            "towns": ",".join(drive.towns),
            "rate": f"{drive.rate_hz:g}",
            "stay": f"{self.frames_per_town / drive.rate_hz:.6g}",
            "seed": drive.seed,
        }
        return f"synthetic://street?{urllib.parse.urlencode(query, safe=',')}"

    def num_pictures(self, drive: Drive) -> int | None:
        return None  # it goes on for ever, and never shows the same picture twice

    def held_out(self, town: str) -> Iterator[Scene]:
        return self._scenes(town, _TEST_SEED, self.frames_per_town // HOLD_OUT)

    def box_sizes(self) -> NDArray[np.float64]:
        sizes = []
        for town in self.towns:
            for scene in self._scenes(town, _FIT_SEED, 2 * HOLD_OUT):
                height, width, _ = scene.pixels.shape
                sizes.append(_sizes(scene.boxes.corners, (width, height)))
        return np.concatenate(sizes)

    def describe(self) -> str:
        return "synthetic streets (drawn, not recorded)"

    def _scenes(self, town: str, seed: int, count: int) -> Iterator[Scene]:
        street = Street(town, seed=seed)
        for index in range(count):
            pixels, found = street.draw(_SECONDS_APART * index)
            yield Scene(pixels, Boxes(found.corners, found.class_ids))


def thin(root: Path, into: Path, *, num_towns: int, frames_per_town: int) -> RecordedRoads:
    """Link the towns with most to see into a folder of their own, with equally many frames each.

    Frames that show nothing are left out; the others are taken evenly.

    Args:
        root: recorded driving, see ``federation.streams.driving.recording``.
        into: a folder that doesn't exist yet.
        num_towns: how many towns.
        frames_per_town: at most so many of each; fewer where the smallest town has fewer.

    Raises:
        SettingsError: The recording is damaged or has too few towns.
    """
    driving = Driving(root)
    seen = {town: _showing_something(driving, town) for town in driving.towns}
    towns = sorted(seen, key=lambda town: (-len(seen[town]), town))[:num_towns]
    least = min((len(seen[town]) for town in towns), default=0)
    count = min(frames_per_town, least) // HOLD_OUT * HOLD_OUT
    if len(towns) < num_towns or not count:
        raise SettingsError(
            f"recorded driving in {root} has {len(towns)} towns, the smallest with {least} frames that show something; "
            f"expected {num_towns} with {HOLD_OUT} frames or more"
        )
    for folder in ("images", "labels"):
        (into / folder).mkdir(parents=True)
    (into / "labels.txt").symlink_to((root / "labels.txt").resolve())
    for town in towns:
        for place in np.linspace(0, len(seen[town]) - 1, count).round().astype(int):
            frame = seen[town][place]
            (into / "images" / frame.image.name).symlink_to(frame.image.resolve())
            (into / "labels" / frame.labels.name).symlink_to(frame.labels.resolve())
    return RecordedRoads(Driving(into), root)


def find_recording(data_root: Path | None, environment: str | None) -> Path | None:
    """Return the folder ``carla/`` of the operator's folder, else of the environment's; None if neither has one.

    Raises:
        SettingsError: The operator named a folder without recorded driving.
    """
    if data_root is not None:
        found = recording.find_recording(data_root)
        if found is None:
            raise SettingsError(
                f"--data-root {data_root}: neither it nor its carla/ holds images/, labels/ and labels.txt"
            )
        return found
    return recording.find_recording(Path(environment)) if environment else None


def _showing_something(driving: Driving, town: str) -> list[DrivingFrame]:
    return [frame for frame in driving.frames([town]) if len(driving.annotation(frame, _UNIT).class_ids)]


def _sizes(corners: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float64]:
    sizes: NDArray[np.float64] = (corners[:, 2:] - corners[:, :2]).astype(np.float64) / size
    return sizes[(sizes > 0).all(axis=1)]

"""Images that somebody, or something, puts into ``PATH/<class>/``: each becomes round data once."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.cameras.uri import FolderUri
from replayfleet.edge_client.flow import Samples, Shown
from replayfleet.edge_client.frames.views import fitted, to_pixels
from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError, is_out_of_memory, nearest
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.streams.files.picture_files import SUFFIXES, pixels_of
from replayfleet.models.specs import TaskSpec

log = EventLogger(__name__)

MAX_FILE_BYTES = 32 * 2**20
MIN_SAMPLES = 2
"""Fewer train no model; they wait for others."""
_EXPECTED = "expected PATH/<class>/*.png or *.jpg"
_BEGUN = ".begun"
"""In the name of a round's entry until it has learned from its images."""
_NUM_FIRST_FRAMES = 32
"""Images that are served before the first round has loaded its own."""
_UNREAD = (-1, -1)
"""In place of the time and size of a file that couldn't be read; it is tried again, and told once."""

Decode = Callable[[bytes, TaskSpec], "NDArray[np.float32]"]


def decode_image(data: bytes, task: TaskSpec) -> NDArray[np.float32]:
    """Return an encoded image as (C, H, W) float32 in [-1, 1], resized to the task's size.

    Raises:
        ValueError: Not a complete image, or a huge one.
    """
    return fitted(pixels_of(data), task)


class FolderSamples:
    """Implements ``SampleSource`` over a growing folder of class folders.

    Args:
        uri: where, and how much a round takes.
        task: whose class names the class folders must carry.
        ledger: a folder of this source's own, one small file per round with the names it used, so that a restart
            neither repeats a sample in a later round nor changes a round that has begun. What a round began with and
            never learned from, for the device stopped and came back after it, is there for a later one. A round whose
            images are gone from the folder is gone from the ledger.
        show: takes the round's pictures, (B, H, W, 3) uint8.
        decode: how a file becomes an image.

    Raises:
        SettingsError: No such folder, or the task knows none of its class folders.
    """

    def __init__(
        self,
        uri: FolderUri,
        task: TaskSpec,
        ledger: Path,
        show: Callable[[NDArray[np.uint8]], None],
        decode: Decode = decode_image,
    ) -> None:
        self._uri = uri
        self._task = task
        self._show = show
        self._decode = decode
        self._ledger = ledger
        check_folder(uri)
        self._class_ids = _class_ids(uri.path, task)  # of all classes: folders come and go
        ledger.mkdir(parents=True, exist_ok=True)
        self._used = {file: _names(file) for file in ledger.glob("*.json") if _BEGUN not in file.name}
        self._broken: dict[str, tuple[int, int]] = {}  # name -> time and size of a file that is no image
        self._num_passed_over = 0
        first = self._load(self._files()[-_NUM_FIRST_FRAMES:], _NUM_FIRST_FRAMES)
        if first:
            self._show(to_pixels(self._samples(first).images))

    def watch(self, shown: Shown) -> None: ...

    def round_samples(self, round_index: int) -> Samples | None:
        """Up to ``per_round`` images that no round has used, the oldest first; None if they are too few to train on.

        A round that has begun keeps its images, unless too few of them are left.
        """
        entry = self._entry(round_index, _BEGUN)
        for other in self._ledger.glob(f"*{_BEGUN}.json"):
            if other == entry:
                continue
            names = _names(other)
            if not names or not self._all_used().issuperset(names):  # else the disk is yet to take that they are used
                log.info("a round passed and its images are there for another", round=round_index, was=other.name)
                other.unlink(missing_ok=True)
        begun = _names(entry) or _names(self._entry(round_index))
        at_most = max(MIN_SAMPLES, self._uri.per_round)
        loaded = self._load(begun, at_most)
        if len(loaded) < MIN_SAMPLES:
            files = self._files()
            self._forget_all_but({*files})
            used = self._all_used().difference(begun)
            unused = [name for name in files if name not in used]
            loaded = self._load(unused, at_most)
            if len(loaded) < MIN_SAMPLES:
                return None
            write_atomic(entry, json.dumps([*loaded]).encode(), private=True)
        samples = self._samples(loaded)
        self._show(to_pixels(samples.images))
        return samples

    def used_up(self, round_index: int) -> None:
        if names := _names(entry := self._entry(round_index, _BEGUN)):
            self._used[self._entry(round_index)] = names
            entry.replace(self._entry(round_index))

    def test_samples(self, round_index: int) -> Samples | None:
        return None

    def measures(self) -> Mapping[str, float]:
        return {}

    def _all_used(self) -> set[str]:
        return set().union(*self._used.values())

    def _forget_all_but(self, files: set[str]) -> None:
        """Forget rounds of which no image is left: the ledger would grow with each, and memory with it."""
        for entry, names in [*self._used.items()]:
            if names and files.isdisjoint(names) and all(map(self._is_gone, names)):
                entry.unlink(missing_ok=True)
                del self._used[entry]

    def _is_gone(self, name: str) -> bool:
        """Whether an image was deleted, and not just its share away, its folder unreadable or its class unknown."""
        file = self._uri.path / name
        try:
            file.lstat()
        except FileNotFoundError:
            return file.parent.is_dir()
        except OSError:
            return False
        return False

    def _entry(self, round_index: int, kind: str = "") -> Path:
        return self._ledger / f"{round_index:08d}{kind}.json"

    def _files(self) -> list[str]:
        """Names relative to the folder, ``<class>/<file>``, in the order they arrived; counts what else lies there."""
        found = [
            (folder, file)
            for folder in self._class_ids
            if folder not in {".", ".."} and not {"/", "\0"} & {*folder}  # a class may have any name, a folder not
            for file in (self._uri.path / folder).glob("*")  # gone is empty
        ]
        files = [(folder, file) for folder, file in found if file.suffix.lower() in SUFFIXES and file.name[0] != "."]
        num_passed_over = len(found) - len(files)
        if num_passed_over > self._num_passed_over:
            reason = f"hidden, or named neither {', '.join(SUFFIXES[:-1])} nor {SUFFIXES[-1]}"
            log.warning("files passed over", folder=self._uri.path, num=num_passed_over, reason=reason)
        self._num_passed_over = max(self._num_passed_over, num_passed_over)  # one on its way is hidden for a moment
        return [name for _, name in sorted((_arrival(file), f"{folder}/{file.name}") for folder, file in files)]

    def _load(self, names: Iterable[str], at_most: int) -> dict[str, NDArray[np.float32]]:
        """Return the first images among these files; what is none is told once, until it changes."""
        images: dict[str, NDArray[np.float32]] = {}
        for name in names:
            file, told = self._uri.path / name, self._broken.get(name)
            try:
                found = file.stat()
                if told == (version := (found.st_mtime_ns, found.st_size)):
                    continue
                self._broken[name] = version
                if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
                    raise ValueError("it is no file")
                if found.st_size > MAX_FILE_BYTES:
                    raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
                images[name] = self._decode(file.read_bytes(), self._task)
                del self._broken[name]
            except ValueError as error:
                log.warning("image skipped", file=file, reason=error)
            except Exception as error:
                if not isinstance(error, OSError) and not is_out_of_memory(error):
                    raise
                self._broken[name] = _UNREAD  # which may pass
                if told != _UNREAD:
                    log.warning("image skipped", file=file, reason=error)
            if len(images) == at_most:
                break
        return images

    def _samples(self, images: Mapping[str, NDArray[np.float32]]) -> Samples:
        labels = [self._class_ids[name.rpartition("/")[0]] for name in images]
        return Samples(np.stack([*images.values()]), np.array(labels, dtype=np.int64))


def check_folder(uri: FolderUri) -> None:
    """Raise SettingsError unless the folder exists and has class folders."""
    if not uri.path.is_dir():
        raise SettingsError(f"source folder {str(uri.path)!r} doesn't exist; expected PATH/<class>/*.png or *.jpg")
    if not any(entry.is_dir() for entry in uri.path.iterdir()):
        raise SettingsError(
            f"source folder {str(uri.path)!r} has no class folders; expected PATH/<class>/*.png or *.jpg"
        )


def _arrival(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:  # gone since the folder was listed, or a link in a circle; loading it says so
        return 0


def _class_ids(path: Path, task: TaskSpec) -> dict[str, int]:
    """Return class name -> id; raises SettingsError if no folder is of any.

    A folder that a fleet is yet to learn may be there before its class; the task that knows it makes another source.
    """
    ids = {name: index for index, name in enumerate(task.class_names)}
    folders = {entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    unknown = sorted(folders - ids.keys())
    if unknown and len(unknown) == len(folders):
        raise SettingsError(f"source folder {str(path)!r}: unknown class {unknown[0]!r}{nearest(unknown[0], ids)}")
    for folder in unknown:
        reason = f"unknown class{nearest(folder, ids)}"
        log.warning("class folder passed over", folder=path / folder, reason=reason, next="it counts once it is known")
    return ids


def _names(entry: Path) -> list[str]:
    """What a round used, or nothing if it hasn't begun or its entry is damaged."""
    try:
        names = json.loads(entry.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        log.warning("ledger entry is damaged, its images may be used once more", file=entry)
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

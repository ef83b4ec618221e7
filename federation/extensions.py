"""What other installed packages add to this one through entry points: methods, data sets, sources.

A package of its own names what it adds in its ``pyproject.toml``::

    [project.entry-points."replayfleet.methods"]
    trimmed_mean = "yardfleet.trimmed_mean:TrimmedMean"

Names are known without importing the package, so that a list or a mistake costs nothing; the package is imported when
its name is used. What it does wrong is told in one line that names it, and stops nobody who doesn't use it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from replayfleet.federation.errors import SettingsError, nearest

METHODS_GROUP, DATASETS_GROUP, MODELS_GROUP = "replayfleet.methods", "replayfleet.datasets", "replayfleet.models"
STORING_METHODS = "replayfleet.storing_methods"
"""Group of those methods, listed in ``replayfleet.methods`` too, whose clients keep real samples: a device says so to
its operator without importing torch."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Extended(Mapping[str, T]):
    """Our own things by name, and those of other packages behind them.

    Attributes:
        group: of the entry points.
        what: they are, for messages.
        built_in: ours; their names can't be taken.
        check: returns what is wrong with a name and what its package has for it, or "".
    """

    group: str
    what: str
    built_in: Mapping[str, T]
    check: Callable[[str, Any], str]

    def __getitem__(self, name: str) -> T:
        """Return what has this name; imports its package.

        Raises:
            KeyError: Nothing has.
            SettingsError: Its package can't be imported, isn't the only one, or has something else there.
        """
        if name in self.built_in:
            return self.built_in[name]
        points, owners = added(self.group)[name], packages_with(self.group, name)
        if len(points) > 1:
            raise SettingsError(f"{self.what} {name!r} is added by {owners}; uninstall all but one of them")
        try:
            found = points[0].load()
        except (Exception, SystemExit) as error:  # it is not our code, and may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise SettingsError(f"{self.what} {name!r} of {owners} can't be imported ({reason})") from error
        problem = self.check(name, found)
        if problem:
            raise SettingsError(f"{self.what} {name!r} of {owners} can't be used: {problem}")
        return found  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        for name, points in added(self.group).items():
            if name not in self.built_in:
                yield name
            else:
                _warn(f"{self.what} {name!r} of {_package(points[0])} is left out: replayfleet has one of this name")

    def __len__(self) -> int:
        return len({*self.built_in, *added(self.group)})

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in added(self.group)

    def named(self, name: str, others: Iterable[str] = ()) -> T:
        """Return what has this name.

        Args:
            name: what an operator wrote.
            others: names that the operator may have meant too.

        Raises:
            SettingsError: Nothing has it (names the nearest), or its package can't be used.
        """
        if name not in self:
            raise SettingsError(f"unknown {self.what} {name!r}{nearest(name, {*self, *others})}")
        return self[name]


@functools.cache
def added(group: str) -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Return the entry points of a group by name; nothing is imported."""
    points: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in sorted(importlib.metadata.entry_points(group=group), key=_package):
        points.setdefault(point.name, []).append(point)
    return dict(sorted(points.items()))


def packages_with(group: str, name: str) -> str:
    """Return the packages that add something of this name, as ``barn 1.0 and yard 2.1``; empty if none does."""
    return " and ".join(sorted(_package(point) for point in added(group).get(name, ())))


def is_ours(kind: type[Any]) -> bool:
    """Whether a class is of this package."""
    return kind.__module__.startswith("replayfleet.")


def code_of(group: str, name: str, built_in: Container[str]) -> dict[str, str]:
    """Return what code another package has behind a name: the name of its distribution and a digest of its modules.

    Empty if no other package adds it, or we have one of this name. Of a package that lies in one file, that file; else
    all of its ``.py`` files.
    """
    points = added(group).get(name, ())
    if not points or name in built_in:
        return {}
    spec = importlib.util.find_spec(points[0].module.partition(".")[0])
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    alone = [Path(spec.origin)] if spec is not None and spec.origin and not folders else []
    found = hashlib.sha256()
    for path in sorted([*alone, *(path for folder in folders for path in folder.rglob("*.py"))]):
        if path.is_file():  # an editor's lock is a link that leads nowhere
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    package = points[0].dist.name if points[0].dist is not None else points[0].value
    return {"package": package, "sha256": found.hexdigest()}


@functools.cache
def _warn(line: str) -> None:
    """Say it once a process."""
    _log.warning("%s", line)


def _package(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value

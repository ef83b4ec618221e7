"""``--source`` as the operator writes it.

``dataset://fashion-mnist?scenario=circulating&clients=3&client=0&rounds=6&samples=200&seed=0&rate=10``
``folder:///srv/images?per_round=64&rate=5``
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from edge_client.sources.base import MAX_FRAME_RATE_HZ
from federation.errors import SettingsError, nearest

U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class DatasetUri:
    """One client's share of a labelled image set, arriving as a stream.

    Attributes:
        dataset: a key of ``federation.service.presets.TASKS``.
        scenario: a name of ``SCENARIOS``.
        clients: how many clients share the stream.
        client: which of them this is, from 0.
        rounds: length of the stream.
        samples: training samples per class and round.
        seed: of the stream; all clients of a fleet use the same.
        rate: frames per second that are served.
        test: test samples per class that join the cumulative test set in a round; 0 divides the test part evenly.
    """

    dataset: str
    scenario: str = "circulating"
    clients: int = 1
    client: int = 0
    rounds: int = 6
    samples: int = 200
    seed: int = 0
    rate: float = 10.0
    test: int = 0

    def __post_init__(self) -> None:
        if self.test < 0:
            raise SettingsError(f"source: test is {self.test}, expected 0 or more")
        for key in ("clients", "rounds", "samples"):
            if getattr(self, key) < 1:
                raise SettingsError(f"source: {key} is {getattr(self, key)}, expected at least 1")
        if not 0 <= self.client < self.clients:
            raise SettingsError(
                f"source: client is {self.client}, expected 0 to {self.clients - 1} (clients={self.clients})"
            )
        _check_rate(self.rate)


@dataclass(frozen=True, slots=True)
class FolderUri:
    """``PATH/<class>/*.png|jpg|jpeg``: whatever somebody puts there becomes round data, each image once.

    Attributes:
        path: the folder.
        per_round: most images that one round takes.
        rate: frames per second that are served.
    """

    path: Path
    per_round: int = 200
    rate: float = 5.0

    def __post_init__(self) -> None:
        if self.per_round < 1:
            raise SettingsError(f"source: per_round is {self.per_round}, expected at least 1")
        _check_rate(self.rate)


SourceUri: TypeAlias = DatasetUri | FolderUri

_SCHEMES = ("dataset", "folder")


def parse_source(uri: str) -> SourceUri:
    """Return what ``uri`` says.

    Raises:
        SettingsError: Unknown scheme or key (names the nearest), or a value of the wrong type or range.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        raise SettingsError(
            f"source {uri!r} is not a URI; expected for example 'dataset://fashion-mnist' or 'folder:///path'"
        )
    if scheme not in _SCHEMES:
        raise SettingsError(f"unknown source scheme {scheme!r}{nearest(scheme, _SCHEMES)}")
    try:
        parts = urlsplit(uri)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise SettingsError(f"source {uri!r}: {error}; expected key=value pairs after '?', joined by '&'") from error
    place = unquote(parts.netloc + parts.path)
    if not place:
        raise SettingsError(f"source {uri!r} names no {scheme}; expected '{scheme}://NAME'")
    if scheme == "dataset":
        return _typed(DatasetUri, query, {"dataset": place.rstrip("/")})
    return _typed(FolderUri, query, {"path": Path(place).expanduser()})


def _typed(kind: type[U], query: Mapping[str, str], fixed: Mapping[str, Any]) -> U:
    hints = typing.get_type_hints(kind)
    known = {field.name: hints[field.name] for field in dataclasses.fields(typing.cast("Any", kind))}
    values: dict[str, Any] = dict(fixed)
    for key, text in query.items():
        if key not in known or key in fixed:
            raise SettingsError(f"source: unknown key {key!r}{nearest(key, set(known) - set(fixed))}")
        try:
            values[key] = known[key](text)
        except ValueError:
            raise SettingsError(f"source: {key} is {text!r}, expected {known[key].__name__}") from None
    return kind(**values)


def _check_rate(rate_hz: float) -> None:
    if not (math.isfinite(rate_hz) and 0 < rate_hz <= MAX_FRAME_RATE_HZ):
        raise SettingsError(
            f"source: rate is {rate_hz}, expected more than 0 and at most {MAX_FRAME_RATE_HZ:g} frames/s"
        )

"""``--source`` as the operator writes it.

``dataset://fashion-mnist?scenario=circulating&clients=3&client=0&rounds=6&samples=200&seed=0&rate=10``
``folder:///srv/images?per_round=64&rate=5``
``front=camera://0?rate=30``, ``rtsp://user:password@host/path#transport=udp``, ``carla-replay:///data/carla?town=Town01``
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Meta

from replayfleet.edge_client.cameras.kinds import ALL_CAMERAS, CAMERAS, CameraKind
from replayfleet.edge_client.flow import Rate
from replayfleet.federation.errors import SettingsError, nearest, told
from replayfleet.federation.paths import expanded
from replayfleet.federation.service.settings import WrongValueError, check_settings, settings_of

U = TypeVar("U")

Count: TypeAlias = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class DatasetUri:
    """One client's share of a labelled image set, arriving as a stream.

    Attributes:
        dataset: a key of ``federation.service.fleet.presets.TASKS``.
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
    clients: Count = 1
    client: int = 0
    rounds: Count = 6
    samples: Count = 200
    seed: int = 0
    rate: Rate = 10.0
    test: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if not 0 <= self.client < self.clients:
            raise SettingsError(
                f"source: client is {self.client}, expected 0 to {self.clients - 1} (clients={self.clients})"
            )


@dataclass(frozen=True, slots=True)
class FolderUri:
    """``PATH/<class>/*.png|jpg|jpeg``: whatever somebody puts there becomes round data, each image once.

    Attributes:
        path: the folder.
        per_round: most images that one round takes.
        rate: frames per second that are served.
    """

    path: Path
    per_round: Count = 200
    rate: Rate = 5.0

    def __post_init__(self) -> None:
        check_settings(self)


_SCHEMES = ("dataset", "folder")
_STREET = "street"
"""What ``synthetic://`` shows."""


@dataclass(frozen=True, slots=True)
class CameraUri:
    """A camera, a stream, a recording or a simulator.

    Attributes:
        name: within its client; stands in every prediction.
        scheme: a key of ``edge_client.cameras.kinds.ALL_CAMERAS``.
        settings: a settings object of that kind.
    """

    name: str
    scheme: str
    settings: Any


SourceUri: TypeAlias = DatasetUri | FolderUri | CameraUri

_BOOLEANS = {"yes": "true", "no": "false"}
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,64})=([a-z-]+://.*)", re.DOTALL)


def parse_sources(texts: Sequence[str]) -> tuple[SourceUri, ...]:
    """Return what an operator's sources say: one ``dataset://`` or ``folder://``, or any number of cameras.

    ``NAME=URI`` names a camera; others are called ``camera-0``, ``camera-1``, ... in their order.

    Raises:
        SettingsError: Unknown scheme or key (names the nearest), a value of the wrong type or range, two cameras of the
            same name, or sources that don't go together.
    """
    if not texts:
        raise SettingsError("no source is given; expected for example 'camera://0' or 'dataset://fashion-mnist'")
    parsed: list[SourceUri] = []
    for index, text in enumerate(texts):
        named = _NAMED.fullmatch(text)
        name, uri = named.groups() if named else (f"camera-{index}", text)
        parsed.append(parse_source(uri, name))
    alone = [text for text, found in zip(texts, parsed, strict=True) if not isinstance(found, CameraUri)]
    if alone and len(parsed) > 1:
        raise SettingsError(f"source {alone[0]!r} can't stand beside others; only cameras can be several")
    names = [found.name for found in parsed if isinstance(found, CameraUri)]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"two sources are named {name!r}; name them apart, as in front=camera://0")
    return tuple(parsed)


def parse_source(uri: str, name: str = "camera-0") -> SourceUri:
    """Return what one ``uri`` says; ``name`` is for cameras.

    Raises:
        SettingsError: Unknown scheme or key (names the nearest), or a value of the wrong type or range.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        shown = uri.rpartition("@")[2]  # before it may stand a password
        raise SettingsError(
            f"source {shown!r} is not a URI; expected for example 'camera://0', 'video:///path/film.mp4', "
            "'dataset://fashion-mnist' or 'folder:///path'"
        )
    if "=" in scheme:
        told = scheme.partition("=")[0]
        raise SettingsError(f"camera's name {told!r}: expected 1 to 64 letters (a to z), digits, '_' or '-' before '='")
    if scheme not in _SCHEMES:
        return CameraUri(name, scheme, _camera_settings(scheme, uri, rest))
    place, query = _place_and_query(uri)
    if not place:
        raise SettingsError(f"source {uri!r} names no {scheme}; expected '{scheme}://NAME'")
    if scheme == "dataset":
        return _typed(DatasetUri, query, {"dataset": place.rstrip("/")})
    return _typed(FolderUri, query, {"path": expanded(place)})


def _settings_type(scheme: str, kind: CameraKind) -> Any:
    try:
        found = kind.settings()
    except (Exception, SystemExit) as error:
        if scheme in CAMERAS:
            raise
        raise SettingsError(f"source {scheme}://, of an installed package, has no settings ({told(error)})") from error
    if not is_dataclass(found):
        raise SettingsError(f"source {scheme}://, of an installed package: its settings {found!r:.80} are no dataclass")
    try:
        typing.get_type_hints(found)
    except Exception as error:  # whatever its annotations say
        raise SettingsError(
            f"source {scheme}://, of an installed package: an annotation of its settings can't be resolved ({error})"
        ) from error
    return found


def _camera_settings(scheme: str, uri: str, rest: str) -> Any:
    """Fill a camera's settings: its place from the middle of the URI, the others from the query.

    A network stream has a query of its own, so there the settings stand behind ``#``.
    """
    kind = ALL_CAMERAS.named(scheme, _SCHEMES)
    settings_type = _settings_type(scheme, kind)
    if kind.place == "url":
        address, _, fragment = uri.partition("#")
        if "@" in fragment:  # the # is of a password, which no message may show; the address's own check refuses it
            address, fragment = uri, ""
        return _typed(settings_type, _query(fragment, f"{scheme}://..."), {"url": address})
    place, query = _place_and_query(uri)
    if not kind.place and place.rstrip("/") not in ("", _STREET):
        if scheme not in CAMERAS:
            raise SettingsError(f"source {uri!r}: {scheme}:// takes no place, leave {place!r} out")
        raise SettingsError(f"source {uri!r}: unknown scene {place!r}; expected '{scheme}://{_STREET}'")
    if kind.place == "host":
        host, _, port = place.rstrip("/").partition(":")
        fixed: dict[str, Any] = {"host": host} if host else {}
        if port:
            fixed["port"] = port
        return _typed(settings_type, query, fixed)
    if kind.place == "path" and not place:
        raise SettingsError(f"source {uri!r} names no file or folder; expected '{scheme}:///PATH'")
    value = str(expanded(place)) if kind.place == "path" else place
    return _typed(settings_type, query, {kind.place: value} if kind.place and rest and place else {})


def _place_and_query(uri: str) -> tuple[str, dict[str, str]]:
    try:
        parts = urlsplit(uri.replace("#", "%23"))  # a path may hold it; settings stand behind it of "url" alone
    except ValueError as error:  # of brackets, which belong around an IPv6 address
        raise SettingsError(f"source {uri!r} is not a URI: {error}") from error
    return unquote(parts.netloc + parts.path), _query(parts.query, uri)


def _query(text: str, uri: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError as error:
        raise SettingsError(f"source {uri!r}: {error}; expected key=value pairs after '?', joined by '&'") from error
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key in values if sum(key == other for other, _ in pairs) > 1)
        raise SettingsError(f"source {uri!r}: {twice} is given twice")
    return values


def _typed(kind: type[U], query: Mapping[str, str], fixed: Mapping[str, Any]) -> U:
    known = settings_of(kind)
    values: dict[str, Any] = {}
    try:
        for key, text in (*query.items(), *fixed.items()):
            if key not in known or (key in query and key in fixed):
                raise SettingsError(f"source: unknown key {key!r}{nearest(key, set(known) - set(fixed))}")
            values[key] = known[key].convert(_BOOLEANS.get(text, text) if bool in known[key].kinds else text, text=True)
        return kind(**values)
    except WrongValueError as error:
        raise SettingsError(f"source: {error}") from error

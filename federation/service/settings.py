"""Settings as frozen dataclasses, read from a TOML file and overridden by command-line options.

Supported field types: bool, int, float, str, ``Path``, tuples of them, optional ones, ``dict[str, Any]``, and
dataclasses (a TOML table each). A key that nobody reads and a value of the wrong type are errors, never ignored.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from replayfleet.federation.errors import SettingsError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

S = TypeVar("S")


def read_settings(kind: type[S], path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> S:
    """Return the settings of ``path`` (none: the defaults) with ``overrides`` on top.

    Args:
        kind: a frozen dataclass.
        path: a TOML file.
        overrides: values by field name; nested fields as nested mappings. None means "not given".

    Raises:
        SettingsError: The file can't be read or parsed, a key is unknown, or a value has the wrong type or range.
    """
    values: dict[str, Any] = {} if path is None else read_toml(path)
    origin = "settings" if path is None else path.name
    _refuse_unknown(kind, values, origin)
    given = _given(overrides or {})
    _refuse_unknown(kind, given, "command line")
    if given:
        values = _merged(values, given)
        origin = "command line" if path is None else f"{origin} and command line"
    return settings_from(kind, values, origin)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        SettingsError: It can't be read or parsed.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: can't be read ({error.strerror or error}); nothing was started") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}; nothing was started") from error


def settings_from(kind: type[S], values: Mapping[str, Any], origin: str) -> S:
    """Return ``kind(**values)`` after checking names and types.

    Args:
        kind: a dataclass.
        values: plain values, as from TOML.
        origin: where the operator wrote them; begins every message.

    Raises:
        SettingsError: A key is unknown, or a value has the wrong type or range.
    """
    _refuse_unknown(kind, values, origin)
    for field in dataclasses.fields(cast("type[Any]", kind)):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            option = f"--{field.name.replace('_', '-')}"
            raise SettingsError(f"{origin}: {field.name!r} is missing (or {option}); nothing was started")
    try:
        return msgspec.convert(values, type=kind, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{origin}: {_readable(str(error))}") from error


def split_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Return ``key=value`` texts as a mapping.

    Raises:
        SettingsError: A text has no ``=``, or a key comes twice.
    """
    overrides: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SettingsError(f"--set {text}: expected KEY=VALUE")
        if key in overrides:
            raise SettingsError(f"--set {key} is given twice")
        overrides[key] = value
    return overrides


def _refuse_unknown(kind: type[Any], values: Mapping[str, Any], origin: str, prefix: str = "") -> None:
    hints = typing.get_type_hints(kind)
    known = {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
    for key, value in values.items():
        if key not in known:
            raise SettingsError(f"{origin}: unknown key {prefix + key!r}{nearest(key, known)}")
        if dataclasses.is_dataclass(known[key]) and isinstance(value, Mapping):
            _refuse_unknown(cast("type[Any]", known[key]), value, origin, f"{prefix}{key}.")


def _given(overrides: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            inner = _given(value)
            if inner:
                given[key] = inner
        elif value is not None:
            given[key] = value
    return given


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        both_tables = isinstance(value, Mapping) and isinstance(lower, Mapping)
        merged[key] = _merged(lower, value) if both_tables else value  # type: ignore[arg-type]
    return merged


def _decode_path(kind: type[Any], value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def _readable(message: str) -> str:
    """Turn msgspec's ``Expected `int`, got `str` - at `$.a.b``` into ``a.b: expected int, got str``."""
    text, _, location = message.partition(" - at `$.")
    text = text.replace("`", "")
    key = location.rstrip("`")
    return f"{key}: {text[:1].lower()}{text[1:]}" if key else text

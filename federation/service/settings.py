"""An option has one home: a field of a frozen dataclass.

Its annotation says type, bounds, help, group and unit; the command line (``federation/service/command.py``), the keys
of TOML files, the environment and the reference in ``docs/reference`` are made from it:

    threads: Annotated[int, Meta(ge=1, le=1024), Option("Threads that training may use.", TRAINING)] = 1

is ``--threads 4``, ``threads = 4`` and ``REPLAYFLEET_THREADS=4``. The command line wins over the environment, that over
the file, that over the default. A value that can't be used is an error that names where it was written.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from replayfleet.federation.errors import ReplayfleetError, SettingsError, nearest
from replayfleet.federation.help_groups import ADVANCED, joined
from replayfleet.federation.paths import given_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

S = TypeVar("S")

CAMERA = "Camera"
TRAINING = "Training"
_ENVIRONMENT = "REPLAYFLEET_"
_MAX_TOML_BYTES = 1 << 20
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    dict: "a table",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Option:
    """What a field's annotation says beside type and bounds (which are ``msgspec.Meta``'s).

    Attributes:
        help: in whole sentences.
        group: under which heading it stands in help and reference.
        unit: of a number.
        unset: what happens without it, where the default's value doesn't say so ("half of the cores").
        metavar: what stands for the value in the help; empty: made from the type.
        check: is called with a value that isn't the default; raises ``SettingsError``, ``MalformedMessage`` or
            ``ValueError``. What needs a heavy module imports it there.
        flags: on the command line, where they aren't made from the field's name.
        needs: the field without which this one would do nothing, and is refused.
    """

    help: str
    group: str = ADVANCED
    unit: str = ""
    unset: str = ""
    metavar: str = ""
    check: Callable[[Any], object] | None = None
    flags: str = ""
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field as command line, files, environment and reference see it.

    Attributes:
        name: of the field, and its key in files.
        kinds: the types that a value may have, without None; the choices of a ``Literal`` are one.
        can_be_none: whether None is a value.
        meta: its bounds, if it has any.
        option: what the annotation says; None in dataclasses that only files fill.
        default: its value without anybody saying one; ``MISSING``: it must be given.
    """

    name: str
    kinds: tuple[Any, ...]
    can_be_none: bool
    meta: msgspec.Meta | None
    option: Option | None
    default: Any

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is dataclasses.MISSING

    @property
    def several(self) -> bool:
        """Whether it can be given more than once."""
        return any(typing.get_origin(kind) in {tuple, dict} for kind in self.kinds)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values it may have, if they are few."""
        literals = (kind for kind in self.kinds if typing.get_origin(kind) is typing.Literal)
        return tuple(str(value) for kind in literals for value in typing.get_args(kind))

    @property
    def flag(self) -> str:
        """What it is called on the command line."""
        own = self.option.flags if self.option else ""
        return own.partition("/")[0] or f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """What it is called in the environment."""
        return _ENVIRONMENT + self.flag[2:].replace("-", "_").upper()

    @property
    def bounds(self) -> str:
        """Its range in words; empty if there is none."""
        meta = self.meta
        if meta is None:
            return ""
        if meta.ge is not None and meta.le is not None:
            return f"{meta.ge} to {meta.le}"
        words = (("at least", meta.ge), ("more than", meta.gt), ("at most", meta.le), ("less than", meta.lt))
        # A bound of a billion is there to refuse infinity; nobody needs to read it.
        return ", ".join(f"{word} {bound}" for word, bound in words if bound is not None and bound < 1e9)

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return joined(self.choices)
        words = joined([in_words(kind) for kind in self.kinds])
        return ", ".join(filter(None, (words, self.bounds)))

    def convert(self, value: Any, *, text: bool, called: str = "") -> Any:
        """Return a value of the field's type.

        Args:
            value: as it was written.
            text: it was written where everything is text, as on the command line.
            called: what it is called where it was written, if that isn't its name.

        Raises:
            WrongValueError: It isn't one, or isn't in the field's bounds.
        """
        if value is None and self.can_be_none:
            return None
        is_table = any(typing.get_origin(kind) is dict for kind in self.kinds)
        # msgspec takes no bounds of something that can be None, so they are put around the rest.
        hint: Any = functools.reduce(operator.or_, self.kinds)
        if self.meta is not None:
            hint = Annotated[hint, self.meta]
        try:
            if is_table and text and not isinstance(value, Mapping):
                value = split_overrides(value, called or self.flag)
            found = msgspec.convert(value, type=hint, strict=not text, dec_hook=_decode_path)
        except msgspec.ValidationError as error:
            if type(error.__cause__) is ValueError:  # of what decodes paths, which says more
                raise WrongValueError(self.name, f"{called or self.name}: {error.__cause__}") from error
            raise self._wrong(value, str(error), called) from error
        # msgspec compares with the least number above the bound. Above 0 that is a denormal one, which a library that
        # was built with -ffast-math makes 0 for the whole process.
        if self.meta is not None and self.meta.gt is not None and not found > self.meta.gt:
            raise self._wrong(value, "more", called)
        return found

    def _wrong(self, value: Any, otherwise: str, called: str) -> WrongValueError:
        # A list of texts is not shown: it may hold a camera's URL with its password.
        is_plain = isinstance(value, (bool, int, float, str)) or (
            isinstance(value, (list, tuple)) and all(isinstance(part, (int, float)) for part in value)
        )
        shown = repr(value) if is_plain else f"a {type(value).__name__}"
        expected = self.expected or otherwise.replace("`", "")
        return WrongValueError(self.name, f"{called or self.name} is {shown}, expected {expected}")


class WrongValueError(SettingsError):
    """A field can't have this value; who knows where it was written adds that."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


_KNOWN: dict[type[Any], Mapping[str, Setting]] = {}
"""What has been read so far; annotations are strings, so reading them takes a while."""


def settings_of(kind: type[Any]) -> Mapping[str, Setting]:
    """Return name -> field of a dataclass, in its order."""
    if kind in _KNOWN:
        return _KNOWN[kind]
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {}
    for field in dataclasses.fields(kind):
        if field.init:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            kinds, extras = _parts(hints[field.name])
            found[field.name] = Setting(
                field.name,
                tuple(kind for kind in kinds if kind is not type(None)),
                type(None) in kinds,
                next((extra for extra in extras if isinstance(extra, msgspec.Meta)), None),
                next((extra for extra in extras if isinstance(extra, Option)), None),
                default,
            )
    _KNOWN[kind] = found
    return found


def check_settings(settings: Any) -> None:
    """Check every field's type, bounds and own check; for ``__post_init__``.

    Raises:
        WrongValueError: The first that can't be used.
    """
    known = settings_of(type(settings))
    for name, setting in known.items():
        value, option = getattr(settings, name), setting.option
        setting.convert(value, text=False)
        if option is None or value == setting.default:
            continue
        if option.needs and not getattr(settings, option.needs):
            raise WrongValueError(name, f"{name} does nothing without {known[option.needs].flag}; give both or neither")
        try:
            if option.check is not None:
                option.check(value)
        except (ReplayfleetError, ValueError) as error:
            raise WrongValueError(name, str(error)) from error


def read_settings(
    kind: type[S],
    file: Path | None = None,
    given: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file_of: type[Any] | None = None,
) -> S:
    """Return settings from a file, the environment and the command line.

    Args:
        kind: a frozen dataclass; a field without an ``Option`` stands in ``given`` or in the file only.
        file: TOML; None: there is none.
        given: name -> value on the command line, texts or values of the field's type; None means "not given".
        environment: None: the process's; empty: of a program that reads none, nor a file.
        file_of: whose file it is, if not that of ``kind``; what only those settings have is passed over.

    Raises:
        SettingsError: The file can't be read or parsed, a key is unknown, or a value is missing or can't be used.
    """
    known = settings_of(kind)
    variables = os.environ if environment is None else environment
    file_values = {} if file is None else _from_file(file, known if file_of is None else settings_of(file_of))
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, setting in known.items():
        # An empty variable is how many tools say that there is none.
        variable = (setting.option and variables.get(setting.variable)) or None
        several = variable.split() if variable and setting.several else variable
        for value, where in (
            (file_values.get(name), file.name if file else ""),
            (several, setting.variable),
            ((given or {}).get(name), setting.flag),
        ):
            if value is not None:
                is_text = value is not file_values.get(name)
                taken = setting.convert(value, text=is_text, called=where if is_text else f"{where}: {name}")
                # Tables are merged, key by key; of everything else the last that was said counts.
                lower = values.get(name)
                values[name] = {**lower, **taken} if isinstance(taken, dict) and lower else taken
                written[name] = where
        if setting.required and name not in values:
            elsewhere = f", {name!r} in a --config file, or {setting.variable}" if variables else ""
            raise SettingsError(f"{name} is missing: expected {setting.flag}{elsewhere}; nothing was started")
    return _made(kind, values, written)


def _from_file(file: Path, keys: Mapping[str, Setting]) -> dict[str, Any]:
    values = read_toml(file)
    for key in values:
        if key not in keys:
            raise SettingsError(f"{file.name}: unknown key {key!r}{nearest(key, keys)}")
    return values


def settings_from(kind: type[S], values: Mapping[str, Any], origin: str) -> S:
    """Return ``kind(**values)`` after checking names and types.

    Args:
        kind: a dataclass.
        values: plain values, as from TOML.
        origin: where the operator wrote them; begins every message.

    Raises:
        SettingsError: A key is unknown or missing, or a value has the wrong type or range.
    """
    known = settings_of(kind)
    for key in values:
        if key not in known:
            raise SettingsError(f"{origin}: unknown key {key!r}{nearest(key, known)}")
    for name, setting in known.items():
        if setting.required and name not in values:
            raise SettingsError(f"{origin}: {name!r} is missing; nothing was started")
    try:
        return kind(**{name: known[name].convert(value, text=False) for name, value in values.items()})
    except (SettingsError, ValueError) as error:
        raise SettingsError(f"{origin}: {error}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        SettingsError: It can't be read or parsed.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TOML_BYTES + 1)
        if len(data) > _MAX_TOML_BYTES:
            raise SettingsError(f"{path}: has more than {_MAX_TOML_BYTES} bytes, which no settings need")
        return tomllib.loads(data.decode("utf-8-sig"))  # as Notepad writes it
    except OSError as error:
        raise SettingsError(f"{path}: can't be read ({error.strerror or error}); nothing was started") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: not valid TOML: nested too deeply; nothing was started") from error
    except ValueError as error:  # also of letters that are none, and of numbers with thousands of digits
        raise SettingsError(f"{path}: not valid TOML: {error}; nothing was started") from error


def split_overrides(texts: Sequence[str], called: str = "--set") -> dict[str, str]:
    """Return ``key=value`` texts as a mapping.

    Args:
        texts: as they were written.
        called: what they are called where they were written.

    Raises:
        SettingsError: A text has no ``=``, or a key comes twice.
    """
    overrides: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SettingsError(f"{called} {text}: expected KEY=VALUE")
        if key in overrides:
            raise SettingsError(f"{called} {key} is given twice")
        overrides[key] = value
    return overrides


def _made(kind: type[S], values: Mapping[str, Any], written: Mapping[str, str]) -> S:
    """Return ``kind(**values)``; what it refuses is told with where it was written."""
    try:
        return kind(**values)
    except WrongValueError as error:
        if error.name not in written:  # what a part of it that is made of these values refuses has a name of its own
            raise SettingsError(str(error)) from error
        setting, where, said = settings_of(kind)[error.name], written[error.name], str(error)
        value = said.removeprefix(f"{error.name} is ")
        is_named = value != said and where in {setting.flag, setting.variable}
        raise SettingsError(f"{where} is {value}" if is_named else f"{where}: {said}") from error
    except (SettingsError, ValueError) as error:
        # Values that don't go together: the message names their fields, and this adds where each of them stands.
        named = [f"{name}: {where}" for name, where in written.items() if re.search(rf"\b{name}\b", str(error))]
        raise SettingsError(f"{error} ({'; '.join(named)})" if named else str(error)) from error


def in_words(kind: Any) -> str:
    """Return what a value of this type is; empty for types that only msgspec's own message describes."""
    kinds, _ = _parts(kind)
    if len(kinds) > 1:
        words = [in_words(one) for one in kinds]
        return joined(words) if all(words) else ""
    if typing.get_origin(kind) is not tuple:
        return _WORDS.get(typing.get_origin(kind) or kind, "")
    parts = typing.get_args(kind)
    kinds, extras = _parts(parts[0])
    meta = next((extra for extra in extras if isinstance(extra, msgspec.Meta)), None)
    inner = Setting("", tuple(kinds), can_be_none=False, meta=meta, option=None, default=None).expected
    count = "" if parts[-1] is ... else f" of {len(parts)}"
    return "a list of texts" if inner == _WORDS[str] else f"a list{count}, each of which is {inner}" if inner else ""


def from_text(text: Any, kind: Any) -> Any:
    """Return the value of a type that ``--set`` says in a text; a list or a table is written as JSON.

    Raises:
        msgspec.DecodeError: It says none.
    """
    try:
        return msgspec.convert(text, type=kind, strict=False)
    except msgspec.ValidationError:
        if not (isinstance(text, str) and text.startswith(("[", "{"))):
            raise
        return msgspec.json.decode(text, type=kind, strict=False)


def _parts(hint: Any) -> tuple[list[Any], list[Any]]:
    """Return the types that a hint stands for, and what is annotated to it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kinds, inner = _parts(arguments[0])
        return kinds, [*arguments[1:], *inner]
    if origin in {typing.Union, types.UnionType}:
        found = [_parts(part) for part in arguments]
        return [kind for kinds, _ in found for kind in kinds], [extra for _, extras in found for extra in extras]
    return [hint], []


def _decode_path(kind: type[Any], value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if kind is Path and isinstance(value, str):
        return given_path(value)
    raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")

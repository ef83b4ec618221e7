"""From names and numbers to a method, on both ends alike: the fleet's spec is all that travels. Needs torch."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from replayfleet.federation.errors import SettingsError, nearest, told
from replayfleet.federation.extensions import is_ours
from replayfleet.federation.service.fleet.later import LATER_SETTINGS
from replayfleet.federation.service.fleet.presets import settings_for_task
from replayfleet.federation.service.fleet.task import task_fields, task_of
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.settings import from_text
from replayfleet.federation.wire.protocol.messages import FleetSpec
from replayfleet.models.specs import AnyTaskSpec

if TYPE_CHECKING:
    from replayfleet.federation.methods.kit.records import Method

log = EventLogger(__name__)

_NONE = object()


def make_spec(
    fleet: str, method: str, task: AnyTaskSpec, *, preset: str, overrides: Mapping[str, Any], run_seed: int
) -> FleetSpec:
    """Return the spec of a new fleet, its settings spelt out.

    Those that came later (``LATER_SETTINGS``) are left out where they change nothing: devices of before know their name
    as little as they need it.

    Args:
        fleet: its name.
        method: a key of ``METHODS``.
        task: what it learns.
        preset: a name of ``federation.service.fleet.presets.SETTINGS``.
        overrides: values, or texts from ``--set key=value``, on top of the preset.
        run_seed: what all randomness derives from.

    Raises:
        SettingsError: Unknown method, preset or setting (names the nearest), or a value of the wrong type or range.
    """
    kind = method_class(method)
    if not 0 <= run_seed < 1 << 63:
        raise SettingsError(f"seed is {run_seed}, expected 0 to {(1 << 63) - 1}")
    known = _setting_names(kind)
    fields = {**settings_for_task(method, preset, task, known=known), **_converted(kind, overrides, strict=False)}
    built = _build(kind, task, fields)
    tell_what_is_idle(built, overrides)
    spec = _spelt_out(FleetSpec(fleet, method, {}, task_fields(task), run_seed), built)
    if not is_ours(kind):
        return spec
    # Versions of before LATER_SETTINGS take a default of their own for what isn't said, so both have to be the same.
    idle = {one.name for one in dataclasses.fields(kind) if LATER_SETTINGS.get(one.name, _NONE) == one.default}
    said = {name: value for name, value in spec.settings.items() if name not in idle or value != LATER_SETTINGS[name]}
    return msgspec.structs.replace(spec, settings=said)


def tell_what_is_idle(method: Method, given: Iterable[str]) -> None:
    """Warn of settings that somebody gave and that do nothing beside the method's others."""
    idle: Mapping[str, str] = getattr(method, "idle_settings", dict)()
    for name in sorted(idle.keys() & {*given}):
        log.warning("setting does nothing", setting=name, reason=idle[name])


def with_later_settings(spec: FleetSpec) -> FleetSpec:
    """Return a spec with the settings that it lacks: its method got them later, and they change nothing.

    What was done before there was a setting says ``LATER_SETTINGS``, or its default.

    Raises:
        SettingsError: This version doesn't know the method, one of its settings or its task.
    """
    return _spelt_out(spec, method_of(spec))


def method_of(spec: FleetSpec) -> Method:
    """Return the method that a spec describes.

    Raises:
        SettingsError: This version doesn't know the method, one of its settings or its task.
    """
    return build_method(method_class(spec.method), task_of(spec), spec.settings)


def build_method(kind: type[Any], task: AnyTaskSpec, settings: Mapping[str, Any]) -> Method:
    """Return a method of this class with settings as they were stored or sent, by an earlier version perhaps.

    Raises:
        SettingsError: The class doesn't have one of the settings, or refuses its value.
    """
    later = {name: LATER_SETTINGS[name] for name in LATER_SETTINGS.keys() & set(_setting_names(kind))}
    return _build(kind, task, {**(later if is_ours(kind) else {}), **_converted(kind, settings, strict=True)})


def method_class(name: str) -> type[Any]:
    """Return a class of ``ALL_METHODS`` that a fleet can run.

    Raises:
        SettingsError: No such method, or one whose predictions no device can serve; names what there is.
    """
    from replayfleet.federation.methods import ALL_METHODS, METHODS

    kind = ALL_METHODS.named(name)
    if not kind.deployable:
        usable = ", ".join(sorted(key for key, other in METHODS.items() if other.deployable))
        raise SettingsError(
            f"method {name!r} predicts with more than one task model, which no device serves; run it with fleet-sim, "
            f"or take one of {usable}"
        )
    return kind


def _spelt_out(spec: FleetSpec, method: Method) -> FleetSpec:
    settings = {name: getattr(method, name) for name in _setting_names(type(method))}
    whole = msgspec.structs.replace(spec, settings=settings)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=FleetSpec)  # tuples as lists, as they travel


def _setting_names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init and field.name != "task"]


def _converted(kind: type[Any], values: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    known, hints = _setting_names(kind), typing.get_type_hints(kind)
    converted = {}
    for key, value in values.items():
        if key not in known:
            hint = "a later version of Replayfleet wrote; update this one"
            if not is_ours(kind):
                hint = "another version of its package wrote; use that one"
            hint = f", which {hint}" if strict else nearest(key, known)
            raise SettingsError(f"method {kind.name!r} has no setting {key!r}{hint}")
        try:
            converted[key] = msgspec.convert(value, type=hints[key]) if strict else from_text(value, hints[key])
        except msgspec.DecodeError as error:
            problem = str(error).replace("`", "")
            raise SettingsError(f"setting {key!r} of method {kind.name!r} is {value!r}: {problem}") from error
    return converted


def _build(kind: type[Any], task: AnyTaskSpec, fields: Mapping[str, Any]) -> Method:
    try:
        return cast("Method", kind(task=task, **fields))
    except (TypeError, ValueError) as error:
        raise SettingsError(f"method {kind.name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        if is_ours(kind):
            raise
        raise SettingsError(f"method {kind.name!r}, of an installed package: {told(error)}") from error

"""How a program's command line is made from settings, and how it ends: every expected error is one line on stderr."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import click

from replayfleet.federation.errors import NothingLearned, ReplayfleetError, SettingsError
from replayfleet.federation.help_groups import OptionOfGroup, joined
from replayfleet.federation.paths import ANY_PATH
from replayfleet.federation.service.disk import disk_errno, is_damage
from replayfleet.federation.service.jobs import some_go_on
from replayfleet.federation.service.logs import PATIENCE_S, EventLogger, is_taken, writes_json
from replayfleet.federation.service.settings import Setting, read_settings, settings_of
from replayfleet.federation.service.words import visible

ASKS = (
    click.option("--yes", is_flag=True, help="Don't ask."),
    click.option("--dry-run", is_flag=True, help="Only say what would happen."),
)
"""Of commands that change something; ``agreed`` heeds them."""
_METAVARS = {int: "N", float: "NUMBER", str: "NAME", Path: "PATH"}


class SettingOption(OptionOfGroup):
    """An option made from a field.

    Args:
        setting: the field, with its ``Option``.
        default: its value where nobody says one; None leaves that to ``read_settings``.
    """

    def __init__(self, setting: Setting, default: Any = None) -> None:
        self.setting = setting
        self.must_be_given = setting.required
        assert setting.option is not None, f"{setting.name} has no Option"
        is_flag = bool in setting.kinds
        flags = setting.option.flags or (f"{setting.flag}/--no-{setting.flag[2:]}" if is_flag else setting.flag)
        kind = next((kind for kind in setting.kinds if kind in _METAVARS), str)
        metavar = setting.option.metavar or _METAVARS[kind]
        super().__init__(
            [flags, setting.name],
            group=setting.option.group,
            help=setting.option.help + (f"  [{told}]" if (told := facts(setting)) else ""),
            metavar=None if is_flag else metavar,
            type=click.BOOL if is_flag else click.STRING,
            multiple=setting.several,
            default=default,
            show_default=False,
            callback=self._typed,
        )

    def _typed(self, _context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if value in (None, ()):  # () is how click says that a repeatable option wasn't given
            return self.default
        return self.setting.convert(value, text=True, called=self.setting.flag)


def facts(setting: Setting) -> str:
    """Return default and range of a setting, as help and reference show them."""
    option = setting.option
    assert option is not None
    unit = f" {option.unit}" if option.unit else ""
    if setting.required:
        default = "required"
    elif option.unset or setting.default in (None, "", ()) or isinstance(setting.default, dict):
        default = f"default: {option.unset}" if option.unset else ""
    elif isinstance(setting.default, bool):
        default = f"default: {'on' if setting.default else 'off'}"
    else:
        shown = f"{setting.default:g}" if isinstance(setting.default, float) else setting.default
        shown = ", ".join(map(str, shown)) if isinstance(shown, tuple) else shown
        default = f"default: {shown}{unit}"
    values = joined(setting.choices) or (f"{setting.bounds}{unit}" if setting.bounds else "")
    parts = (values, default, "repeatable" if setting.several else "")
    return "; ".join(filter(None, parts))


def with_settings(
    kind: type[Any], *, file: str = "", file_of: type[Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command the options of ``kind``, and hands it the settings that were read.

    Args:
        kind: a frozen dataclass; the command itself takes what fields without an ``Option`` get.
        file: what its ``--config`` file is usually called; empty: it has none, and reads no environment either. Who
            measures, simulates or exports asks for what stands on the command line, whatever a service's variables say.
        file_of: as of ``read_settings``.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(config: Path | None = None, **values: Any) -> Any:
            given = {name: values.pop(name) for name in settings_of(kind)}
            environment: dict[str, str] | None = None if file else {}
            return function(read_settings(kind, config, given, environment=environment, file_of=file_of), **values)

        made: Callable[..., Any] = command
        if file:
            text = (
                f"File like {file} with any of these, _ for -. Variables like REPLAYFLEET_FLEET win over it, and the "
                "command line over both."
            )
            made = click.option("--config", metavar="PATH", type=ANY_PATH, help=text)(made)
        parameters = [SettingOption(setting) for setting in settings_of(kind).values() if setting.option]
        known = list(getattr(made, "__click_params__", ()))
        made.__click_params__ = [*known, *reversed(parameters)]  # type: ignore[attr-defined]
        return made

    return decorate


def run_command(command: click.Command, name: str, handed: object = None) -> NoReturn:
    """Run ``command`` and exit: 2 for what the operator wrote, 4 for a run in vain, 1 for the rest, 130 for Ctrl-C.

    Args:
        command: the outermost command or group.
        name: the program's name, which begins every error line.
        handed: what the command finds as its context's ``obj``.
    """
    try:
        code = command.main(standalone_mode=False, obj=handed)
    except Exception as error:
        fail(name, error)
    _leave(code if isinstance(code, int) else 0)


def fail(name: str, error: Exception) -> NoReturn:
    """End a program with one line on stderr and its exit code; an error that nobody expected is raised again."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # of Click 8.2 and later
        click.echo(cast(click.UsageError, error).format_message(), err=True)
        sys.exit(2)
    text, code = explained(name, error)
    say(name, text)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End with ``code``, at once where a job goes on: PyTorch aborts a process that ends while it computes."""
    if some_go_on():
        os._exit(code)  # all that was said is out, and what is half done is on no record
    sys.exit(code)


def agreed(plan: str, *, yes: bool, dry_run: bool) -> bool:
    """Say what will happen, and ask unless ``yes``; returns whether to do it.

    Raises:
        SettingsError: Nobody is there to ask.
    """
    click.echo(visible(plan))
    if dry_run:
        return False
    if not yes:
        if not sys.stdin.isatty():
            raise SettingsError("nobody is here to say yes; add --yes, or --dry-run to see what would happen")
        click.confirm("Go on?", abort=True)
    return True


def say(name: str, text: str) -> None:
    """Tell how a program ends, in one line on stderr: of JSON where its logs are."""
    line = " ".join(text.split())
    if writes_json():
        EventLogger(name).error("ended", reason=line)
    elif is_taken(sys.stderr, PATIENCE_S):
        with contextlib.suppress(OSError):  # a terminal that was closed
            click.echo(visible(f"{name}: {line}"), err=True)


def explained(name: str, error: Exception) -> tuple[str, int]:
    """Return an expected error as (one line, exit code); others are raised."""
    match error:
        case ReplayfleetError():
            return str(error), 2 if isinstance(error, SettingsError) else 4 if isinstance(error, NothingLearned) else 1
        case ModuleNotFoundError():
            ours = (error.name or "").partition(".")[0] in _EXTRAS
            own = "replayfleet[cpu] or replayfleet[cuda], on a Jetson the vendor's build"
            return f"{error}; install {own if ours else 'what the package that asks for it needs'}", 2
        case click.ClickException():
            return f"{error.format_message()} ({_path(name, error)} --help lists all options)", 2
        case click.Abort():
            return "stopped", 130
        case Exception() if disk_errno(error) is not None:  # a database's among them
            place, what = getattr(error, "filename", None), getattr(error, "strerror", None)
            then = "; make room, then run it again" if disk_errno(error) in {errno.ENOSPC, errno.EDQUOT} else ""
            return f"{place or 'the disk'}: {what or error}{then}", 1
        case OSError() if error.errno in _NO_FILE and error.filename:
            text = f"{error.filename}: {error.strerror}; move it away, or put back what a backup has there"
        case Exception() if is_damage(error):
            text = f"a database is damaged ({error}); put a backup of the data dir in its place"
        case _:
            raise error
    return text, 2


_NO_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EEXIST})
"""A damaged disk left something else where a file or a folder was."""

_EXTRAS = frozenset({"torch", "torchvision", "onnx", "onnxruntime", "onnxscript", "cv2", "matplotlib"})
"""Modules that an extra of ours brings."""


def _path(name: str, error: click.ClickException) -> str:
    """Return the program and the command that couldn't be understood, as they were typed."""
    words: list[str] = []
    context = getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        words.insert(0, str(context.info_name))
        context = context.parent
    return " ".join((name, *words))

"""Paths as an operator writes them, checked once for all commands: in time, and without leaving anything behind."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import click

from replayfleet.federation.errors import SettingsError

RESULT = "result.json"
"""What a run of the simulator leaves in its folder."""


def given_path(text: str) -> Path:
    """Return a path that somebody wrote, with ``~`` filled in: no shell does in files, in variables or behind ``=``.

    Raises:
        ValueError: It is empty, which would be the current folder, or can't be a path.
    """
    if not text.strip():
        raise ValueError("expected a path, not an empty text")
    if "\0" in text:
        raise ValueError("expected a path, which has no zero bytes")
    path = Path(text)
    try:
        path = path.expanduser() if text == "~" or text.startswith("~/") else path
        path.absolute()
    except RuntimeError:
        raise ValueError(f"{text}: this user has no home of its own; give the whole path") from None
    except FileNotFoundError:
        raise ValueError(f"{text}: the current folder is gone; go to another one, or give the whole path") from None
    try:
        path.stat()
    except OSError as error:  # a name of 300 letters, for example
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            raise ValueError(f"{text[:40]!r}...: {error.strerror}") from error
    return path


def expanded(text: str) -> Path:
    """Return a path with ``~`` and ``~user`` filled in.

    Raises:
        SettingsError: There is no such user, or it is no path.
    """
    try:
        return given_path(text).expanduser()
    except (RuntimeError, ValueError) as error:
        raise SettingsError(f"{text[:80]!r}: {error}") from error


def without_machine(words: Iterable[str]) -> list[str]:
    """Return a command's words for a file that travels: of an absolute path, which is this machine's, the last name."""
    return [re.sub(r"(^|(?<==))/.*", lambda absolute: Path(absolute[0]).name, word, count=1) for word in words]


def open_regular(path: Path, *, links: bool = True) -> BinaryIO:
    """Open a file, and nothing that one might wait for: what writes into a pipe may never come.

    Args:
        path: of the file.
        links: whether it may be a link to one.

    Raises:
        OSError: It can't be opened, or is no file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # whoever has a lease on it, such as a server of files for its client, must let go first
        if not path.is_file():
            raise
        handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """Return a file's bytes; raises OSError as ``open_regular``."""
    with open_regular(path) as file:
        return file.read()


def check_folder(path: Path) -> None:
    """Check that ``path`` is a folder that can be written to, or can be made.

    Raises:
        SettingsError: It isn't; nothing was left behind.
    """
    if path.exists() and not path.is_dir():
        raise SettingsError(f"{path} is a file, not a folder; choose another")
    if path.is_dir():
        if not os.access(path, os.W_OK | os.X_OK):
            raise SettingsError(f"{path} can't be written to; choose another folder")
        return
    _check_can_be_made(path)


def check_new_file(path: Path) -> None:
    """Check that a file can be written at ``path``, whether or not there is one, and its folders made.

    Raises:
        SettingsError: It can't; nothing was left behind.
    """
    if path.is_dir():
        raise SettingsError(f"{path} is a folder, not a file; choose another")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise SettingsError(f"{path} can't be written; choose another")
        return
    _check_can_be_made(path)


def check_place(path: Path) -> None:
    """Check that a file or a folder can be written at ``path``.

    Raises:
        SettingsError: It can't; nothing was left behind.
    """
    (check_folder if path.is_dir() else check_new_file)(path)


class PathType(click.ParamType):  # type: ignore[type-arg]  # a type argument since click 8.2
    """The type of a command's option that is a path.

    Args:
        check: raises SettingsError for one that can't be used.
    """

    name = "path"

    def __init__(self, check: Callable[[Path], object] = lambda _: None) -> None:
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the checked path.

        Raises:
            SettingsError: It can't be used.
        """
        name = f"{param.opts[0]}: " if isinstance(param, click.Option) else ""
        try:
            path = value if isinstance(value, Path) else given_path(value)
            self._check(path)
        except (SettingsError, ValueError) as error:
            raise SettingsError(f"{name}{error}") from error
        return path


ANY_PATH = PathType()
FOLDER, NEW_FILE, PLACE = PathType(check_folder), PathType(check_new_file), PathType(check_place)


def _check_can_be_made(path: Path) -> None:
    if path.is_symlink():
        raise SettingsError(f"{path} is a link that leads nowhere; choose another")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise SettingsError(f"{path} can't be made: {parent} is a file; choose another")
    try:
        # Root may do anything, and yet not in /proc or on a disk that is mounted to be read only.
        Path(tempfile.mkdtemp(prefix=".", dir=parent)).rmdir()
    except OSError as error:
        reason = f"{parent} takes nothing ({error.strerror})"
        raise SettingsError(f"{path} can't be made: {reason}; choose another") from error

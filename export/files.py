"""Files that an export reads: errors name the file."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

from replayfleet.federation.errors import SettingsError

MAX_FILE_BYTES = 2**30


def read_file(path: Path) -> bytes:
    """Return the file's bytes.

    Raises:
        SettingsError: It can't be read or is larger than ``MAX_FILE_BYTES``.
    """
    try:
        found = path.stat()
        if found.st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path}: has {found.st_size} bytes, at most {MAX_FILE_BYTES} are read")
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):  # a folder says so itself
            raise SettingsError(f"{path}: can't be read (it is no file)")
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: can't be read ({error.strerror})") from error


def read_class_names(text: str, *, at_least: int = 2) -> tuple[str, ...]:
    """Return the class names of ``a,b,c``, or of a text file with one name on each line.

    Raises:
        SettingsError: Fewer than ``at_least`` names, or one twice.
    """
    names = _entries(text)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SettingsError(f"--classes: {repeated[0]!r} is there more than once")
    if len(names) < at_least:
        wanted = "two or more" if at_least == 2 else f"{at_least} or more"
        raise SettingsError(f"--classes: {text!r} gives {len(names)} names, expected {wanted}, as a,b,c or a file")
    return tuple(names)


def read_pairs(
    option: str, text: str, *, count: int | None = None, example: str = "0.5x0.25"
) -> tuple[tuple[float, float], ...]:
    """Return the pairs of ``1x2,3x4``, or of a text file with one on each line.

    Args:
        option: for errors.
        text: what the operator wrote.
        count: how many there must be; any number from one if None.
        example: a pair as it may be, for errors.

    Raises:
        SettingsError: Something is no pair of numbers, or there are too few or too many.
    """
    pairs = []
    for entry in _entries(text):
        try:
            first, second = (float(side) for side in entry.split("x"))
        except ValueError as error:
            raise SettingsError(f"{option}: {entry!r} is no pair of numbers, expected as in {example}") from error
        pairs.append((first, second))
    if not pairs or (count is not None and len(pairs) != count):
        raise SettingsError(f"{option}: {text!r} gives {len(pairs)} pairs, expected {count or 'one or more'}")
    return tuple(pairs)


def _entries(text: str) -> list[str]:
    """Return what commas separate, or the lines of the file of that name."""
    parts = text.split(",")
    with contextlib.suppress(OSError):  # as a path it is too long, or leads where we may not look
        if Path(text).is_file():
            try:
                parts = read_file(Path(text)).decode("utf-8-sig").splitlines()  # as Notepad writes it
            except UnicodeDecodeError as error:
                raise SettingsError(f"{text}: isn't UTF-8 ({error.reason} at byte {error.start})") from error
    return [part.strip() for part in parts if part.strip()]

"""Which processes made a run: one, or one more for every time that it was resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError

_PARTS = "parts.json"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one process was that ran rounds of a run.

    Attributes:
        first_round: the first that it ran.
        hardware: machine, processor, cores; GPU, if it computed on one.
        versions: of Python and the packages that compute.
        commit: of its checkout.
        command: what was typed.
    """

    first_round: int
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    command: list[str]


def forget_parts(state: Path) -> None:
    """Forget what a run in this folder, which begins anew, was made by."""
    (state / _PARTS).unlink(missing_ok=True)


def noted_parts(state: Path, part: Part, *, num_rounds: int) -> list[Part]:
    """Return the parts of the run in this folder in their order, ``part`` the last; it is written down.

    A part that completed no round gives way to the next, and one that has no round left to run counts for nothing.

    Raises:
        SettingsError: What was written down before is damaged.
    """
    path = state / _PARTS
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=list[Part]) if path.exists() else []
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"{path} can't be read ({error}); start the run anew") from error
    if part.first_round >= num_rounds:
        return earlier or [part]
    parts = [*(one for one in earlier if one.first_round < part.first_round), part]
    write_atomic(path, msgspec.json.format(msgspec.json.encode(parts)))
    return parts

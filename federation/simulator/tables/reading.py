"""Reading the files that runs leave."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from replayfleet.federation.errors import SettingsError

T = TypeVar("T")


def read_json(path: Path, kind: type[T]) -> T:
    """Return the content of a file in the folder of a run.

    Raises:
        SettingsError: It can't be read, or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"{path} can't be read ({error}); remove its folder") from error

"""A demo's folder: a marker says that it is ours, so that nothing of anybody else's is ever removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError


def clear_folder(out: Path, marker: str, own: Sequence[str], folders: Sequence[str]) -> None:
    """Make a demo's folder with an empty marker, and remove what an earlier demo left there.

    Args:
        out: the folder.
        marker: name of the JSON file that says whose folder it is.
        own: what a demo writes beside it.
        folders: of these, what to make anew.

    Raises:
        SettingsError: It holds something else, which is not ours to remove, or it can't be written.
    """
    if out.exists() and not out.is_dir():
        raise SettingsError(f"{out} is a file; choose a folder with --out")
    if out.exists() and not (out / marker).exists() and any(out.iterdir()):
        raise SettingsError(f"{out} holds something that is not of a demo; choose another folder with --out")
    try:
        for name in own:
            path = out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for name in folders:
            (out / name).mkdir(parents=True)
        write_atomic(out / marker, b"{}\n")
    except OSError as error:
        raise SettingsError(f"{out} can't be written ({error.strerror}: {error.filename})") from error


def note_facts(marker: Path, facts: Mapping[str, Any]) -> None:
    """Add JSON values to a folder's marker."""
    known = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else {}
    write_atomic(marker, json.dumps({**known, **facts}, indent=1).encode() + b"\n")

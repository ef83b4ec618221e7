"""A demo's folder: a marker says that it is ours, so nothing of anybody else's is removed; a lock: in use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.claimed import LOCK, claimed
from replayfleet.federation.errors import SettingsError


@contextmanager
def claimed_folder(out: Path, marker: str) -> Iterator[None]:
    """Keep other demos out of a folder as long as the block lasts, or until this process is killed.

    Args:
        out: the folder; made if it isn't there.
        marker: name of the JSON file that says whose folder it is.

    Raises:
        SettingsError: Another demo runs there, it holds something that is none's, or it can't be written.
    """
    _check_ours(out, marker)
    with claimed(out):
        yield


def clear_folder(out: Path, marker: str, own: Sequence[str], folders: Sequence[str]) -> None:
    """Give a demo's folder an empty marker, and remove what an earlier demo left there: once nothing can fail early.

    Args:
        out: the folder, claimed.
        marker: name of the JSON file that says whose folder it is.
        own: what a demo writes beside it.
        folders: of these, what to make anew.

    Raises:
        SettingsError: It holds something else, which is not ours to remove, or it can't be written.
    """
    _check_ours(out, marker)
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


def _check_ours(out: Path, marker: str) -> None:
    if out.exists() and not out.is_dir():
        raise SettingsError(f"{out} is a file; choose a folder with --out")
    if out.exists() and not (out / marker).exists() and any(path.name != LOCK for path in out.iterdir()):
        raise SettingsError(f"{out} holds something that is not of a demo; choose another folder with --out")


def note_facts(marker: Path, facts: Mapping[str, Any]) -> None:
    """Add JSON values to a folder's marker."""
    known = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else {}
    write_atomic(marker, json.dumps({**known, **facts}, indent=1).encode() + b"\n")

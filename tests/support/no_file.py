"""What a damaged disk leaves in the place of a file."""

from __future__ import annotations

import os
from pathlib import Path

KINDS = ("folder", "pipe", "circle")


def leave(path: Path, kind: str) -> None:
    """Put a folder that holds something, a pipe or a link to itself at ``path``, which is free."""
    if kind == "folder":
        (path / "x").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name)

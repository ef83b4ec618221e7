"""What a write asks of the disk, in order: without one of these steps a power cut leaves half a file, or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every later flush and rename adds a word."""
    steps: list[str] = []
    flush, rename = os.fsync, Path.replace

    def note_flush(descriptor: int) -> None:
        steps.append("directory" if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir() else "data")
        flush(descriptor)

    def note_rename(source: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(Path, "replace", note_rename)
    return steps

"""``edge-client status``: what the client wrote about itself last, and whether it still runs."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from replayfleet.federation.errors import UNREADABLE, SettingsError
from replayfleet.federation.paths import read_regular
from replayfleet.federation.service.data_dir import STATUS_FILE, in_use, read_client
from replayfleet.federation.service.words import visible
from replayfleet.federation.wire.protocol.messages import spoken

STALE_AFTER_S = 30.0
"""A client that runs writes its status every five seconds, unless its disk takes nothing or it hangs."""


def read_status(data_dir: Path) -> dict[str, Any]:
    """Return the last status with ``running`` and ``age_s`` added; a stale one isn't ``healthy``.

    Raises:
        SettingsError: No client ever ran there, the data dir is of another format, or its status can't be read.
    """
    read_client(data_dir)
    path = data_dir / STATUS_FILE
    try:
        found = json.loads(read_regular(path))
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        raise SettingsError(f"data dir {data_dir}: no client has run there ({STATUS_FILE} is missing)") from None
    except (OSError, *UNREADABLE) as error:
        raise SettingsError(f"data dir {data_dir}: {STATUS_FILE} can't be read ({error})") from error
    if not isinstance(found, dict):
        raise SettingsError(f"data dir {data_dir}: {STATUS_FILE} is damaged")
    status = {"running": _runs(data_dir, found.get("pid")), "age_s": round(age_s, 1), **found}
    return {**status, "healthy": False} if stale(status) else status


def stale(status: dict[str, Any]) -> str:
    """Return why a status says nothing of now, though a client runs; empty if it isn't so."""
    if not status["running"] or status["age_s"] <= STALE_AFTER_S:
        return ""
    return (
        f"a client runs, and {STATUS_FILE} is {status['age_s']:.0f} s old, expected at most {STALE_AFTER_S:.0f}: what "
        "it says was so then. The client has just begun, its disk takes nothing, or it hangs; see df, its log, /healthz"
    )


def lines(status: dict[str, Any]) -> list[str]:
    """Return a status for people."""
    width = max(len(key) for key in status)
    rows = [(key, text) for key, value in status.items() for text in _texts(key, value)]
    return [visible(f"{key.ljust(width)}  {text}".rstrip()) for key, text in rows]


def _texts(key: str, value: object) -> list[str]:
    """Return what stands beside a key; each wait has a line of its own."""
    if key == "waits" and isinstance(value, list):
        return [f"{wait.get('reason')}: {wait.get('text')}" for wait in value if isinstance(wait, dict)] or [""]
    if key.endswith("_version") and isinstance(value, int) and value >= 0:
        return [spoken(value)]
    return [_text(value)]


def _text(value: object) -> str:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _runs(data_dir: Path, pid: object) -> bool:
    with contextlib.suppress(PermissionError):
        return in_use(data_dir)
    return Path(f"/proc/{pid}").exists()  # who isn't its user sees no more

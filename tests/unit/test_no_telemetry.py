"""No library tells its maker of a device, of a fleet or of the models there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SWITCHES = ("ORT_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED", "DO_NOT_TRACK")
ASKED = f"import os, replayfleet, onnxruntime; print(*(os.environ[name] for name in {SWITCHES}))"


@pytest.mark.parametrize(("chosen", "said"), [({}, "1 0 true\n"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0 0 true\n")])
def test_what_tells_makers_of_users_is_off_unless_somebody_chose_it(
    tmp_path: Path, chosen: dict[str, str], said: str
) -> None:
    """ONNX Runtime notes events, and who tells them, in a database at its import; on a CI machine it doesn't."""
    unset = {*SWITCHES, "CI", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HOME": str(tmp_path), **chosen}
    done = subprocess.run([sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == said
    if not chosen:
        assert list(tmp_path.rglob("*")) == []

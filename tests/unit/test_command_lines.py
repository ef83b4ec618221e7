"""What every command line owes a newcomer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = {
    "aggregator.cli": ["serve", "--clients", "1", "--data-dir"],
    "edge_client.cli": [
        *("start", "--broker", "mqtt://localhost", "--client-id", "a", "--source", "folder://{folder}", "--data-dir"),
    ],
    "federation.scenarios.cli": ["fedavg", "--out"],
}
HEAVY = ("torch", "onnx", "onnxruntime", "cv2", "matplotlib", "numpy")


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", START)
def test_a_missing_extra_is_one_line_that_says_what_to_install(module: str, tmp_path: Path) -> None:
    absent = "; ".join(f"sys.modules[{name!r}] = None" for name in ("torch", "onnxruntime"))
    (tmp_path / "source" / "cat").mkdir(parents=True)
    arguments = [text.format(folder=tmp_path / "source") for text in START[module]]
    done = _python(f"import sys; {absent}; from {module} import main; main()", *arguments, str(tmp_path / "out"))
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1, done.stderr
    assert "install replayfleet[cpu]" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", [*START, "export.cli"])
def test_help_imports_nothing_heavy(module: str) -> None:
    done = _python(
        "import sys\n"
        f"from {module} import main\n"
        "sys.argv[1:] = ['--help']\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert "Usage:" in done.stdout
    assert done.stdout.endswith("loaded: []\n")


@pytest.mark.parametrize("module", ["aggregator.cli", "federation.scenarios.cli"])
def test_idle_threads_sleep_before_torch_is_imported(module: str, tmp_path: Path) -> None:
    done = _python(
        "import os, sys\n"
        "os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "sys.modules['torch'] = None\n"
        f"from {module} import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(os.environ.get('OMP_WAIT_POLICY'))",
        *START[module],
        str(tmp_path / "out"),
    )
    assert done.stdout == "PASSIVE\n", done.stderr

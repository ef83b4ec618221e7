"""What an operator sees of ``model-export`` when something is wrong: one line, exit code 2, nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from export.cli import main


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    path = tmp_path / "parameters.safetensors"
    save_file({"w": np.eye(2, dtype=np.float32)}, path)
    return path


def fails(arguments: list[str]) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


def task(file: Path, out: Path, **changes: str) -> list[str]:
    options = {"image-size": "28", "image-channels": "1", "classes": "a,b", "parameters": str(file)}
    options |= {"out": str(out)} | {name.replace("_", "-"): value for name, value in changes.items()}
    return ["task", *(part for name, value in options.items() for part in (f"--{name}", value))]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": "onxx"}, "unknown format 'onxx'; did you mean 'onnx'?"),
        ({"stem": "cifra"}, "unknown stem 'cifra'; did you mean 'cifar'?"),
        ({"image_size": "29"}, "image_size is 29, expected one of (28, 32, 64)"),
        ({"image_channels": "4"}, "image_channels is 4"),
        ({"classes": "a"}, "gives 1 names"),
        ({"parameters": "absent.safetensors"}, "absent.safetensors: can't be read"),
        ({}, "parameter 'blocks.0.conv1.weight' is missing (wrong-layout)"),
    ],
)
def test_bad_input_gives_one_line_and_writes_nothing(
    parameters: Path, tmp_path: Path, changes: dict[str, str], expected: str
):
    out = tmp_path / "out"
    assert expected in fails(task(parameters, out, **changes))
    assert not out.exists()


def test_split_torchscript_is_refused(parameters: Path, tmp_path: Path):
    assert "--split" in fails([*task(parameters, tmp_path / "out", format="torchscript"), "--split"])


def test_an_unknown_command_gets_the_nearest_name():
    assert "unknown command 'tsk'; did you mean 'task'?" in fails(["tsk"])


def test_checking_a_file_that_is_no_model_says_so(parameters: Path):
    assert "it is not loaded (load-failed)" in fails(["check", str(parameters)])


def test_help_needs_neither_torch_nor_onnxruntime():
    code = (
        "import sys\nfrom export.cli import main\n"
        "main(['task', '--help'], standalone_mode=False)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'onnx', 'onnxruntime')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--image-channels" in done.stdout

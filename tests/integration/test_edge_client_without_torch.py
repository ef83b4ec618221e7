"""Serving needs neither torch nor onnx, nor OpenCV where no camera does: a client process that can't import them."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support.installed import copied_sources
from support.torch_free import NOT_ON_A_DEVICE, check, hide, serve

from replayfleet.federation.wire.transport.broker import find_mosquitto

START = "from replayfleet.edge_client.cli import main; main()"


@pytest.fixture(autouse=True)
def _needs_a_broker() -> None:
    if find_mosquitto() is None:
        pytest.skip("no mosquitto on this machine")


def test_a_client_serves_a_download_where_torch_and_onnx_cannot_be_imported(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": hide(NOT_ON_A_DEVICE, tmp_path / "hook")}
    for name in ("torch", "onnx"):  # the hook works
        tried = subprocess.run(
            [sys.executable, "-c", f"import {name}"], env=environment, capture_output=True, check=False
        )
        assert b"ModuleNotFoundError" in tried.stderr
    status = serve([sys.executable, "-c", START], environment, tmp_path)
    check(status)
    assert status["log"].count("Traceback") == 0, "a device that can't train says so in a line"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_client_serves_in_an_environment_of_the_base_install_and_onnx_runtime(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    sources = copied_sources(tmp_path / "sources")
    install = [python, "-m", "pip", "install", "--quiet", "--no-input", sources, "onnxruntime"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip can't install here: {done.stderr.strip().splitlines()[-1]}")
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    installed = {line.partition("==")[0] for line in listed.stdout.splitlines()}
    assert {"replayfleet", "onnxruntime"} <= installed
    assert not installed & {*NOT_ON_A_DEVICE, "opencv-python-headless", "opencv-python"}
    check(serve([str(environment / "bin" / "edge-client")], {"PYTHONPATH": ""}, tmp_path))

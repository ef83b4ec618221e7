"""The examples of docs/api.md, run in their order; ``tests/integration/test_installed.py`` installs its package."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.image_sets import write_fashion_mnist
from support.installed import ROOT

from replayfleet.cli import model_export


def test_the_examples_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_fashion_mnist(tmp_path / "data", train_per_class=8, test_per_class=4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLAYFLEET_DATA", str(tmp_path / "data"))
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8").split("## A package of your own")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    assert "accuracy after the last round: 0." in printed
    assert "simulation pfedgrp 2 ('client-0', 'client-1')" in printed
    assert (tmp_path / "shoes.safetensors").is_file()
    assert (tmp_path / "exported" / "task.onnx").is_file()
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^model-export (.*)$", page, re.MULTILINE)]
    runnable = [words for words in lines if not any(word.startswith("/var/lib/") for word in words)]
    assert len(runnable) == 3
    for words in runnable:
        monkeypatch.setattr("sys.argv", ["model-export", *words])
        with pytest.raises(SystemExit) as ended:
            model_export()
        assert not ended.value.code, words


def test_the_package_that_it_shows_names_nothing_that_a_checker_cant_find() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8").split("## A package of your own")[1]
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F", "-"]
    done = subprocess.run(check, input=block, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

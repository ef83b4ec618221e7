"""The installed programs end without a traceback when somebody presses Ctrl-C while they still import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROGRAMS = re.findall(r'^([\w-]+) = "([\w.]+):(\w+)"$', TEXT.partition("[project.scripts]")[2], re.MULTILINE)

PRESSED = """
import os, signal, sys

class Finger:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finger())
from {module} import {function}
{function}()
"""


@pytest.mark.parametrize(("name", "module", "function"), PROGRAMS)
def test_ctrl_c_while_it_imports_ends_a_program_in_one_line(name: str, module: str, function: str) -> None:
    code = PRESSED.format(module=module, function=function)
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, f"{name}: stopped\n")


def test_there_are_five() -> None:
    assert len(PROGRAMS) == 5

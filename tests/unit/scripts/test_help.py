"""Who asks a script for help gets help, and the script does nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from replayfleet.scripts.launch.command import this_command

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "scripts").rglob("*.py")
    if "\ndef main() -> None:\n" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_all_that_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"replayfleet.{name}").main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out.lower().startswith("usage: ")
    assert not list(tmp_path.iterdir())


def test_a_command_that_a_report_shows_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["replayfleet demo", "--fast"])  # as the program names itself
    assert this_command() == ["replayfleet", "demo", "--fast"]

"""What every command line owes a newcomer."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

START = {
    "replayfleet.aggregator.cli": ["serve", "--clients", "1", "--data-dir"],
    "replayfleet.edge_client.cli": [
        *("start", "--broker", "mqtt://localhost", "--client-id", "a", "--source", "folder://{folder}", "--data-dir"),
    ],
    "replayfleet.federation.simulator.cli": ["fedavg", "--out"],
}
HELP_LIMIT_S = 0.5
"""Of CPU time, the interpreter's start included: what a person waits for on a quiet machine."""
YARDSTICK = (
    "import asyncio, http.client, sqlite3, ssl, time, unittest.mock, xml.dom.minidom; print(time.process_time())"
)
YARDSTICK_S = 0.07
"""Of CPU time for the yardstick: a machine that takes longer for it, at that moment, may take longer for help too."""
HEAVY = ("torch", "onnx", "onnxruntime", "cv2", "matplotlib", "numpy")


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", START)
def test_a_missing_extra_is_one_line_that_says_what_to_install(module: str, tmp_path: Path) -> None:
    absent = "; ".join(f"sys.modules[{name!r}] = None" for name in ("torch", "onnxruntime"))
    (tmp_path / "source" / "cat").mkdir(parents=True)
    arguments = [text.format(folder=tmp_path / "source") for text in START[module]]
    done = _python(f"import sys; {absent}; from {module} import main; main()", *arguments, str(tmp_path / "out"))
    assert done.returncode == 2, "nothing gets better by another start"
    assert done.stderr.count("\n") == 1, done.stderr
    assert "install replayfleet[cpu]" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", [*START, "replayfleet.export.cli", "replayfleet.cli"])
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


def _commands(module: str) -> Iterator[tuple[str, ...]]:
    """Every command of a program and all that stand below it, the program itself first."""

    def below(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), name)
                assert found is not None
                yield from below(found, (*words, name))

    program = importlib.import_module(module)
    commands = [value for value in vars(program).values() if isinstance(value, click.Command)]
    groups = [command for command in commands if isinstance(command, click.Group)]
    (outermost,) = groups or commands
    yield from below(outermost, (module,))


PROGRAMS = (*START, "replayfleet.export.cli", "replayfleet.cli")
EVERY_COMMAND = [words for module in PROGRAMS for words in _commands(module)]
EVERY_COMMAND.append(("replayfleet.federation.simulator.cli", "table"))


_MEASURE = """
import os, sys, time
from {module} import main
imported_s = time.process_time()
null = os.open(os.devnull, os.O_WRONLY)
for words in {commands!r}:
    pid = os.fork()
    if pid == 0:
        os.dup2(null, 1)
        sys.argv[1:] = [*words, "--help"]
        main()
        sys.exit()
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, words
    print(imported_s + usage.ru_utime + usage.ru_stime, flush=True)
"""
"""CPU seconds of each command, of an interpreter that starts, imports the program and does nothing else: what else runs
on the machine takes no part in it. It imports once and then forks for each command."""


@functools.cache
def _measured(module: str, attempt: int) -> dict[tuple[str, ...], float]:
    every = [words for words in EVERY_COMMAND if words[0] == module]
    done = _python(_MEASURE.format(module=module, commands=[words[1:] for words in every]))
    assert done.returncode == 0, done.stderr
    return dict(zip(every, map(float, done.stdout.split()), strict=True))


@functools.cache
def _limit_s(_module: str, _attempt: int) -> float:
    return HELP_LIMIT_S * max(1.0, float(_python(YARDSTICK).stdout) / YARDSTICK_S)


@pytest.mark.parametrize("words", EVERY_COMMAND, ids=" ".join)
def test_help_of_every_command_takes_less_than_half_a_second(words: tuple[str, ...]) -> None:
    taken = []
    for attempt in range(4):  # a cold cache and a crowded core cost CPU time too
        seconds, allowed = _measured(words[0], attempt)[words], _limit_s(words[0], attempt)
        taken.append(f"{seconds:.2f} s of CPU time where {allowed:.2f} s are allowed")
        if seconds < allowed:
            return
    pytest.fail(f"{' '.join(words)} --help takes {', '.join(taken)}")


@pytest.mark.parametrize("module", ["replayfleet.aggregator.cli", "replayfleet.federation.simulator.cli"])
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

"""A build in a child process: it tells how far it is, yields to everybody, and never outlives who asked for it.

The child process and its files are real; what it builds are engines of paper (``tests.support.paper_engines``).
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from replayfleet.export.engines.build import EngineBuild
from replayfleet.export.engines.cache import EngineCache
from replayfleet.export.engines.maker import EngineFailed, artefact_digest
from replayfleet.export.running.provider_options import BatchProfile
from tests.support.paper_engines import NUM_PARTS
from tests.support.processes import is_gone
from tests.support.waiting import until

PROFILE = BatchProfile()
PAPER = "tests.support.paper_engines"


def build_with(maker: str, folder: Path, heard: list[tuple[int, int]] | None = None) -> Path:
    cache = EngineCache(folder / "engines", {"device": "paper"})
    with cache.workplace() as place:
        progress = (lambda part, of: heard.append((part, of))) if heard is not None else (lambda part, of: None)
        EngineBuild(f"{PAPER}:{maker}").run(b"model " * 100, place, PROFILE, progress)
        return cache.store(place, "a" * 64, PROFILE)


def test_an_engine_is_built_by_a_process_that_yields_to_everybody_and_tells_how_far_it_is(tmp_path: Path):
    heard: list[tuple[int, int]] = []
    engine = build_with("PaperMaker", tmp_path, heard)
    assert heard == [(part, NUM_PARTS) for part in range(1, NUM_PARTS + 1)]
    assert (engine / "11.engine").read_bytes() == (b"model " * 100)[:100]
    assert (engine / "niceness").read_text() == "19"


@pytest.mark.parametrize(
    ("maker", "reason"),
    [
        ("FailingMaker", "^RuntimeError: no paper left$"),
        ("DyingMaker", "^the building process ended with -9: cutting$"),
        ("NoSuchMaker", "^AttributeError: .*NoSuchMaker"),
    ],
)
def test_a_build_that_fails_says_why_in_one_line_and_leaves_nothing(tmp_path: Path, maker: str, reason: str):
    with pytest.raises(EngineFailed, match=reason):
        build_with(maker, tmp_path)
    assert list((tmp_path / "engines").iterdir()) == []


def test_a_build_is_stopped_at_once_from_another_thread(tmp_path: Path):
    build = EngineBuild(f"{PAPER}:WaitingMaker")
    cache = EngineCache(tmp_path / "engines", {"device": "paper"})
    caught: list[str] = []

    def work() -> None:
        try:
            with cache.workplace() as place:
                build.run(b"model", place, PROFILE, lambda part, of: None)
        except EngineFailed as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    until((tmp_path / "builder").exists)
    pid = int((tmp_path / "builder").read_text())
    build.stop("a newer model came")
    thread.join(timeout=20)
    assert caught == ["a newer model came"]
    assert is_gone(pid)
    assert list((tmp_path / "engines").iterdir()) == []
    with pytest.raises(EngineFailed, match="a newer model came"), cache.workplace() as place:
        build.run(b"model", place, PROFILE, lambda part, of: None)  # stopped for good


def test_a_build_that_takes_too_long_is_given_up(tmp_path: Path):
    cache = EngineCache(tmp_path / "engines", {"device": "paper"})
    with pytest.raises(EngineFailed, match=r"longer than 0\.1 s"), cache.workplace() as place:
        EngineBuild(f"{PAPER}:WaitingMaker", limit_s=0.1).run(b"model", place, PROFILE, lambda part, of: None)


KILLED = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from replayfleet.export.engines.build import EngineBuild
    from replayfleet.export.engines.cache import EngineCache
    from replayfleet.export.running.provider_options import BatchProfile

    cache = EngineCache(Path(sys.argv[1]) / "engines", {"device": "paper"})
    with cache.workplace() as place:
        build = EngineBuild("tests.support.paper_engines:WaitingMaker")
        build.run(b"model", place, BatchProfile(), lambda part, of: None)
    """
)


def test_a_builder_dies_with_a_client_that_is_killed_and_its_half_is_never_used(tmp_path: Path):
    client = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    until((tmp_path / "builder").exists)
    pid = int((tmp_path / "builder").read_text())
    assert not is_gone(pid)
    client.kill()
    client.wait()
    until(lambda: is_gone(pid), limit_s=10)
    cache = EngineCache(tmp_path / "engines", {"device": "paper"})
    assert cache.find("a" * 64, PROFILE) is None
    assert len(list((tmp_path / "engines").iterdir())) == 1  # the half one
    assert cache.clean() == []
    assert list((tmp_path / "engines").iterdir()) == []


def test_other_parameters_in_the_same_graph_are_another_artefact():
    assert artefact_digest("graph", "parameters") != artefact_digest("graph", "others")
    assert artefact_digest("a", "bc") != artefact_digest("ab", "c")

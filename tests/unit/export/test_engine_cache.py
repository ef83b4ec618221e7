"""Engines on disk: whole or absent, for this platform only, never more than there is room for.

What stands in for an engine is a file; nothing in the cache looks into it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from replayfleet.export.engines.cache import EngineCache
from replayfleet.export.running.provider_options import BatchProfile

PLATFORM = {"device": "Orin", "onnxruntime": "1.31.1", "tensorrt": "10.3.0"}
PROFILE = BatchProfile()
OTHER_PROFILE = BatchProfile(1, 8, 64)


def cache_in(folder: Path, max_bytes: int = 1 << 30, **platform: str) -> EngineCache:
    return EngineCache(folder / "engines", PLATFORM | platform, max_bytes=max_bytes)


def store(cache: EngineCache, artefact: str, content: bytes = b"engine", profile: BatchProfile = PROFILE) -> Path:
    with cache.workplace() as place:
        (place.engine / "engine_sm87.engine").write_bytes(content)
        (place.timing / "cache_sm87.timing").write_bytes(b"times of " + artefact.encode())
        return cache.store(place, artefact, profile)


def fill_up(path: Path) -> None:
    path.write_bytes(b"x")
    raise OSError("disk full")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "engines").iterdir() if not path.name.startswith("timing-"))


def test_a_stored_engine_is_found_by_another_process_of_the_same_platform(tmp_path: Path):
    store(cache_in(tmp_path), "a" * 64, b"of a")
    found = cache_in(tmp_path).find("a" * 64, PROFILE)
    assert found is not None
    assert (found / "engine_sm87.engine").read_bytes() == b"of a"
    assert len(names(tmp_path)) == 1  # no rubbish


def test_another_artefact_or_batch_profile_or_platform_never_gets_it(tmp_path: Path):
    store(cache_in(tmp_path), "a" * 64)
    assert cache_in(tmp_path).find("b" * 64, PROFILE) is None
    assert cache_in(tmp_path).find("a" * 64, OTHER_PROFILE) is None
    assert cache_in(tmp_path, device="Thor").find("a" * 64, PROFILE) is None
    assert cache_in(tmp_path).find("a" * 64, PROFILE) is not None


@pytest.mark.parametrize(("name", "value"), [("device", "Thor"), ("tensorrt", "10.16.2"), ("onnxruntime", "1.32.0")])
def test_after_an_update_of_the_board_all_old_engines_go_and_one_line_says_why(tmp_path: Path, name: str, value: str):
    old = cache_in(tmp_path)
    store(old, "a" * 64)
    store(old, "b" * 64)
    updated = cache_in(tmp_path, **{name: value})
    gone = updated.clean()
    assert len(gone) == 2
    assert all(line.endswith(f"{name} was {PLATFORM[name]}, is {value}") for line in gone)
    assert names(tmp_path) == []
    assert list((tmp_path / "engines").iterdir()) == []  # the old timing cache too
    assert updated.clean() == []


def test_a_library_that_wasnt_asked_before_counts_as_another_platform(tmp_path: Path):
    store(cache_in(tmp_path), "a" * 64)
    assert cache_in(tmp_path, cuda="13.2").clean()[0].endswith("cuda was absent, is 13.2")


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "engine" / "engine_sm87.engine").write_bytes(b"engin3"),
        lambda entry: (entry / "engine" / "engine_sm87.engine").write_bytes(b"eng"),
        lambda entry: (entry / "engine" / "engine_sm87.engine").unlink(),
        lambda entry: (entry / "engine" / "more.engine").write_bytes(b"x"),
        lambda entry: (entry / "engine.json").write_bytes((entry / "engine.json").read_bytes()[:40]),
        lambda entry: (entry / "engine.json").write_bytes(b"[]"),
        lambda entry: (entry / "engine.json").unlink(),
    ],
    ids=["other bytes", "cut short", "file gone", "file too many", "record cut short", "record odd", "record gone"],
)
def test_a_damaged_engine_is_never_used_and_is_deleted(tmp_path: Path, damage: Callable[[Path], object]):
    cache = cache_in(tmp_path)
    damage(store(cache, "a" * 64).parent)
    assert cache.find("a" * 64, PROFILE) is None
    assert names(tmp_path) == []
    damage(store(cache, "a" * 64).parent)
    assert len(cache.clean()) == 1
    assert names(tmp_path) == []


def test_an_entry_under_another_ones_name_is_not_used(tmp_path: Path):
    cache = cache_in(tmp_path)
    entry = store(cache, "a" * 64).parent
    name = entry.name
    store(cache, "b" * 64).parent.rename(tmp_path / "moved")
    entry.rename(tmp_path / "first")
    (tmp_path / "moved").rename(entry.parent / name)
    assert cache.find("a" * 64, PROFILE) is None


def test_the_least_lately_used_engines_make_room_and_the_new_one_stays(tmp_path: Path):
    size = 10_000
    cache = cache_in(tmp_path, max_bytes=3 * size + 3000)
    entries = {name: store(cache, name * 64, bytes(size)).parent for name in "abc"}
    for age, name in enumerate("cab"):  # b was used last
        os.utime(entries[name] / "engine.json", (1000 + age, 1000 + age))
    assert cache.find("c" * 64, PROFILE) is not None  # now c was
    entries["d"] = store(cache, "d" * 64, bytes(size)).parent
    assert sorted(name for name, entry in entries.items() if entry.exists()) == ["b", "c", "d"]
    assert cache.size_bytes <= 3 * size + 3000
    store(cache, "e" * 64, bytes(9 * size))  # larger than all the room there is
    assert cache.find("e" * 64, PROFILE) is not None
    assert len(names(tmp_path)) == 1


def test_builds_share_their_timing_cache(tmp_path: Path):
    cache = cache_in(tmp_path)
    store(cache, "a" * 64)
    with cache.workplace() as place:
        assert (place.timing / "cache_sm87.timing").read_bytes() == b"times of " + b"a" * 64


def test_storing_an_artefact_again_replaces_its_engine(tmp_path: Path):
    cache = cache_in(tmp_path)
    store(cache, "a" * 64, b"old")
    store(cache, "a" * 64, b"new")
    found = cache.find("a" * 64, PROFILE)
    assert found is not None
    assert (found / "engine_sm87.engine").read_bytes() == b"new"


def test_a_build_that_fails_or_leaves_nothing_leaves_no_trace(tmp_path: Path):
    cache = cache_in(tmp_path)
    with pytest.raises(ValueError, match="left no engine"), cache.workplace() as place:
        cache.store(place, "a" * 64, PROFILE)
    with pytest.raises(OSError, match="full"), cache.workplace() as place:
        fill_up(place.engine / "half")
    assert list((tmp_path / "engines").iterdir()) == []


def test_rubbish_of_a_killed_build_is_swept_and_never_found(tmp_path: Path):
    cache = cache_in(tmp_path)
    store(cache, "a" * 64)
    for name in (".building-1234", ".deleting-1234"):
        folder = tmp_path / "engines" / name / "engine"
        folder.mkdir(parents=True)
        (folder / "engine_sm87.engine").write_bytes(b"half")
    assert cache.clean() == []
    assert len(names(tmp_path)) == 1


KILLED = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from replayfleet.export.engines.cache import EngineCache
    from replayfleet.export.running.provider_options import BatchProfile

    folder, platform = Path(sys.argv[1]), {"device": "Orin"}

    def work(attempt):
        cache = EngineCache(folder / str(attempt), platform, max_bytes=6000)
        for content in (b"old", b"new"):
            with cache.workplace() as place:
                (place.engine / "engine").write_bytes(content * 1000)
                (place.timing / "timing").write_bytes(content)
                cache.store(place, "a" * 64, BatchProfile())

    def dies_at(count):
        left = [count]
        def hook(frame, event, argument):
            if event == "c_call":
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
        sys.setprofile(hook)

    for attempt in range(10_000):
        child = os.fork()
        if child == 0:
            dies_at(attempt * 13 + 1)
            work(attempt)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            print(attempt)
            break
    """
)
"""Every thirteenth call of C code, beginning with the first, is the last: the process ends as if killed there."""


def test_whatever_the_instruction_at_which_the_process_is_killed_engines_are_whole(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=True, text=True)
    attempts = int(done.stdout)
    assert attempts > 20
    states = set()
    for attempt in range(attempts):
        cache = EngineCache(tmp_path / str(attempt), {"device": "Orin"})
        found = cache.find("a" * 64, BatchProfile())
        states.add(None if found is None else (found / "engine").read_bytes())
        assert cache.clean() == []
        left = [path.name for path in (tmp_path / str(attempt)).iterdir() if not path.name.startswith("timing-")]
        assert len(left) == (found is not None)
    assert states == {None, b"old" * 1000, b"new" * 1000}


def test_the_record_says_what_an_engine_is_of(tmp_path: Path):
    entry = store(cache_in(tmp_path), "a" * 64).parent
    record = json.loads((entry / "engine.json").read_text())
    assert record["artefact"] == "a" * 64
    assert record["platform"] == PLATFORM
    assert record["profile"] == {"low": 1, "best": 1, "high": 16}

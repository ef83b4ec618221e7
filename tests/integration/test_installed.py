"""The wheel in a fresh environment: one name, whole, and deaf to files of the folder that a program is started in."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.installed import ROOT, Environment, built_sdist, built_wheel, copied_sources, fresh_environment

PROGRAMS = ("aggregator", "edge-client", "fleet-sim", "model-export")
PLANTED = (
    *(
        "aggregator.py",
        "devices.py",
        "edge_client.py",
        "export.py",
        "federation.py",
        "models/__init__.py",
        "scripts.py",
    ),
    *("click.py", "msgspec.py", "numpy.py", "onnxruntime.py", "replayfleet.py", "torch.py"),
)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = copied_sources(tmp_path_factory.mktemp("sources") / "replayfleet")
    return built_sdist(sources, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = fresh_environment(tmp_path_factory.mktemp("environment"))
    environment.install(wheel)
    return environment


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Path]:
    """A folder with files named like ours and like our libraries; the test fails if any of them is executed."""
    folder, marker = tmp_path / "planted", tmp_path / "executed"
    for name in PLANTED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(77)\n")
    yield folder
    assert not marker.exists(), f"these files of the current folder were executed: {marker.read_text()}"


def files_of_the_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_it_puts_one_name_beside_other_packages(installed: Environment) -> None:
    found = {path.name for path in installed.site_packages.iterdir()} - {"libraries.pth", "__pycache__"}
    (information,) = [name for name in found if name.endswith(".dist-info")]
    assert found == {"replayfleet", information}


def test_a_wheel_of_the_checkout_is_that_of_the_sdist(wheel: Path, tmp_path: Path) -> None:
    direct = built_wheel(copied_sources(tmp_path / "sources"), tmp_path)
    assert files_of_the_wheel(direct) == files_of_the_wheel(wheel)


def test_all_that_the_repository_holds_below_the_linked_folders_is_in_it(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    linked = tuple(f"{path.name}/" for path in (ROOT / "replayfleet").iterdir() if path.is_symlink())
    tracked = {f"replayfleet/{name}" for name in listed.stdout.splitlines() if name.startswith(linked)}
    missing = {name for name in tracked if (ROOT / name).exists()} - files_of_the_wheel(wheel)
    of_checkouts = ("replayfleet/scripts/setup.sh", "replayfleet/scripts/locks/")  # nothing else is left out
    assert {name for name in missing if not name.startswith(of_checkouts)} == set()
    assert "replayfleet/py.typed" in files_of_the_wheel(wheel)


def test_a_checkout_of_links_is_needed_only_to_build(sdist: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_does_and_which_version_it_is(
    name: str, installed: Environment, planted: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", planted):
        shown = installed.run(name, "--help", cwd=folder)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("Usage:")
        version = installed.run(name, "--version", cwd=folder)
        assert version.stdout.splitlines() == [f"{name}, version 0.1.0"], version.stderr
    assert not list((tmp_path / "empty").iterdir())

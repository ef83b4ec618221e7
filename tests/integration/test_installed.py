"""The wheel in a fresh environment: one name, whole, and deaf to files of the folder that a program is started in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.image_sets import write_fashion_mnist
from support.installed import ROOT, SAFELY, Environment, built_sdist, built_wheel, copied_sources, fresh_environment
from support.processes import processes_of
from support.torch_free import check, serve

from replayfleet.federation.wire.transport.broker import find_mosquitto

PROGRAMS = ("aggregator", "edge-client", "fleet-sim", "model-export", "replayfleet")
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
    found = {path.name for path in environment.site_packages.iterdir()} - {"libraries.pth", "__pycache__"}
    (information,) = [name for name in found if name.endswith(".dist-info")]
    assert found == {"replayfleet", information}, "one name beside other packages"
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
    """The fixture looks, before anything else is installed."""


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
    shutil.unpack_archive(sdist, tmp_path, **SAFELY)
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


@pytest.fixture(scope="module")
def with_package(installed: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel, and beside it the package that docs/api.md shows, as somebody else builds and installs it."""
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8").split("## A package of your own")[1]
    folder = tmp_path_factory.mktemp("yardfleet")
    for language, name in (("toml", "pyproject.toml"), ("python", "yardfleet.py")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (folder / name).write_text(block)
    installed.install(built_wheel(folder, tmp_path_factory.mktemp("wheels")))
    return installed


def test_a_package_of_its_own_adds_a_method_a_task_model_and_a_data_set(
    with_package: Environment, planted: Path
) -> None:
    listed = with_package.run("fleet-sim", "--list", cwd=planted)
    assert "fedmedian" in listed.stdout.splitlines()
    words = ["--dataset", "gates", "--settings", "tiny", "--clients", "2", "--rounds", "1", "--set", "local_epochs=1"]
    words += ["--model", "gatenet"]
    done = with_package.run("fleet-sim", "fedmedian", *words, "--out", "out", cwd=planted)
    assert done.returncode == 0, done.stderr
    result = json.loads((planted / "out" / "result.json").read_bytes())
    assert result["run"]["task"]["class_names"] == ["open", "shut"]
    assert result["label"] == "fedmedian"
    exported = with_package.run("model-export", "task", "--from", "out", "--client", "1", "--out", "out", cwd=planted)
    assert exported.returncode == 0, exported.stderr
    facts = with_package.run("model-export", "check", "out/task.onnx", cwd=planted)
    assert '["open", "shut"]' in facts.stdout
    refused = with_package.run("fleet-sim", "fedmedium", "--out", "other", cwd=planted)
    assert refused.stderr == "fleet-sim: unknown method 'fedmedium'; did you mean 'fedmedian'?\n"


def test_a_source_of_a_package_is_served_by_a_client_that_never_loads_torch(
    with_package: Environment, planted: Path
) -> None:
    if find_mosquitto() is None:
        pytest.skip("no mosquitto on this machine")
    command = [str(with_package.folder / "bin" / "edge-client")]
    check(serve(command, {"PYTHONPATH": ""}, planted, source="gate://?rate=20"))
    wrong = ["--broker", "mqtt://localhost", "--client-id", "a", "--data-dir", "other", "--source", "gate://?rat=2"]
    refused = with_package.run("edge-client", "start", *wrong, cwd=planted)
    assert refused.returncode == 2
    assert "unknown key 'rat'; did you mean 'rate'?" in refused.stderr


@pytest.mark.timeout(600)
def test_a_whole_fleet_runs_from_a_folder_of_planted_files(installed: Environment, planted: Path) -> None:
    """``replayfleet demo``: broker, aggregator, clients with their processes, a simulation, the report."""
    write_fashion_mnist(planted / "data", train_per_class=120, test_per_class=20)
    out = planted / "runs" / "demo"
    words = ["demo", "--fast", "--data-root", "data", "--out", str(out)]
    done = installed.run("replayfleet", *words, cwd=planted, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"round 2: client-1 serves v\d+, accuracy [\d.]+ % on \d+ test images", done.stdout)
    assert f"report: {out / 'report.html'}" in done.stdout
    assert re.search(r"elapsed: \d+:\d\d", done.stdout)
    assert processes_of(out) == []

    text = (out / "report.html").read_text(encoding="utf-8")
    result = json.loads((out / "fedavg" / "result.json").read_text())
    assert f"{100 * result['rounds'][-1]['accuracy']:.1f}" in text
    assert text.count("<img") == 10 + 2 * 6
    assert text.count("<figcaption>round ") == 3
    assert 'src="http' not in text
    assert {path.stem for path in (out / "logs").iterdir()} == {"demo", "aggregator", "client-0", "client-1", "fedavg"}
    written = installed.run("replayfleet", "init", "yard", cwd=planted)
    assert (planted / "yard" / "systemd" / "edge-client.service").is_file(), written.stderr
    where = installed.run("edge-client", "doctor", "--config", "yard/systemd/edge.toml", "--help", cwd=planted)
    assert where.returncode == 0, where.stderr

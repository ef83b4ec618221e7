"""Files that lie where an operator starts a program, and are named like modules: no child process executes them."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from replayfleet.devices.jtop import Jtop
from replayfleet.edge_client.bench import running
from replayfleet.edge_client.bench.messages import Trial, Unusable, Variant
from replayfleet.edge_client.cameras.carla.guard import Duty, Guard
from replayfleet.edge_client.cameras.live.wire import CameraJob, Lost, Ready, WorkerProcess
from replayfleet.edge_client.doctor.findings import ok
from replayfleet.edge_client.doctor.running import Check, run_check
from replayfleet.edge_client.learning.local_training import TrainerProcess
from replayfleet.edge_client.learning.training.job import TrainerReady
from replayfleet.edge_client.serving.fork_server import ForkServer
from replayfleet.edge_client.serving.messages import Load
from replayfleet.edge_client.serving.process import ServingProcess
from replayfleet.export.engines.build import EngineBuild
from replayfleet.export.engines.cache import Workplace
from replayfleet.export.engines.maker import EngineFailed
from replayfleet.export.running.provider_options import BatchProfile
from replayfleet.federation.children import child_command
from replayfleet.federation.errors import ArtefactRejected
from replayfleet.scripts.launch.processes import Children

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    *("torch", "torchvision", "numpy", "msgspec", "onnxruntime", "cv2", "carla", "click", "jtop"),
    *("json", "runpy", "importlib", "socket", "signal", "site", "sitecustomize"),
    *("replayfleet", "federation", "edge_client", "export", "devices", "scripts"),
)
MARKS = "import os\nopen(os.environ['PLANTED'] + '/' + __name__, 'w').close()\nraise SystemExit('planted')\n"


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The current folder is full of planted files; tells which of them were executed."""
    here, marks = tmp_path / "here", tmp_path / "marks"
    (here / "models").mkdir(parents=True)
    (here / "models/__init__.py").write_text(MARKS)  # any checkout of YOLOv5 has one
    marks.mkdir()
    for name in NAMES:
        (here / f"{name}.py").write_text(MARKS)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PLANTED", str(marks))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda: sorted(path.name for path in marks.iterdir())


def test_python_itself_would_execute_them(executed: Callable[[], list[str]]):
    subprocess.run([sys.executable, "-m", "replayfleet.edge_client.serving.worker"], check=False, stderr=-3)
    assert executed()


def test_no_child_executes_them_under_its_command(executed: Callable[[], list[str]]):
    for module in (
        *("replayfleet.aggregator.cli", "replayfleet.edge_client.cli", "replayfleet.export.cli"),
        *("replayfleet.federation.simulator.cli", "replayfleet.scripts.fleet.tcp_link"),
    ):
        subprocess.run(child_command(module, "--help"), check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert executed() == []


def test_a_child_finds_the_package_where_its_parent_did_and_sees_only_its_own_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = child_command("replayfleet.scripts.fleet.tcp_link", "--nothing", program="bad-line")
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert said.stderr.startswith("tcp-link: No such option '--nothing'")


def _camera() -> None:
    with contextlib.closing(WorkerProcess(CameraJob("file", "front", {}))) as worker:
        assert worker.receive(60.0) == Ready()
        worker.want()
        assert isinstance(worker.receive(60.0), Lost)  # there is no such kind


def _carla() -> None:
    with contextlib.closing(WorkerProcess(CameraJob("carla", "front", {}))) as worker:
        assert worker.receive(60.0) == Ready()
        worker.want()
        lost = worker.receive(60.0)
        assert isinstance(lost, Lost)
        assert "carla:// needs the package carla" in lost.reason or "time-out" in lost.reason


def _carla_guard() -> None:
    guard = Guard()
    guard.promise(Duty("127.0.0.1", 1, 0, None, ()))
    guard.release()


def _serving() -> None:
    with pytest.raises(ArtefactRejected, match="is not on disk"):
        ServingProcess(Load(str(Path.cwd() / "blobs"), "0" * 64, "1" * 64, (3, 8, 8), 1, ("CPUExecutionProvider",)))


def _forked() -> None:
    job = Load(str(Path.cwd() / "blobs"), "0" * 64, "1" * 64, (3, 8, 8), 1, ("CPUExecutionProvider",))
    with pytest.raises(ArtefactRejected, match="is not on disk"):
        ServingProcess(job, ForkServer().start)


def _trainer() -> None:
    events: queue.Queue[object] = queue.Queue()
    trainer = TrainerProcess(events.put)
    try:
        assert events.get(timeout=120) == TrainerReady()
    finally:
        trainer.stop()


def _bench() -> None:
    found = running._tried(Trial("CPU", Variant("onnx", "fp32", "nothing.onnx"), None, (1,), 1, 0.1))
    assert isinstance(found, Unusable)
    assert "nothing.onnx" in found.why


def _engine() -> None:
    place = Workplace(*(Path.cwd() / name for name in ("work", "engine", "timing")))
    place.folder.mkdir()
    with pytest.raises(EngineFailed, match=r"export\.engines\.nowhere"):
        EngineBuild("replayfleet.export.engines.nowhere:Maker").run(b"", place, BatchProfile(1, 1, 1), lambda *_: None)


def _jtop() -> None:
    with contextlib.closing(Jtop(timeout_s=30)) as jtop:
        assert jtop.read() == ({}, None)


def _doctor() -> None:
    assert run_check(Check("torch", lambda: [ok("torch", "looked")])) == [ok("torch", "looked")]


def _script() -> None:
    with Children(Path.cwd()) as children:
        assert children.start("sim", ["fleet-sim", "--help"]).process.wait(60) == 0


KINDS: Mapping[str, Callable[[], None]] = {
    name.lstrip("_"): each
    for name, each in list(globals().items())
    if name.startswith("_") and getattr(each, "__module__", "") == __name__
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_child_executes_them(kind: str, executed: Callable[[], list[str]]):
    KINDS[kind]()
    assert executed() == []


def test_every_interpreter_is_started_by_the_command_that_leaves_the_current_folder_out():
    parts = ("aggregator", "devices", "edge_client", "export", "federation", "models", "scripts")
    files = (path for part in parts for path in (ROOT / part).rglob("*.py"))
    starters = {str(path.relative_to(ROOT)) for path in files if "sys.executable" in path.read_text(encoding="utf-8")}
    assert starters == {"federation/children.py", "edge_client/doctor/board.py"}, os.linesep.join(sorted(starters))

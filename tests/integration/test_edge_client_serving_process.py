"""Serving processes for real, under a loop whose frames flow: what goes wrong with a model costs no frame.

Models are real ONNX graphs; those that misbehave do so in a real process. Times hold on a machine with an idle core; on
a busy one only what happens is asserted, not how soon.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest
from support.quiet import Quiet
from support.served_models import SCENE, TASK, Colours

from replayfleet.edge_client.cameras.recorded.scene import SceneCamera
from replayfleet.edge_client.flow import Prediction, Shown
from replayfleet.edge_client.frames.answerer import Answerer
from replayfleet.edge_client.frames.inference import InferenceLoop
from replayfleet.edge_client.frames.views import WholePicture
from replayfleet.edge_client.serving.loading import LoadedModel, load_model
from replayfleet.edge_client.serving.memory_watch import MemoryWatch
from replayfleet.edge_client.serving.messages import Load
from replayfleet.edge_client.serving.model import WorkerModel, Workers
from replayfleet.edge_client.serving.probation.failures import FAILURES_BEFORE_ROLLBACK
from replayfleet.edge_client.serving.probation.guard import Guard
from replayfleet.edge_client.serving.probation.probation import ProbationRules
from replayfleet.edge_client.serving.slot import Candidate, Model, ModelLost, ModelSlot
from replayfleet.edge_client.serving.worker import _loaded
from replayfleet.federation.errors import ArtefactRejected, Reason
from tests.support.waiting import until

RATE_HZ = 100.0
DOUBLE = (sys.executable, str(Path(__file__).parents[1] / "support/doubled_serving_worker.py"))
NEVER_CONFIRMED = ProbationRules(duration_s=1e6, at_most_s=1e6, check_every_s=0.2)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Colours:
    return Colours(tmp_path_factory.mktemp("blobs"))


class Rig:
    """A camera, the real loop and a guard around a slot."""

    def __init__(
        self, rules: ProbationRules = NEVER_CONFIRMED, memory: MemoryWatch | None = None, rate_hz: float = RATE_HZ
    ) -> None:
        self.slot = ModelSlot()
        self.guard = Guard(self.slot, rules, memory)
        self.seen: list[Prediction] = []
        camera = SceneCamera(rate_hz)
        camera.show(SCENE)
        answerer = Answerer(self.slot, WholePicture(TASK), on_answer=self.guard.saw)
        self.loop = InferenceLoop([camera], answerer, self._take)

    def _take(self, shown: Shown) -> None:
        if shown.prediction is not None:
            self.seen.append(shown.prediction)

    def start(self, first: Candidate) -> None:
        self.slot.install(first)
        self.guard.start()
        self.loop.start()
        self.answered(5)

    def until(self, done: Callable[[], bool], limit_s: float = 60.0) -> None:
        until(done, limit_s)

    def answered(self, more: int) -> None:
        target = len(self.seen) + more
        self.until(lambda: len(self.seen) >= target)

    def check_answers(self, shifts: dict[int, int]) -> None:
        """Every frame has the one answer that its version gives, and no frame failed."""
        assert self.loop.counts.num_failed == 0
        for prediction in self.seen:
            shown, shift = prediction.frame_id % len(SCENE) % 3, shifts[prediction.model_version]
            assert prediction.answers.class_ids.tolist() == [(shown + shift) % 3]

    def first_answer_of(self, version: int) -> float:
        return next(each.answered_at for each in self.seen if each.model_version == version)

    def close(self) -> None:
        self.loop.stop()
        self.guard.stop()
        self.slot.clear()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: object, **options: object) -> Rig:
        made.append(Rig(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def worker_of(slot: ModelSlot) -> WorkerModel:
    assert isinstance(slot.active.model, WorkerModel)
    return slot.active.model


def test_a_process_answers_as_its_model_does_to_the_bit_also_in_pieces(colours: Colours) -> None:
    manifest = colours.manifest(1)
    graph, parameters = (entry.digest for entry in manifest.blobs)
    model = colours.workers().model(graph, parameters, TASK.image_shape)
    direct = load_model(model.job).run
    images = np.random.default_rng(1).uniform(-1, 1, (1500, 3, 32, 32)).astype(np.float32)
    try:
        for count in (1, 8, 200):
            assert np.array_equal(model(images[:count]), direct(images[:count]))
        pieces = [direct(images[first : first + 256]) for first in range(0, 1500, 256)]
        assert np.array_equal(model(images), np.concatenate(pieces))
        with pytest.raises(ValueError, match=r"expected \(B"):
            model(images[:, :1])
        assert model(images[:1]).shape == (1, 3), "a bad question ends nothing"
        told = Path(f"/proc/{model.pid}/status").read_text(encoding="utf-8")
        assert "THP_enabled:\t1" not in told, "what loading took and gave back must not come back as large pages"
    finally:
        model.close()
    with pytest.raises(ModelLost, match="let go"):
        model(images[:1])


def test_a_model_that_is_let_go_while_it_loads_keeps_nobody_waiting(
    colours: Colours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISBEHAVES", "hangs on load")
    graph, parameters = (entry.digest for entry in colours.manifest(1).blobs)
    model = colours.workers(*DOUBLE, load_timeout_s=10.0).model(graph, parameters, TASK.image_shape)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            model(np.zeros((1, *TASK.image_shape), np.float32))
        except ModelLost as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    began = time.monotonic()
    model.close()
    assert time.monotonic() - began < 8
    asking.join(60)
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("how", "reason", "words"),
    [
        ("dies on load", Reason.CRASHED, "SIGSEGV"),
        ("hangs on load", Reason.HUNG, "didn't load within 3 s"),
        ("lies", Reason.PROBE_MISMATCH, "golden vector"),
        ("is truncated", Reason.WRONG_DIGEST, "digest"),
    ],
)
def test_a_model_that_does_not_pass_its_checks_is_never_served_and_frames_flow_on(
    how: str, reason: Reason, words: str, rig: Callable[..., Rig], colours: Colours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISBEHAVES", how)
    made = rig()
    made.start(colours.candidate(1))
    patience_s = 3.0 if how == "hangs on load" else 120.0
    wrong = colours.candidate(2, colours.workers(*DOUBLE, load_timeout_s=patience_s), lies=how == "lies")
    if how == "is truncated":
        wrong = colours.candidate(3, shift=2)
        path = colours.store.path(colours.manifest(3, shift=2).blobs[1].digest)
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtefactRejected, match=words) as caught:
        made.slot.install(wrong)
    assert caught.value.reason is reason
    made.answered(10)
    assert {each.model_version for each in made.seen} == {1}
    made.check_answers({1: 0})


def test_a_model_for_which_there_is_no_memory_is_not_refused_but_waits_for_it(
    colours: Colours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISBEHAVES", "finds no memory")
    slot = ModelSlot()
    starved = colours.candidate(1, colours.workers(*DOUBLE))
    with pytest.raises(OSError, match="none is left for 3 MB"):
        slot.install(starved)
    monkeypatch.setenv("MISBEHAVES", "not any more")
    try:
        assert slot.install(colours.candidate(1, colours.workers(*DOUBLE))).version == 1
    finally:
        slot.clear()


def test_pictures_for_which_a_new_model_finds_no_memory_are_answered_by_the_one_before_and_count_against_none(
    rig: Callable[..., Rig], colours: Colours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISBEHAVES", "finds no memory for pictures")
    made = rig()
    made.start(colours.candidate(1))
    made.slot.install(colours.candidate(2, colours.workers(*DOUBLE)))
    made.answered(3 * FAILURES_BEFORE_ROLLBACK)
    assert (made.slot.num_rollbacks, made.slot.on_probation.version) == (0, 2)
    made.check_answers({1: 0})


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("dies", Reason.CRASHED),
        ("hangs", Reason.HUNG),
        ("not finite", Reason.NOT_FINITE),
        ("slow", Reason.TOO_SLOW),
    ],
)
def test_a_model_that_fails_on_probation_is_rolled_back_within_a_second_and_costs_no_frame(
    how: str, reason: Reason, rig: Callable[..., Rig], colours: Colours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISBEHAVES", how)
    made = rig()
    made.start(colours.candidate(1))
    quiet = Quiet()  # a model that is slow at first is waited for the longer
    made.slot.install(colours.candidate(2, colours.workers(*DOUBLE), shift=1))
    began = time.monotonic()
    made.until(lambda: made.slot.last_rollback is not None)
    took_s, bound_s = time.monotonic() - began, quiet.within(1.0)
    assert made.slot.last_rollback.reason is reason
    assert took_s < bound_s
    made.answered(10)
    assert made.seen[-1].model_version == 1
    made.check_answers({1: 0, 2: 1})
    with pytest.raises(ArtefactRejected, match="not newer"):
        made.slot.install(colours.candidate(2))


def test_a_model_that_passes_its_golden_vector_and_then_drifts_is_rolled_back_within_a_second(
    rig: Callable[..., Rig], colours: Colours
) -> None:
    made = rig(rate_hz=30.0)
    made.start(colours.candidate(1))
    made.slot.install(colours.candidate(2, bias=1000.0))
    quiet = Quiet()
    made.until(lambda: made.slot.last_rollback is not None)
    rolled_back_at, bound_s = time.monotonic(), quiet.within(1.0)
    assert made.slot.last_rollback.reason is Reason.DRIFTED
    assert "100 % of" in made.slot.last_rollback.detail
    assert rolled_back_at - made.first_answer_of(2) < bound_s
    made.answered(10)
    assert made.seen[-1].model_version == 1
    assert made.loop.counts.num_failed == 0


def test_a_model_that_tells_pictures_apart_otherwise_than_before_passes_its_probation(
    rig: Callable[..., Rig], colours: Colours
) -> None:
    made = rig(ProbationRules(duration_s=0.5, num_answered=60, check_every_s=0.1))
    made.start(colours.candidate(1))
    made.slot.install(colours.candidate(2, shift=1))
    assert made.slot.on_probation is not None
    before = made.slot.previous.model
    assert isinstance(before, WorkerModel)
    made.until(lambda: made.slot.on_probation is None)
    made.until(lambda: before.pid is None)
    made.answered(5)
    assert made.slot.num_rollbacks == 0
    made.check_answers({1: 0, 2: 1})
    back = made.slot.roll_back(2)
    assert back is not None
    made.answered(5)
    assert made.seen[-1].model_version == 1, "one that rests comes back when it is asked"
    assert before.pid is not None


def test_a_killed_process_of_a_confirmed_model_is_replaced_and_costs_no_frame(
    rig: Callable[..., Rig], colours: Colours
) -> None:
    made = rig()
    made.start(colours.candidate(1))
    model = worker_of(made.slot)
    pid = model.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    made.until(lambda: model.num_deaths == 1)
    made.answered(10)
    assert model.pid != pid
    made.check_answers({1: 0})
    frame_ids = [each.frame_id for each in made.seen]
    assert frame_ids == sorted(set(frame_ids))


def test_a_process_that_grows_is_recycled_between_two_frames(
    rig: Callable[..., Rig], colours: Colours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISBEHAVES", "leaks")
    made = rig(memory=MemoryWatch(limit_bytes=32 << 20, settles_s=0.1, look_every_s=0.1))
    made.start(colours.candidate(1, colours.workers(*DOUBLE)))
    pid = worker_of(made.slot).pid
    made.until(lambda: made.guard.num_recycles >= 1)
    made.answered(5)
    assert worker_of(made.slot).pid != pid
    assert pid is not None
    made.until(lambda: not psutil.pid_exists(pid))
    assert worker_of(made.slot).num_deaths == 0
    made.check_answers({1: 0})


def test_under_hot_swaps_each_frame_has_the_answer_of_the_version_that_it_names(
    rig: Callable[..., Rig], colours: Colours
) -> None:
    """``python -m benchmarks.camera.hot_swaps`` does it 200 times with the task model, and measures memory."""
    made = rig(ProbationRules(duration_s=0.05, num_answered=1, check_every_s=0.02))
    quiet = Quiet()
    made.start(colours.candidate(0))
    pids = [worker_of(made.slot).pid]
    decided_at: dict[int, float] = {}
    for version in range(1, 9):
        fresh = colours.candidate(version, shift=version % 3)

        def check(model: Model, fresh: Candidate = fresh) -> None:
            fresh.check(model)
            decided_at[fresh.version] = time.monotonic()

        made.slot.install(dataclasses.replace(fresh, check=check))
        pids.append(worker_of(made.slot).pid)
        made.until(lambda version=version: made.seen[-1].model_version == version)
    made.until(lambda: made.slot.on_probation is None)
    made.check_answers({version: version % 3 for version in range(9)})
    versions = [each.model_version for each in made.seen]
    assert versions == sorted(versions)
    assert set(versions) == set(range(9))
    assert made.slot.num_rollbacks == 0
    if quiet:
        assert made.loop.counts.num_dropped == 0
        assert max(made.first_answer_of(version) - decided_at[version] for version in decided_at) < 0.05
    assert len(set(pids)) == 9
    made.until(lambda: not any(psutil.pid_exists(pid) for pid in pids[:-2] if pid is not None))


def test_a_signal_to_the_whole_group_is_left_to_the_client(rig: Callable[..., Rig], colours: Colours) -> None:
    made = rig()
    made.start(colours.candidate(1))
    made.slot.install(colours.candidate(2))
    model = worker_of(made.slot)
    assert model.pid is not None
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(model.pid, sign)
    made.answered(20)
    assert (model.num_deaths, made.slot.num_rollbacks) == (0, 0)


def test_only_the_first_process_of_a_model_takes_the_clients_word_for_what_the_disk_holds(colours: Colours) -> None:
    graph, parameters = (entry.digest for entry in colours.manifest(1).blobs)
    workers = Workers(
        colours.folder, num_threads=1, providers=("CPUExecutionProvider",), verified=colours.store.verified
    )
    model = workers.model(graph, parameters, (3, 32, 32))
    assert list(model.job.verified) == [graph, parameters]
    try:
        model(np.zeros((1, 3, 32, 32), np.float32))
        assert not model.job.verified
    finally:
        model.close()


def test_a_process_ends_with_its_client_also_if_that_is_killed(colours: Colours) -> None:
    graph, parameters = (entry.digest for entry in colours.manifest(1).blobs)
    script = (
        "import sys, numpy as np\nfrom pathlib import Path\nfrom replayfleet.edge_client.serving.model import Workers\n"
        "workers = Workers(Path(sys.argv[1]), num_threads=1, providers=('CPUExecutionProvider',))\n"
        "model = workers.model(sys.argv[2], sys.argv[3], (3, 32, 32))\n"
        "model(np.zeros((1, 3, 32, 32), np.float32))\nprint(model.pid, flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(colours.folder), graph, parameters]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        pid = int(client.stdout.readline())
        assert psutil.pid_exists(pid)
        client.kill()
    until(lambda: not psutil.pid_exists(pid))


def test_a_process_whose_client_died_before_it_said_what_to_serve_ends_without_a_word() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", "from replayfleet.edge_client.serving.worker import main; main()"]
    with subprocess.Popen(
        [*command, str(theirs.fileno())], pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE
    ) as child:
        theirs.close()
        ours.close()
        assert child.communicate(timeout=60)[1] == b""
    assert child.returncode == 0


def test_a_refusal_that_no_client_hears_is_no_error() -> None:
    def load(_: Load) -> LoadedModel:
        raise ArtefactRejected(Reason.LOAD_FAILED, "blob is not on disk")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.close()
        with pytest.raises(SystemExit) as ended:
            _loaded(cast("Load", None), theirs, load)
    assert ended.value.code == 0


def test_a_serving_process_has_neither_torch_nor_mqtt() -> None:
    code = (
        "import sys, replayfleet.edge_client.serving.worker\nprint({'torch', 'onnx', 'paho', 'cv2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"

from __future__ import annotations

import errno
import itertools
import os
import queue
import sys
import threading
import time
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from replayfleet.edge_client.learning import local_training
from replayfleet.edge_client.learning.local_training import (
    HANGS_S,
    IDLE_S,
    SHARES_S,
    SOON_S,
    STARVES_S,
    LocalTraining,
    TrainerEvent,
    TrainerExited,
    TrainerProcess,
)
from replayfleet.edge_client.learning.training import trainer
from replayfleet.edge_client.learning.training.job import (
    FromTrainer,
    TrainCourse,
    TrainDone,
    TrainerReady,
    TrainFailed,
    TrainJob,
)
from replayfleet.edge_client.serving.proc import Progress
from replayfleet.federation.backoff import Backoff
from replayfleet.federation.children import Child
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec, Manifest


def job(round_index: int) -> TrainJob:
    spec = FleetSpec("fleet", "fedavg", {}, {}, 7)
    return TrainJob("/data", "c1", spec, Manifest("down", "fleet", "c1", round_index, 1, (), b"\x80"), 2, "onnx", 1, "")


class FakeTrainer:
    next_pid = 0

    def __init__(self, idle: bool) -> None:
        FakeTrainer.next_pid += 1
        self.idle = idle
        self.pid = FakeTrainer.next_pid
        self.jobs: list[TrainJob] = []
        self.paused: list[bool] = []
        self.stopped = False
        self.made: Progress = "works"
        self.num_killed = 0

    def progress(self) -> Progress:
        return self.made

    def kill(self) -> None:
        self.num_killed += 1

    def submit(self, job: TrainJob) -> None:
        self.jobs.append(job)

    def pause(self) -> None:
        self.paused.append(True)

    def resume(self) -> None:
        self.paused.append(False)

    def stop(self) -> None:
        self.stopped = True


class Spawner:
    def __init__(self) -> None:
        self.trainers: list[FakeTrainer] = []

    def __call__(self, idle: bool) -> FakeTrainer:
        self.trainers.append(FakeTrainer(idle))
        return self.trainers[-1]

    @property
    def last(self) -> FakeTrainer:
        return self.trainers[-1]


def test_delays_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0
    assert Backoff(1.0, 60.0).next_s() == 1.0
    with pytest.raises(ValueError, match="first_s"):
        Backoff(0.0)


def test_a_job_is_handed_over_once_the_process_is_ready_and_ends_once() -> None:
    spawn = Spawner()
    training = LocalTraining(spawn)
    training.begin(job(3))
    assert spawn.last.jobs == []
    assert training.round == 3
    assert training.handle(TrainerReady(), 0.0) is None
    assert spawn.last.jobs == [job(3)]
    assert training.handle(TrainDone(2), 1.0) is None, "another round's answer ends nothing"
    assert training.handle(TrainDone(3, "note"), 1.0) == TrainDone(3, "note")
    assert training.handle(TrainDone(3, "note"), 1.0) is None
    training.begin(job(4))
    assert spawn.last.jobs == [job(3), job(4)]
    assert len(spawn.trainers) == 1, "the process stays"


def test_one_round_at_a_time() -> None:
    training = LocalTraining(Spawner())
    training.begin(job(3))
    with pytest.raises(ValueError, match="round 3 is in work"):
        training.begin(job(4))


def test_a_process_that_dies_is_replaced_after_its_back_off_and_gets_the_job_again() -> None:
    spawn = Spawner()
    training = LocalTraining(spawn, Backoff(2.0, 60.0))
    training.begin(job(3))
    training.handle(TrainerReady(), 0.0)
    assert training.handle(TrainerExited(spawn.last.pid, -9), 10.0) is None
    training.tick(11.9)
    assert len(spawn.trainers) == 1
    training.tick(12.0)
    assert len(spawn.trainers) == 2
    training.handle(TrainerReady(), 13.0)
    assert spawn.last.jobs == [job(3)]
    assert training.handle(TrainDone(3), 14.0) == TrainDone(3)
    assert training.num_restarts == 1


@pytest.mark.parametrize("ahead", [True, False])
def test_a_process_that_cannot_be_started_is_tried_again(ahead: bool) -> None:
    """Its round was in work for good, and so was training."""
    failing, spawn = [False, True, True], Spawner()

    def spawn_or_fail(idle: bool) -> FakeTrainer:
        if failing.pop():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return spawn(idle)

    training = LocalTraining(spawn_or_fail, Backoff(2.0, 60.0))
    if ahead:
        training.start(10.0)
    training.begin(job(3), 10.0)
    training.tick(11.9)
    assert len(failing) == 2
    training.tick(12.0)
    training.tick(15.9)
    assert spawn.trainers == []
    training.tick(16.0)
    training.handle(TrainerReady(), 17.0)
    assert spawn.last.jobs == [job(3)]
    assert training.num_restarts == 0, "none has died"


def test_a_process_that_no_thread_can_hear_ends_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its round was in work for good here too, beside a process that nobody knew of."""
    children: list[Child[Any]] = []

    def child(*how: Any, **more: Any) -> Child[Any]:
        children.append(Child(*how, **more))
        return children[-1]

    monkeypatch.setattr(local_training, "Child", child)
    training = LocalTraining(
        lambda _idle: TrainerProcess(print, command=(sys.executable, "-c", ECHO)), Backoff(2.0, 60.0)
    )
    with monkeypatch.context() as full:
        full.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start new thread")))
        training.begin(job(3), 10.0)
    assert children[0].process.returncode is not None
    training.tick(12.0)
    assert training.pid == children[1].pid
    training.stop()


def test_a_round_that_kills_the_process_too_often_is_given_up_but_the_next_is_tried() -> None:
    spawn = Spawner()
    training = LocalTraining(spawn, Backoff(1.0, 1.0), max_attempts=2)
    training.begin(job(3))
    assert training.handle(TrainerExited(spawn.last.pid, -9), 0.0) is None
    training.tick(1.0)
    ended = training.handle(TrainerExited(spawn.last.pid, -9), 2.0)
    assert ended == TrainFailed(3, "the training process died 2 times")
    assert training.problem == "the training process died 2 times"
    training.begin(job(4))
    assert len(spawn.trainers) == 2, "still backing off"
    training.tick(3.0)
    training.handle(TrainerReady(), 3.0)
    assert spawn.last.jobs == [job(4)]


def test_a_process_that_hangs_is_ended_and_one_that_stands_still_by_order_or_for_a_while_is_not() -> None:
    spawn = Spawner()
    training = LocalTraining(spawn)
    seconds = itertools.count()

    def passes(num_seconds: float) -> None:
        for _ in range(int(num_seconds)):
            training.tick(float(next(seconds)))

    training.begin(job(3))
    training.handle(TrainerReady(), 0.0)
    process = spawn.last
    process.made = "still"
    passes(HANGS_S - 10)
    process.made = "works"
    passes(10)
    process.made = "still"
    training.pause(paused=True)
    passes(2 * HANGS_S)
    training.pause(paused=False)
    passes(HANGS_S - 10)
    assert not process.num_killed
    passes(20)
    assert process.num_killed == 1
    training.handle(TrainerExited(process.pid, -9), float(next(seconds)))
    passes(60)
    training.handle(TrainerReady(), float(next(seconds)))
    assert spawn.last.jobs == [job(3)]
    training.handle(TrainDone(3), float(next(seconds)))
    spawn.last.made = "still"
    passes(2 * HANGS_S)
    assert not spawn.last.num_killed, "it has no job"


def test_a_process_that_others_leave_no_processor_begins_anew_and_takes_a_share_for_a_while() -> None:
    """On a machine whose cores are always full a device stopped learning: its first import of torch never ended."""
    spawn, seconds = Spawner(), itertools.count()
    training = LocalTraining(spawn)

    def passes(num_seconds: float) -> None:
        for _ in range(int(num_seconds)):
            training.tick(float(next(seconds)))

    training.begin(job(3))
    for made, lasts_s in (("starved", STARVES_S - 10), ("works", 10), ("starved", STARVES_S - 10)):
        spawn.last.made = made
        passes(lasts_s)
    assert spawn.last.idle
    assert not spawn.last.num_killed
    passes(20)
    assert spawn.last.num_killed == 1
    training.handle(TrainerExited(spawn.last.pid, -9), float(next(seconds)))
    passes(10)
    assert not spawn.last.idle
    training.handle(TrainerReady(), float(next(seconds)))
    spawn.last.made = "starved"
    passes(SHARES_S / 2)
    for round_index, idle in ((3, False), (4, True)):
        training.handle(TrainDone(round_index), float(next(seconds)))
        passes(SHARES_S / 4)
        training.begin(job(round_index + 1), float(next(seconds)))
        assert spawn.last.idle is idle, "others may be done after a while"
        training.handle(TrainerReady(), float(next(seconds)))
        spawn.last.made = "works" if idle else "starved"
        passes(SHARES_S / 2)
        assert not spawn.last.num_killed, "it has its share, and no other would have more"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux's SCHED_IDLE")
def test_a_process_that_yields_to_all_is_starved_beside_one_that_always_computes() -> None:
    core, events = min(os.sched_getaffinity(0)), queue.SimpleQueue[TrainerEvent]()
    command = (sys.executable, "-S", "-c", "while True: pass")
    yields, other = (TrainerProcess(events.put, command=command) for _ in range(2))
    for process in (yields, other):
        os.sched_setaffinity(process.pid, {core})
    os.sched_setscheduler(yields.pid, os.SCHED_IDLE, os.sched_param(0))
    made = iter(lambda: (time.sleep(1.0), yields.progress())[1], "starved")
    seen = list(itertools.islice(made, 60))
    for process in (yields, other):
        process.kill()
    assert {events.get(timeout=60).pid for _ in range(2)} == {yields.pid, other.pid}
    assert len(seen) < 60


def test_a_process_that_waits_is_still_and_one_that_computes_is_not() -> None:
    ends: queue.Queue[TrainerEvent] = queue.Queue()
    waits = TrainerProcess(ends.put, command=(sys.executable, "-S", "-c", "import time; time.sleep(600)"))
    computes = TrainerProcess(ends.put, command=(sys.executable, "-S", "-c", "while True: pass"))
    while (waits.progress(), computes.progress()) != ("still", "works"):  # both import first
        time.sleep(0.05)
    made = set()
    for _ in range(5):
        time.sleep(0.05)
        made.add(computes.progress())
    for process in (waits, computes):
        process.kill()
        assert ends.get(timeout=60) == TrainerExited(process.pid, -9)
    assert "still" not in made


def test_a_late_exit_of_an_earlier_process_changes_nothing() -> None:
    spawn = Spawner()
    training = LocalTraining(spawn, Backoff(1.0, 1.0))
    training.start()
    first = spawn.last.pid
    training.handle(TrainerExited(first, 1), 0.0)
    training.tick(1.0)
    training.handle(TrainerExited(first, 1), 1.0)
    training.tick(9.0)
    assert len(spawn.trainers) == 2


def test_stopping_ends_the_process() -> None:
    spawn = Spawner()
    training = LocalTraining(spawn)
    training.start()
    training.stop()
    assert spawn.last.stopped
    assert training.handle(TrainerExited(spawn.last.pid, 0), 0.0) is None
    training.tick(100.0)
    assert len(spawn.trainers) == 1


def test_a_job_is_told_the_time_that_is_left_when_a_process_gets_it() -> None:
    spawn = Spawner()
    training = LocalTraining(spawn, Backoff(1.0, 1.0))
    training.begin(job(3), now=100.0, deadline_at=130.0)
    training.handle(TrainerReady(), 104.0)
    training.handle(TrainerExited(spawn.last.pid, -9), 110.0)
    training.tick(111.0)
    training.handle(TrainerReady(), 150.0)
    assert [trainer.jobs[0].left_s for trainer in spawn.trainers] == [26.0, 0.0]


def test_a_deadline_that_moved_while_a_job_waited_for_its_process_is_followed() -> None:
    spawn = Spawner()
    training = LocalTraining(spawn)
    training.begin(job(3), now=100.0, deadline_at=130.0)
    training.follow(230.0)
    training.handle(TrainerReady(), 104.0)
    assert spawn.last.jobs[0].left_s == 126.0


def test_why_a_round_was_not_trained_is_known_until_the_next() -> None:
    training = LocalTraining(Spawner())
    training.begin(job(3))
    training.handle(TrainFailed(3, "no memory"), 1.0)
    assert training.problem == "no memory"
    training.begin(job(4))
    assert training.problem == ""
    training.handle(TrainDone(4), 2.0)
    assert training.problem == ""


def test_what_becomes_of_a_round_is_known_until_the_next_and_shortened_rounds_are_counted() -> None:
    training = LocalTraining(Spawner())
    training.begin(job(3))
    planned, done = TrainCourse(3, 5.0, 8, 1, 2), TrainCourse(3, 4.5, 8, 1, 2, done=True)
    assert training.handle(planned, 1.0) is None
    assert (training.course, training.num_shortened) == (planned, 0)
    assert training.handle(done, 2.0) is None
    training.handle(TrainDone(3), 2.0)
    assert (training.course, training.num_shortened) == (done, 1)
    assert msgspec.json.decode(msgspec.json.encode(done), type=FromTrainer) == done
    training.begin(job(4))
    assert training.course is None
    training.handle(TrainCourse(4, 8.0, 8, done=True), 3.0)
    assert training.num_shortened == 1


@pytest.mark.parametrize(("apart_s", "waits_s"), [(40.0, 80.0), (2.0, IDLE_S), (SOON_S + 1, IDLE_S)])
def test_where_rounds_come_soon_after_each_other_the_process_waits_for_the_next(apart_s: float, waits_s: float) -> None:
    spawn = Spawner()
    training = LocalTraining(spawn)
    training.begin(job(3), 0.0)
    training.handle(TrainerReady(), 1.0)
    training.handle(TrainDone(3), 100.0)
    training.tick(100.0 + IDLE_S)
    assert spawn.last.stopped  # nothing is known of the pace yet
    training.begin(job(4), 100.0 + apart_s)
    training.handle(TrainerReady(), 103.0 + apart_s)
    training.handle(TrainDone(4), 1000.0)
    training.tick(999.0 + waits_s)
    assert not spawn.last.stopped
    training.tick(1000.0 + waits_s)
    assert spawn.last.stopped


def test_an_idle_process_ends_and_the_next_job_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, given_back = Spawner(), list[bool]()
    monkeypatch.setattr(local_training, "give_memory_back", lambda: given_back.append(spawn.last.stopped))
    training = LocalTraining(spawn)
    training.start()
    training.tick(1000.0)  # still importing torch
    training.handle(TrainerReady(), 1000.0)
    training.tick(999.0 + IDLE_S)
    assert not spawn.last.stopped
    training.begin(job(3), 999.0 + IDLE_S)
    training.tick(2000.0)  # at work
    training.handle(TrainDone(3), 2000.0)
    training.tick(1999.0 + IDLE_S)
    assert not spawn.last.stopped
    training.tick(2000.0 + IDLE_S)
    assert given_back == [True]
    assert training.pid is None
    training.handle(TrainerExited(spawn.last.pid, 0), 2001.0 + IDLE_S)
    training.tick(3000.0)
    assert len(spawn.trainers) == 1
    training.begin(job(4), 3000.0)
    training.handle(TrainerReady(), 3002.0)
    assert [given.manifest.round for given in spawn.last.jobs] == [4]
    assert len(spawn.trainers) == 2


def test_only_a_process_with_a_job_is_paused_and_it_goes_on_when_the_job_is_done() -> None:
    spawn = Spawner()
    training = LocalTraining(spawn)
    training.start()
    training.pause(paused=True)
    assert spawn.last.paused == []
    training.begin(job(3))
    training.handle(TrainerReady(), 0.0)
    for _ in range(2):
        training.pause(paused=True)
    assert spawn.last.paused == [True]
    training.handle(TrainDone(3), 1.0)
    training.pause(paused=True)
    assert spawn.last.paused == [True, False]


ECHO = """
import sys
print("a library prints this", flush=True)
sys.stdout.write('{"type":"ready"}\\n'); sys.stdout.flush()
for line in sys.stdin:
    sys.stdout.write('{"type":"done","round":3}\\n'); sys.stdout.flush()
"""


def test_a_real_process_answers_jobs_and_ends_when_its_input_does() -> None:
    events: queue.Queue[TrainerEvent] = queue.Queue()
    process = TrainerProcess(events.put, command=(sys.executable, "-c", ECHO))
    assert events.get(timeout=60) == TrainerReady()
    process.submit(job(3))
    assert events.get(timeout=60) == TrainDone(3)
    process.stop()
    assert events.get(timeout=60) == TrainerExited(process.pid, 0)
    process.submit(job(4))  # to a process that is gone: no exception, its exit was reported
    process.stop()


def test_a_long_job_for_a_process_that_reads_nothing_keeps_nobody_waiting() -> None:
    process = TrainerProcess(lambda _: None, command=(sys.executable, "-S", "-c", "import time; time.sleep(600)"))
    blobs = tuple(BlobEntry(f"sub-generator/{number}", "0" * 64, 1) for number in range(1000))
    manifest = msgspec.structs.replace(job(3).manifest, blobs=blobs)
    submits = threading.Thread(target=process.submit, args=(msgspec.structs.replace(job(3), manifest=manifest),))
    submits.start()
    submits.join(timeout=30)
    waits = submits.is_alive()
    process.kill()
    assert not waits


def test_what_a_job_took_waits_for_the_next_and_is_given_back_when_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = threading.Event()
    monkeypatch.setattr(trainer, "give_memory_back", given_back.set)
    monkeypatch.setattr(trainer, "KEEPS_S", 3600.0)
    said: queue.SimpleQueue[TrainJob] = queue.SimpleQueue()
    jobs = trainer._jobs(Mock(hear=lambda _: said.get()))
    for number in range(2):
        said.put(job(number))
        assert next(jobs) == job(number)
    assert not given_back.is_set()
    monkeypatch.setattr(trainer, "KEEPS_S", 0.0)
    threading.Thread(target=lambda: given_back.wait(60) and said.put(job(2)), daemon=True).start()
    assert next(jobs) == job(2)
    assert given_back.is_set()

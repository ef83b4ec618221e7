"""Priority, memory and end of the training process: real processes, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from replayfleet.edge_client.learning.training.guard import OutOfMemory, with_batches_of, within_memory
from tests.support.processes import is_gone, state_of
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is promised is promised on Linux")


@dataclass(frozen=True)
class Method:
    batch_size: int = 64
    gan_batch_size: int = 20
    local_epochs: int = 3


def run(script: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.mark.parametrize("idle", [True, False])
def test_training_yields_cores_and_is_killed_first(idle: bool) -> None:
    before, policy = os.getpriority(os.PRIO_PROCESS, 0), "SCHED_IDLE" if idle else "SCHED_OTHER"
    found = run(
        "import os, threading, time\n"
        "thread = threading.Thread(target=time.sleep, args=(60,), daemon=True); thread.start()\n"
        "from replayfleet.edge_client.learning.training.guard import yield_to_serving\n"
        f"refused = yield_to_serving(idle={idle})\n"
        "tasks = [int(name) for name in os.listdir('/proc/self/task')]\n"
        f"print(refused, len(tasks), {{os.sched_getscheduler(t) for t in tasks}} == {{os.{policy}}},\n"
        "      {os.getpriority(os.PRIO_PROCESS, t) for t in tasks}, open('/proc/self/oom_score_adj').read())"
    )
    assert found == f"[] 2 True {{{max(before, 10)}}} 1000"


def test_memory_beyond_the_bound_is_refused_and_the_process_goes_on() -> None:
    found = run(
        "import numpy as np\n"
        "from replayfleet.edge_client.learning.training.guard import bound_memory, _status_bytes\n"
        "from replayfleet.federation.errors import is_out_of_memory\n"
        "bound_memory(_status_bytes('RssAnon') + (100 << 20))\n"
        "small = np.ones(50 << 20, np.uint8)\n"
        "try:\n"
        "    np.ones(400 << 20, np.uint8)\n"
        "except Exception as error:\n"
        "    print(is_out_of_memory(error), small.sum())\n"
        "del small\n"
        "bound_memory(_status_bytes('RssAnon') + (600 << 20))\n"
        "print(np.ones(400 << 20, np.uint8).nbytes >> 20)"
    )
    assert found == f"True {50 << 20}\n400"


def test_a_bound_below_what_the_process_holds_is_refused_in_words() -> None:
    found = run(
        "from replayfleet.edge_client.learning.training.guard import OutOfMemory, bound_memory\n"
        "try:\n"
        "    bound_memory(1 << 20)\n"
        "except OutOfMemory as error:\n"
        "    print(error)"
    )
    assert found.startswith("training may hold 1 MB, but its process holds ")
    assert found.endswith("MB before it begins; the round is not trained")


def test_what_a_job_took_and_freed_is_not_held_against_the_next_one() -> None:
    found = run(
        "from replayfleet.edge_client.learning.training.guard import _status_bytes, bound_memory\n"
        "pieces = [bytes(100_000) for _ in range(1000)]\n"
        "for number in range(1, 1000):\n"
        "    pieces[number - 1] = None\n"  # the last one keeps the C library from giving back those below it
        "held = _status_bytes('RssAnon')\n"
        "bound_memory(held - (50 << 20))\n"
        "print(held - _status_bytes('RssAnon') > 50 << 20)\n"
    )
    assert found == "True"


def test_a_stopped_training_process_does_not_outlive_a_killed_client(tmp_path: Path) -> None:
    child_script = (
        "import os, signal, sys\n"
        "from replayfleet.federation.children import die_with_parent\n"
        "die_with_parent()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child_script!r}])"],
        start_new_session=True,
    )
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        pid = int((tmp_path / "pid").read_text())
        until(lambda: state_of(pid) == "T")
    finally:
        parent.kill()
        parent.wait()
    until(lambda: is_gone(pid))


def test_memory_that_runs_out_halves_the_batches_and_the_round_is_done_anew() -> None:
    tried: list[Method] = []

    def work(method: Method) -> str:
        tried.append(method)
        if method.batch_size > 16:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 99 bytes")
        return "done"

    assert within_memory(work, Method(), None) == ("done", 16)
    assert tried == [Method(), Method(32, 20), Method(16, 16)]
    assert within_memory(lambda method: method.batch_size, Method(), None) == (64, None)
    assert within_memory(lambda method: method.batch_size, Method(), 16) == (16, 16)


def test_the_bound_holds_for_training_alone_so_that_there_is_memory_to_say_what_went_wrong() -> None:
    found = run(
        "import resource\n"
        "import numpy as np\n"
        "from replayfleet.edge_client.learning.training.guard import OutOfMemory, _status_bytes, within_memory\n"
        "from tests.unit.edge_client.learning.test_training_guard import Method\n"
        "def limit():\n"
        "    return resource.getrlimit(resource.RLIMIT_DATA)[0]\n"
        "before, inside = limit(), []\n"
        "def work(method):\n"
        "    inside.append(limit() != before)\n"
        "    return np.ones(method.batch_size << 23, np.uint8).nbytes >> 23\n"
        "done = within_memory(work, Method(), None, _status_bytes('RssAnon') + (200 << 20))\n"
        "print(done, inside, limit() == before)\n"
        "try:\n"
        "    within_memory(work, Method(), None, 1 << 20)\n"
        "except OutOfMemory:\n"
        "    print(limit() == before)"
    )
    assert found == "(32, 32) [True, True] True\nTrue"


def test_memory_that_never_suffices_ends_in_words_and_other_errors_pass() -> None:
    with pytest.raises(OutOfMemory, match=r"batches of 8 \(nothing left\); the round is not trained"):
        within_memory(Mock(side_effect=MemoryError("nothing left")), Method(), None)

    with pytest.raises(RuntimeError, match="shapes differ"):
        within_memory(Mock(side_effect=RuntimeError("shapes differ")), Method(), None)
    assert with_batches_of(Method(), None) == Method()


def test_the_state_of_a_process_can_be_told() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T")
    finally:
        process.kill()
        process.wait()
    assert state_of(process.pid) == ""

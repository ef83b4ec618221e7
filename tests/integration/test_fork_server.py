"""The fork server and its processes, for real: how they end, and what becomes of them when it or the client does."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from replayfleet.edge_client.serving.fork_server import IS_POSSIBLE, Forked, ForkServer
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="needs descriptors of processes (Linux)")
DOES = """
import os, signal, sys, time
from replayfleet.edge_client.serving import fork_server
def serve(fds):
    what = os.read(fds[0], 100).decode()
    if what == "exit":
        sys.exit(7)
    if what == "fail":
        raise ValueError("on purpose")
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "tell":
        os.write(fds[1], " ".join(sorted(os.listdir("/proc/self/fd"))).encode())
        return
    time.sleep(600)
fork_server.main(serve)
"""
STARTED: list[Forked] = []
"""By the test that runs: whoever ends its fork server doesn't end them."""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer((sys.executable, "-c", DOES))
    yield made
    while STARTED:
        STARTED.pop().kill()
    made._end()


def start(server: ForkServer, what: str, *more: int) -> Forked:
    reader, writer = os.pipe()
    os.write(writer, what.encode())
    os.close(writer)
    try:
        STARTED.append(server.start([reader, *more]))
        return STARTED[-1]
    finally:
        os.close(reader)


@pytest.mark.parametrize(("what", "status"), [("exit", 7), ("fail", 1), ("crash", -signal.SIGSEGV), ("tell", 0)])
def test_how_a_process_ended_is_told_as_of_any_other(what: str, status: int, server: ForkServer) -> None:
    reader, writer = os.pipe()
    process = start(server, what, writer)
    assert process.wait(60) == status
    assert process.poll() == process.returncode == status
    process.kill()  # nobody, by now
    os.close(writer)
    os.close(reader)


def test_each_is_a_process_of_its_own_and_one_that_is_killed_takes_no_other_along(server: ForkServer) -> None:
    one, other = start(server, "run"), start(server, "run")
    assert len({one.pid, other.pid, os.getpid()}) == 3
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.01)
    one.kill()
    assert one.wait(60) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()


def test_models_are_loaded_into_large_pages_where_the_system_gives_them_to_who_asks(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    library, version = platform.libc_ver()
    large = pages.is_file() and "[madvise]" in pages.read_text()
    if not large or library != "glibc" or [*map(int, version.split("."))] < [2, 35]:
        pytest.skip("this system gives none, or to everybody")
    asks = r"\[heap\](?:\n.*)*?\nVmFlags:.* hg\b"
    process = psutil.Process(start(server, "run").pid)
    assert re.search(asks, Path(f"/proc/{process.pid}/smaps").read_text())
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    server._end()
    process = psutil.Process(start(server, "run").pid)
    assert not re.search(asks, Path(f"/proc/{process.pid}/smaps").read_text()), "an operator's word counts"


def test_a_process_has_nothing_of_those_before_it(server: ForkServer) -> None:
    seen = []
    for _ in range(3):
        start(server, "run")
        reader, writer = os.pipe()
        start(server, "tell", writer).wait(60)
        os.close(writer)
        seen.append(len(os.read(reader, 10_000).split()))
        os.close(reader)
    assert seen[0] == seen[1] == seen[2], "descriptors of others would keep their sockets open"


def test_a_fork_server_that_died_has_a_successor_and_its_processes_go_on(server: ForkServer) -> None:
    before = start(server, "run")
    psutil.Process(before.pid).parent().kill()
    after = start(server, "run")
    assert before.poll() is None
    before.kill()
    assert before.wait(60) == -signal.SIGKILL
    assert after.poll() is None


def test_one_that_forks_nothing_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match=r"forks nothing|reset|Broken pipe"):
        start(ForkServer(("true",)), "run")


def test_with_the_client_all_of_them_end_whatever_ends_it(tmp_path: Path) -> None:
    code = f"""
    import os, sys, time
    sys.path[:0] = {sys.path!r}
    from replayfleet.edge_client.serving.model import Workers
    from support.served_models import Colours
    from pathlib import Path
    colours = Colours(Path({str(tmp_path)!r}))
    import numpy as np
    from replayfleet.federation.wire.protocol.tensors import encode_arrays
    parameters = colours.store.put(encode_arrays(colours.parameters(1)))
    model = colours.workers().model(colours.graph.digest, parameters, (3, 32, 32))
    model(np.zeros((1, 3, 32, 32), np.float32))
    print(model.pid, flush=True)
    time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as client:
        worker = psutil.Process(int(client.stdout.readline()))
        server = worker.parent()
        client.kill()
    until(lambda: not worker.is_running() and not server.is_running())


def test_what_is_made_ready_ahead_of_a_fork_leaves_no_thread_of_its_own() -> None:
    """Threads don't survive a fork, and what they held stays locked in the children."""
    code = (
        "import os, onnxruntime; from replayfleet.edge_client.serving import worker; "
        "before = os.listdir('/proc/self/task'); worker.prepare(); print(before == os.listdir('/proc/self/task'))"
    )
    assert subprocess.check_output([sys.executable, "-c", code]).strip() == b"True"

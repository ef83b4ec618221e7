"""The time server is a socket of the test that answers with a clock of its own; the kernel's clock is the real one."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from replayfleet.edge_client.doctor.clock import (
    EARLIEST,
    TO_UNIX_S,
    KernelClock,
    kernel_clock,
    look_at_skew,
    look_at_synchronisation,
    measure_skew,
)
from replayfleet.edge_client.doctor.findings import Status

Answer = Callable[[bytes], bytes]


def told(request: bytes, *, ahead_s: float = 0.0, stratum: int = 2, first: int = 0x24) -> bytes:
    now = time.time() + ahead_s + TO_UNIX_S
    stamp = struct.pack(">II", int(now), int(now % 1 * 2**32))
    return bytes([first, stratum]) + bytes(22) + request[40:48] + stamp + stamp


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], int]]:
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(answer: Answer) -> int:
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("127.0.0.1", 0))
        server.settimeout(10)
        sockets.append(server)

        def work() -> None:
            request, peer = server.recvfrom(512)
            server.sendto(answer(request), peer)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return int(server.getsockname()[1])

    yield start
    for thread in threads:
        thread.join()
    for each in sockets:
        each.close()


@pytest.mark.parametrize(
    ("ahead_s", "status"), [(0.0, Status.OK), (60.0, Status.WARNING), (-60.0, Status.WARNING), (4000.0, Status.FAILURE)]
)
def test_skew_is_measured_against_a_time_server(ahead_s: float, status: Status, serve: Callable[[Answer], int]) -> None:
    port = serve(lambda request: told(request, ahead_s=ahead_s))
    (found,) = look_at_skew(("127.0.0.1", port), named=True)
    assert found.status == status
    assert found.facts["skew_s"] == pytest.approx(-ahead_s, abs=1)
    assert 0 <= found.facts["uncertain_s"] < 1
    assert "NTP, one exchange" in found.found


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda request: told(bytes(48)), "no answer to this question"),
        (lambda request: told(request, stratum=0), "isn't synchronised itself"),
        (lambda request: told(request, first=0xE4), "isn't synchronised itself"),
        (lambda request: b"hello", "no answer to this question"),
    ],
)
def test_an_answer_that_tells_no_time_is_not_believed(
    answer: Answer, message: str, serve: Callable[[Answer], int]
) -> None:
    with pytest.raises(ValueError, match=message):
        measure_skew("127.0.0.1", serve(answer))


def test_who_does_not_answer_is_a_failure_only_if_the_operator_named_it() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
    assert look_at_skew(("127.0.0.1", port), named=True)[0].status == Status.FAILURE
    (found,) = look_at_skew(("127.0.0.1", port), named=False)
    assert found.status == Status.SKIPPED
    assert "not measured" in found.found
    assert look_at_skew(None, named=False)[0].status == Status.SKIPPED


def test_the_kernel_says_whether_its_clock_is_kept_right() -> None:
    clock = kernel_clock()
    assert clock is None or clock.source in {"adjtimex", "timedatectl"}
    (found,) = look_at_synchronisation(lambda: KernelClock(True, 0.012, "adjtimex"))
    assert (found.status, found.facts["max_error_s"]) == (Status.OK, 0.012)
    assert "within 12 ms" in found.found
    (found,) = look_at_synchronisation(lambda: KernelClock(False, 16.0, "adjtimex"))
    assert found.status == Status.WARNING
    assert "set-ntp" in found.advice
    assert look_at_synchronisation(lambda: None)[0].status == Status.SKIPPED


def test_a_clock_before_this_program_was_written_is_wrong() -> None:
    (found,) = look_at_synchronisation(lambda: KernelClock(True, 0.0, "adjtimex"), now=lambda: EARLIEST - 1)
    assert found.status == Status.FAILURE

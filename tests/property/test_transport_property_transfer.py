"""Whatever the network does, a transfer ends byte-identical, and whoever crashes goes on where it was."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.couriers import Clock, End, run

from replayfleet.federation.wire.protocol.messages import Progress
from replayfleet.federation.wire.transport.sending import Sending
from tests.support.memory_broker import Faults, MemoryBroker


@pytest.fixture(autouse=True, scope="module")
def _fast_disk() -> Iterator[None]:
    """No power is cut here, so nothing needs to be flushed."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _descriptor: None)
        yield


MAX_PAYLOAD = 5 << 10  # blocks of 1 KiB, so that a few kilobytes make a long transfer


def a_fleet(root: Path, faults: Faults | None) -> tuple[MemoryBroker, Clock, End, End]:
    broker, clock = MemoryBroker(automatic=True, max_payload_bytes=MAX_PAYLOAD, faults=faults), Clock()
    return broker, clock, End(broker, clock, root / "aggregator"), End(broker, clock, root / "cam-1", "cam-1")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=4),
    drop=st.sampled_from([0.0, 0.05, 0.3]),
    duplicate=st.sampled_from([0.0, 0.3]),
    reorder=st.booleans(),
    down=st.booleans(),
)
def test_loss_duplication_and_reordering_never_change_a_byte(
    seed: int, sizes: list[int], drop: float, duplicate: float, reorder: bool, down: bool
) -> None:
    rng = random.Random(seed)
    blobs = tuple(rng.randbytes(size) for size in sizes)
    with tempfile.TemporaryDirectory() as root:
        _, clock, aggregator, cam = a_fleet(Path(root), Faults(rng, drop, duplicate, reorder))
        sender, receiver = (aggregator, cam) if down else (cam, aggregator)
        manifest = sender.offer("cam-1", *blobs)
        for _ in range(100):
            run(clock, aggregator, cam, seconds=30, step=0.5)
            if sender.concluded:
                break
        assert sender.concluded[0].verdict.accepted
        assert [receiver.store.read(entry.digest) for entry in manifest.blobs] == list(blobs)
        assert receiver.failed == sender.failed == []
        assert len(receiver.arrived) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), crashes=st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=4))
def test_a_crash_of_either_end_at_any_message_costs_at_most_a_window(
    seed: int, crashes: list[tuple[int, bool]]
) -> None:
    blob = random.Random(seed).randbytes(40_000)
    with tempfile.TemporaryDirectory() as root:
        broker, clock, aggregator, cam = a_fleet(Path(root), None)
        cam.offer("cam-1", blob)
        sent = 0
        for messages, sender_dies in crashes:
            for _ in range(messages):
                aggregator.work(1)
                cam.work()
            if cam.concluded:
                break
            if sender_dies:
                broker.kill("cam-1")
                sent += cam.courier.counters["bytes_sent"]
                cam = End(broker, clock, Path(root) / "cam-1", "cam-1")
                cam.offer("cam-1", blob)
            else:
                broker.kill("aggregator")
                aggregator = End(broker, clock, Path(root) / "aggregator")
                cam.courier.resume(clock.now)
        run(clock, aggregator, cam, seconds=2)
        sent += cam.courier.counters["bytes_sent"]
        assert cam.concluded[0].verdict.accepted
        assert aggregator.store.read(cam.concluded[0].manifest.blobs[0].digest) == blob
        offers_bytes = 3000 * (len(crashes) + 1)
        assert sent <= len(blob) + (2 * 8 + 1) * 1050 * (len(crashes) + 1) + offers_bytes + 40 * 24


@given(
    num_blocks=st.integers(0, 60),
    credit=st.integers(1, 12),
    answers=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 256), st.floats(0, 20, allow_subnormal=False)), max_size=30
    ),
)
def test_the_sender_never_goes_beyond_the_window_whatever_it_is_told(
    num_blocks: int, credit: int, answers: list[tuple[int, int, float]]
) -> None:
    sending, now = Sending(num_blocks, credit=credit, now=0.0), 0.0
    allowed = min(credit, num_blocks)
    assert all(index < allowed for index in sending.step(now).blocks)
    for next_missing, granted, wait_s in answers:
        now += wait_s
        sending.on_progress("cam-1", Progress("client", "0" * 32, next_missing, (), granted), now)
        blocks = sending.step(now).blocks
        allowed = min(min(next_missing, num_blocks) + min(credit, max(granted, 1)), num_blocks)
        assert all(min(next_missing, num_blocks) <= index < allowed for index in blocks)
        assert len(set(blocks)) == len(blocks)

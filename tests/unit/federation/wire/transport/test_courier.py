from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.couriers import FLEET, Clock, End, a_manifest, run
from support.rounded import a_difference

from replayfleet.federation.errors import MalformedMessage, Reason
from replayfleet.federation.wire.protocol import topics
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.messages import (
    Announcement,
    FleetSpec,
    Offer,
    Presence,
    Progress,
    Report,
    RolledBack,
    Verdict,
)
from replayfleet.federation.wire.protocol.packed import pack
from replayfleet.federation.wire.protocol.tensors import compress
from replayfleet.federation.wire.transport.courier import DEFAULT_CREDIT, FleetCourier
from replayfleet.federation.wire.transport.incoming import SHARED_GRACE_S, TransferLimits
from replayfleet.federation.wire.transport.interfaces import Offered
from tests.support.memory_broker import MemoryBroker
from tests.support.voices import Plain

BLOCK = 256 << 10


class Yard:
    """An aggregator and cameras in memory."""

    def __init__(self, root: Path, *clients: str, limits: TransferLimits | None = None) -> None:
        self.root = root
        self.clock = Clock()
        self.broker = MemoryBroker()
        self.aggregator = End(self.broker, self.clock, root / "aggregator", limits=limits)
        self.cams = [self.cam(client) for client in clients]

    def cam(self, client: str, **settings: int) -> End:
        return End(self.broker, self.clock, self.root / client, client, **settings)

    def restart_aggregator(self) -> None:
        self.broker.kill("aggregator")
        self.aggregator = End(self.broker, self.clock, self.root / "aggregator")

    def run(self, seconds: float = 0.0) -> None:
        run(self.clock, self.aggregator, *self.cams, seconds=seconds)


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path, "cam-1")


@pytest.fixture
def cam(yard: Yard) -> End:
    return yard.cams[0]


def kinds(end: End) -> list[str]:
    return [type(event).__name__ for event in end.events]


def floats(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32).tobytes()


def test_an_upload_arrives_and_its_verdict_comes_back(yard: Yard, cam: End) -> None:
    blobs = [floats(400_000), os.urandom(70_000), b""]
    manifest = cam.offer("cam-1", *blobs)
    yard.run()
    assert kinds(yard.aggregator) == ["Offered", "Arrived"]
    assert yard.aggregator.arrived[0].manifest == manifest
    assert [yard.aggregator.store.read(entry.digest) for entry in manifest.blobs] == blobs
    assert cam.concluded[0].verdict.accepted
    assert cam.concluded[0].manifest == manifest
    assert list(yard.aggregator.store.parts.iterdir()) == []


def test_compressible_parameters_travel_compressed_and_are_counted_so(yard: Yard) -> None:
    yard.cams[0].offer("cam-1", floats(400_000))
    yard.run()
    (arrived,) = yard.aggregator.arrived
    assert 0.8 * 1_600_000 < arrived.bytes_on_wire < 0.95 * 1_600_000
    assert yard.cams[0].concluded[0].bytes_on_wire >= arrived.bytes_on_wire


def test_a_small_upload_costs_one_round_trip(yard: Yard, cam: End) -> None:
    cam.offer("cam-1", os.urandom(60_000))
    yard.aggregator.work()
    cam.work()
    assert kinds(cam) == ["Concluded"]


def test_an_empty_bundle_is_just_an_offer_and_a_verdict(yard: Yard, cam: End) -> None:
    blob = os.urandom(3 * BLOCK)
    yard.aggregator.store.put(blob)
    cam.offer("cam-1", blob, without=(blob,))
    yard.run()
    assert kinds(yard.aggregator) == ["Offered", "Arrived"]
    assert cam.courier.counters["bytes_sent"] < 2000


def test_blobs_that_neither_bundle_nor_store_holds_are_asked_for(yard: Yard, cam: End) -> None:
    lost, sent = os.urandom(2 * BLOCK), os.urandom(1000)
    manifest = cam.offer("cam-1", lost, sent, without=(lost,))
    yard.run()
    assert kinds(yard.aggregator) == ["Offered", "Arrived"]
    assert all(yard.aggregator.store.has(entry.digest) for entry in manifest.blobs)
    assert cam.concluded[0].bytes_on_wire > 2 * BLOCK + 1000
    assert yard.aggregator.arrived[0].bytes_on_wire >= 2 * BLOCK + 1000


def test_blocks_of_parts_that_are_held_already_are_not_asked_for(yard: Yard, cam: End) -> None:
    held, fresh = os.urandom(40 * BLOCK), os.urandom(BLOCK)
    yard.aggregator.store.put(held)
    cam.offer("cam-1", held, fresh)
    yard.run()
    assert kinds(yard.aggregator) == ["Offered", "Arrived"]
    assert yard.aggregator.courier.counters["bytes_received"] < 12 * BLOCK


def test_a_refused_offer_is_told_why_and_its_blocks_are_dropped(yard: Yard, cam: End) -> None:
    yard.aggregator.accepting = False
    cam.offer("cam-1", os.urandom(3 * BLOCK))
    yard.aggregator.work()
    (offered,) = yard.aggregator.events
    yard.aggregator.courier.refuse("cam-1", offered.offer, Reason.WRONG_ROUND.value, "upload is for round 0", 0.0)  # type: ignore[union-attr]
    yard.run()
    verdict = cam.concluded[0].verdict
    assert (verdict.accepted, verdict.reason, verdict.detail) == (False, "wrong-round", "upload is for round 0")
    assert list(yard.aggregator.store.parts.iterdir()) == []


def test_the_same_offer_gets_the_same_verdict_without_asking_the_service_again(yard: Yard, cam: End) -> None:
    blob = os.urandom(1000)
    for _ in range(3):
        cam.offer("cam-1", blob)
        yard.run()
    assert kinds(yard.aggregator) == ["Offered", "Arrived"]
    assert kinds(cam) == ["Concluded"] * 3


def test_a_client_counts_the_verdict_of_the_aggregator_that_it_follows_and_of_no_other(yard: Yard, cam: End) -> None:
    yard.aggregator.courier.follow("second")
    cam.courier.follow("first")
    cam.offer("cam-1", b"an upload")
    yard.run()
    assert kinds(cam) == []
    cam.courier.follow("second")
    cam.courier.resume(yard.clock.now)
    yard.run()
    assert kinds(cam) == ["Concluded"]


def test_who_comes_while_all_places_are_taken_waits_for_a_turn_and_sends_nothing_before(tmp_path: Path) -> None:
    yard = Yard(tmp_path, "cam-1", "cam-2", "cam-3", limits=TransferLimits(max_open=1))
    first, second, third = yard.cams
    yard.aggregator.concluding = False
    for cam, name in ((first, "cam-1"), (second, "cam-2"), (third, "cam-3")):
        cam.offer(name, os.urandom(2 * BLOCK))
        yard.run()
    assert [event.peer for event in yard.aggregator.arrived] == ["cam-1"]
    assert yard.aggregator.courier.counters["duplicates"] == 0  # no block came that nobody had asked for
    assert not second.concluded
    yard.aggregator.concluding = True
    arrived = yard.aggregator.arrived[0]
    yard.aggregator.courier.conclude("cam-1", arrived.manifest, arrived.transfer_id, accepted=True)
    yard.run()
    assert [event.peer for event in yard.aggregator.arrived] == ["cam-1", "cam-2", "cam-3"]
    assert all(cam.concluded[0].verdict.accepted for cam in yard.cams)


def test_nobody_asks_alone_for_what_all_are_about_to_get_from_the_store(tmp_path: Path) -> None:
    puts: list[Future[None]] = []

    def put(*_: object) -> Future[None]:
        puts.append(Future())
        return puts[-1]

    yard = Yard(tmp_path, "cam-1")
    (cam,), courier = yard.cams, yard.aggregator.courier
    courier._claims = cast("Any", SimpleNamespace(writable=True, put=put))
    average, own = floats(BLOCK), b"its own"
    digest = yard.aggregator.store.put(average)
    courier.send("*", a_manifest("*", average, direction="down", shared=True), [digest], yard.clock.now)
    yard.aggregator.offer("cam-1", own)
    yard.run()
    assert [event.peer for event in cam.arrived] == ["cam-1"], "what has nothing to do with it waits for nothing"
    yard.aggregator.offer("cam-1", average, own, without=(average,), version=2)
    yard.run(seconds=SHARED_GRACE_S + 1.0)
    puts[0].set_result(None)
    yard.run(seconds=SHARED_GRACE_S + 1.0)
    assert [event.peer for event in cam.events if isinstance(event, Offered)] == ["cam-1", "*", "cam-1"]
    assert len(puts) == 1


def test_busy_is_not_remembered(tmp_path: Path) -> None:
    yard = Yard(tmp_path, "cam-1", "cam-2", limits=TransferLimits(max_open=1, max_waiting=0))
    first, second = yard.cams
    yard.aggregator.concluding = False
    first.offer("cam-1", b"first")
    yard.run()
    second.offer("cam-2", b"second")
    yard.run()
    assert second.concluded[0].verdict.reason == "busy"
    arrived = yard.aggregator.arrived[0]
    yard.aggregator.courier.conclude("cam-1", arrived.manifest, arrived.transfer_id, accepted=True)
    yard.aggregator.concluding = True
    second.offer("cam-2", b"second")
    yard.run()
    assert second.concluded[1].verdict.accepted


def test_too_large_an_offer_is_refused_before_the_service_hears_of_it(tmp_path: Path) -> None:
    yard = Yard(tmp_path, "cam-1", limits=TransferLimits(max_blob_bytes=1000))
    yard.cams[0].offer("cam-1", os.urandom(1001))
    yard.run()
    assert kinds(yard.aggregator) == []
    assert yard.cams[0].concluded[0].verdict.reason == "too-large"


def test_a_newer_manifest_replaces_an_unfinished_older_one(yard: Yard, cam: End) -> None:
    cam.offer("cam-1", os.urandom(30 * BLOCK), version=1)
    yard.aggregator.work(3)
    newer = cam.offer("cam-1", os.urandom(1000), version=2)
    yard.run()
    assert [event.manifest for event in yard.aggregator.arrived] == [newer]
    assert [event.manifest for event in cam.concluded] == [newer]
    assert list(yard.aggregator.store.parts.iterdir()) == []


def test_who_is_gone_is_offered_nothing_until_it_is_back_and_goes_on_from_there(yard: Yard, cam: End) -> None:
    blob = os.urandom(40 * BLOCK)
    manifest = yard.aggregator.offer("cam-1", blob)
    for _ in range(12):
        cam.work(2)
        yard.aggregator.work()
    yard.aggregator.courier.withdraw("cam-1")
    yard.aggregator.courier.withdraw("nobody")
    yard.run()
    said = yard.aggregator.courier.counters["bytes_sent"]
    yard.run(300.0)
    assert yard.aggregator.courier.counters["bytes_sent"] == said, "not even a question"
    assert not cam.arrived
    assert not any(kind == "Failed" for kind in kinds(yard.aggregator))
    assert yard.aggregator.offer("cam-1", blob) == manifest
    yard.run(2.0)
    assert cam.store.has(manifest.blobs[0].digest)
    assert yard.aggregator.courier.counters["bytes_sent"] < (40 + 10) * BLOCK


def test_the_receiver_goes_on_where_it_crashed(yard: Yard, cam: End) -> None:
    manifest = cam.offer("cam-1", os.urandom(40 * BLOCK))
    for _ in range(12):
        yard.aggregator.work(2)
        cam.work()
    yard.restart_aggregator()
    cam.courier.resume(yard.clock.now)
    yard.run(2.0)
    assert yard.aggregator.store.has(manifest.blobs[0].digest)
    assert cam.concluded[0].verdict.accepted
    assert cam.courier.counters["bytes_sent"] < (40 + 10) * BLOCK


def test_the_sender_goes_on_where_it_crashed_even_with_a_new_version(yard: Yard) -> None:
    blob = os.urandom(40 * BLOCK)
    yard.cams[0].offer("cam-1", blob, version=1)
    for _ in range(12):
        yard.aggregator.work(2)
        yard.cams[0].work()
    yard.broker.kill("cam-1")
    yard.aggregator.inbox.clear()
    again = yard.cam("cam-1")
    yard.cams = [again]
    again.offer("cam-1", blob, version=2)
    yard.run(2.0)
    assert again.concluded[0].verdict.version == 2
    assert again.courier.counters["bytes_sent"] < (40 - 17 + 8 + 1) * BLOCK  # 17 had arrived, one window repeats


def test_a_damaged_block_on_the_receivers_disk_is_fetched_again(yard: Yard, cam: End) -> None:
    blob = os.urandom(20 * BLOCK)
    cam.offer("cam-1", blob)
    for _ in range(5):
        yard.aggregator.work(2)
        cam.work()
    (part,) = yard.aggregator.store.parts.iterdir()
    yard.restart_aggregator()
    with part.open("r+b") as file:
        file.seek(BLOCK + 5)
        file.write(b"rot")
    cam.courier.resume(yard.clock.now)
    yard.run(2.0)
    assert yard.aggregator.store.read(cam.concluded[0].manifest.blobs[0].digest) == blob


def test_nothing_is_lost_when_the_service_crashes_between_arrival_and_verdict(yard: Yard, cam: End) -> None:
    yard.aggregator.concluding = False
    cam.offer("cam-1", os.urandom(3 * BLOCK))
    yard.run()
    yard.restart_aggregator()
    before = cam.courier.counters["bytes_sent"]
    cam.courier.resume(yard.clock.now)
    yard.run()
    assert cam.concluded[0].verdict.accepted
    assert cam.courier.counters["bytes_sent"] - before < 2000


def test_bytes_that_do_not_verify_are_refused_and_the_sender_checks_its_own(yard: Yard, cam: End) -> None:
    blob = os.urandom(3 * BLOCK)
    name = cam.store.put(blob)
    cam.store.encoded(name)
    cam.store.path(name).write_bytes(os.urandom(3 * BLOCK))
    cam.courier.send("cam-1", a_manifest("cam-1", blob), [name], yard.clock.now)
    yard.run()
    assert kinds(yard.aggregator) == ["Offered", "Failed"]
    assert not yard.aggregator.store.has(name)
    assert cam.concluded[0].verdict.reason == "wrong-digest"
    assert not cam.store.has(name)
    cam.offer("cam-1", blob)
    yard.run()
    assert cam.concluded[1].verdict.accepted


def test_a_compressed_blob_with_other_content_is_refused_too(yard: Yard, cam: End) -> None:
    blob = floats(100_000)
    name = cam.store.put(blob)
    encoded = cam.store.encoded(name)
    assert encoded.encoding == "shuffle4-zstd"
    encoded.path.write_bytes(compress(floats(100_000, seed=1))[1])
    cam.courier.send("cam-1", a_manifest("cam-1", blob), [name], yard.clock.now)
    yard.run()
    assert kinds(yard.aggregator) == ["Offered", "Failed"]
    assert not yard.aggregator.store.has(name)
    cam.offer("cam-1", blob)
    yard.run()
    assert yard.aggregator.store.read(name) == blob


def test_a_service_that_decides_late_finds_the_first_window_waiting(yard: Yard, cam: End) -> None:
    yard.aggregator.accepting = False
    cam.offer("cam-1", os.urandom(6 * BLOCK))
    yard.aggregator.work()
    (offered,) = yard.aggregator.events
    assert isinstance(offered, Offered)
    yard.aggregator.act(yard.aggregator.courier.accept("cam-1", offered.offer, yard.clock.now))
    yard.run()
    assert cam.concluded[0].verdict.accepted
    assert cam.courier.counters["blocks_resent"] == 0


def test_a_verdict_on_an_earlier_version_of_the_same_bytes_concludes_nothing(yard: Yard, cam: End) -> None:
    cam.offer("cam-1", b"same", version=1)
    yard.aggregator.work()
    cam.offer("cam-1", b"same", version=2)
    cam.work()
    assert cam.concluded == []
    yard.run()
    assert [event.verdict.version for event in cam.concluded] == [2]


def test_our_own_words_echoed_decide_nothing(yard: Yard, cam: End) -> None:
    manifest = a_manifest("cam-1", b"x")
    transfer_id = cam.courier.send("cam-1", manifest, [cam.store.put(b"x")], yard.clock.now)
    echo = encode(Verdict("client", transfer_id, manifest.round, manifest.version, True))
    assert cam.courier.handle(topics.topic_of(FLEET, "control", "cam-1"), echo, yard.clock.now) == []


def test_a_peer_that_keeps_sending_wrong_blocks_is_cut_off(yard: Yard, cam: End) -> None:
    cam.offer("cam-1", os.urandom(30 * BLOCK))
    yard.aggregator.work(1)
    cam.work()
    for topic, payload in [*yard.aggregator.inbox] * 4:
        yard.aggregator.act(yard.aggregator.courier.handle(topic, payload[:-1] + b"?", 0.0))
    assert kinds(yard.aggregator) == ["Offered", "Failed"]


def test_when_the_first_window_is_lost_the_stall_timer_asks_again(yard: Yard, cam: End) -> None:
    cam.offer("cam-1", os.urandom(20 * BLOCK))
    yard.aggregator.inbox.clear()
    yard.run(6.0)
    assert cam.concluded[0].verdict.accepted


def test_an_offer_that_an_aggregator_lost_with_its_session_comes_again_as_soon_as_it_announces(tmp_path: Path) -> None:
    """Whoever floods is muted by a new session, and what others said in that moment is gone with the old one."""
    yard = Yard(tmp_path, "cam-1")
    (cam,) = yard.cams
    cam.offer("cam-1", os.urandom(1000))
    yard.aggregator.inbox.clear()
    announcement = Announcement("epoch", 0, "open", 9.0, FleetSpec(FLEET, "fedavg", {}, {}, 1))
    yard.clock.now += 1.0
    yard.aggregator.session.publish(topics.topic_of(FLEET, "round"), encode(announcement), retain=True)
    yard.run(0.4)
    assert cam.concluded[0].verdict.accepted


def test_a_lost_verdict_is_repeated(yard: Yard, cam: End) -> None:
    cam.offer("cam-1", os.urandom(1000))
    yard.aggregator.work()
    cam.inbox.clear()
    yard.run(6.0)
    assert cam.concluded[0].verdict.accepted
    assert kinds(yard.aggregator) == ["Offered", "Arrived"]


def test_a_dead_peer_is_given_up_but_its_part_stays(tmp_path: Path) -> None:
    yard = Yard(tmp_path, "cam-1", limits=TransferLimits(give_up_s=60))
    (cam,) = yard.cams
    cam.offer("cam-1", os.urandom(20 * BLOCK))
    yard.aggregator.work()
    run(yard.clock, yard.aggregator, seconds=61)
    assert isinstance(yard.aggregator.failed[0].error, TimeoutError)
    assert len(list(yard.aggregator.store.parts.iterdir())) == 1


def test_the_receiver_sets_the_pace(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    cam = yard.cam("cam-1", credit=8)
    cam.offer("cam-1", os.urandom(100 * BLOCK))
    run(yard.clock, cam, seconds=3)
    assert cam.courier.counters["bytes_sent"] < 9 * BLOCK


def test_a_model_of_4_mb_waits_for_one_answer_at_most(tmp_path: Path) -> None:
    broker, clock = MemoryBroker(), Clock()
    aggregator = End(broker, clock, tmp_path / "aggregator", credit=DEFAULT_CREDIT)
    cam = End(broker, clock, tmp_path / "cam-1", "cam-1", credit=DEFAULT_CREDIT)
    aggregator.offer("*", os.urandom(16 * BLOCK))
    assert len(cam.inbox) == 17, "the offer and all blocks"
    run(clock, aggregator, cam)
    cam.offer("cam-1", os.urandom(16 * BLOCK))
    aggregator.work()
    cam.work()
    assert len(aggregator.inbox) == 16
    aggregator.work()
    assert len(cam.inbox) == 1, "the verdict"


def test_blocks_fit_what_the_broker_takes(yard: Yard) -> None:
    yard.broker.max_payload_bytes = 128 << 10
    yard.cams[0].offer("cam-1", os.urandom(3 * BLOCK))
    yard.run()
    assert yard.cams[0].concluded[0].verdict.accepted


def test_what_the_broker_would_never_take_is_refused_locally(yard: Yard) -> None:
    yard.broker.max_payload_bytes = 5000
    with pytest.raises(MalformedMessage, match="the broker takes 5000; nothing was sent"):
        yard.cams[0].offer("cam-1", os.urandom(BLOCK))
    yard.run()
    assert kinds(yard.aggregator) == []


def test_nothing_is_sent_that_the_store_does_not_hold(yard: Yard) -> None:
    with pytest.raises(KeyError):
        yard.cams[0].courier.send("cam-1", a_manifest("cam-1", b"x"), ["0" * 64], 0.0)


def test_a_blob_that_vanishes_while_it_travels_is_a_failure_not_a_crash(yard: Yard, cam: End) -> None:
    cam.offer("cam-1", os.urandom(40 * BLOCK))
    cam.store.collect(set())
    yard.run()
    assert isinstance(cam.failed[0].error, OSError)


def test_a_broker_that_takes_less_than_before_ends_a_transfer_with_an_event(yard: Yard, cam: End) -> None:
    cam.offer("cam-1", os.urandom(40 * BLOCK))
    yard.broker.max_payload_bytes = 100_000
    yard.run()
    assert isinstance(cam.failed[0].error, ValueError)


def test_an_answer_that_the_broker_does_not_take_ends_nothing(
    yard: Yard, cam: End, caplog: pytest.LogCaptureFixture
) -> None:
    cam.offer("cam-1", os.urandom(3 * BLOCK))
    yard.broker.max_payload_bytes = 10
    yard.aggregator.work()
    assert "answer not sent peer=cam-1" in caplog.text
    yard.broker.max_payload_bytes = 1 << 20
    yard.run(seconds=20)
    assert [event.verdict.accepted for event in cam.concluded] == [True]


def test_what_all_share_is_published_once(tmp_path: Path) -> None:
    yard = Yard(tmp_path, "cam-1", "cam-2", "cam-3")
    manifest = yard.aggregator.offer("*", os.urandom(30 * BLOCK))
    yard.run()
    for cam in yard.cams:
        assert cam.store.has(manifest.blobs[0].digest)
        assert kinds(cam) == ["Offered", "Arrived"]
    assert yard.aggregator.courier.counters["bytes_sent"] < 31 * BLOCK
    assert sorted(event.peer for event in yard.aggregator.concluded) == ["cam-1", "cam-2", "cam-3"]


def test_a_repeated_verdict_on_a_shared_transfer_is_no_news(yard: Yard) -> None:
    yard.aggregator.offer("*", b"shared")
    yard.run()
    yard.aggregator.courier.resume(yard.clock.now)
    yard.run()
    assert kinds(yard.cams[0]) == ["Offered", "Arrived"]
    assert len(yard.aggregator.concluded) == 1


def test_a_laggard_does_not_hold_up_the_others(tmp_path: Path) -> None:
    yard = Yard(tmp_path, "cam-1", "cam-2")
    brisk, laggard = yard.cams
    manifest = yard.aggregator.offer("*", os.urandom(60 * BLOCK))
    yard.aggregator.work()
    laggard.work(3)
    run(yard.clock, yard.aggregator, brisk, seconds=3)
    assert brisk.store.has(manifest.blobs[0].digest)
    yard.run(1.0)
    assert laggard.store.has(manifest.blobs[0].digest)


def test_nobody_listening_to_a_shared_offer_costs_one_window(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    yard.aggregator.offer("*", os.urandom(60 * BLOCK))
    yard.run(300)
    assert yard.aggregator.courier.counters["bytes_sent"] < 9 * BLOCK


def test_one_receiver_that_needs_nothing_does_not_open_the_flood(yard: Yard) -> None:
    blob = os.urandom(60 * BLOCK)
    yard.cams[0].store.put(blob)
    yard.aggregator.offer("*", blob)
    yard.run(300)
    assert yard.aggregator.courier.counters["bytes_sent"] < 9 * BLOCK


def offer_own_download(yard: Yard, shared_blob: bytes) -> None:
    """Offer cam-1 a download whose shared blob is presumed to travel on the shared topic."""
    digest = yard.aggregator.store.put(shared_blob)
    manifest = a_manifest("cam-1", shared_blob, direction="down", shared=True)
    assert manifest.blobs[0].digest == digest
    yard.aggregator.courier.send("cam-1", manifest, [], yard.clock.now)


def test_a_download_waits_for_the_shared_blobs_that_are_on_their_way(yard: Yard) -> None:
    blob = os.urandom(30 * BLOCK)
    yard.aggregator.offer("*", blob)
    offer_own_download(yard, blob)
    yard.run(5.0)
    assert sorted(event.peer for event in yard.cams[0].arrived) == ["*", "cam-1"]
    assert yard.aggregator.courier.counters["bytes_sent"] < 31 * BLOCK


def test_what_all_get_over_a_slow_line_is_not_sent_again_to_one(tmp_path: Path) -> None:
    """A block each 33 s, as at 64 kbit/s; whatever is small comes as soon as it is the next."""
    yard = Yard(tmp_path, "cam-1")
    (cam,) = yard.cams
    blob = os.urandom(6 * BLOCK)
    yard.aggregator.offer("*", blob)
    offer_own_download(yard, blob)
    next_at = yard.clock.now + 33
    while yard.clock.now < 400:
        while cam.inbox and (len(cam.inbox[0][1]) < BLOCK or yard.clock.now >= next_at):
            if len(cam.inbox[0][1]) >= BLOCK:
                next_at = yard.clock.now + 33
            cam.work(1)
        cam.work(0)
        yard.aggregator.work()
        yard.clock.now += 1
    assert sorted(event.peer for event in cam.arrived) == ["*", "cam-1"]
    assert yard.aggregator.courier.counters["bytes_sent"] < 7 * BLOCK


def test_who_missed_the_shared_blobs_gets_them_on_its_own_link(yard: Yard) -> None:
    blob = os.urandom(3 * BLOCK)
    offer_own_download(yard, blob)
    yard.run(3.0)
    assert [event.peer for event in yard.cams[0].arrived] == ["cam-1"]


def test_a_shared_transfer_that_breaks_off_ends_in_a_want(yard: Yard, cam: End) -> None:
    blob = os.urandom(30 * BLOCK)
    yard.aggregator.offer("*", blob)
    offer_own_download(yard, blob)
    cam.work(4)
    cam.inbox = type(cam.inbox)(message for message in cam.inbox if message[0] != topics.topic_of(FLEET, "down"))
    yard.aggregator.courier._open.pop("*")  # type: ignore[attr-defined]
    yard.run(8.0)
    assert [event.peer for event in cam.arrived] == ["cam-1"]
    assert [event.peer for event in cam.failed] == ["*"]


def test_presence_and_reports_pass_to_the_aggregator_and_announcements_to_all(yard: Yard, cam: End) -> None:
    presence, report = Presence("cam-1", "online", "boot", 1), Report("cam-1", 0, 1, {"accuracy": 0.5})
    told = RolledBack("cam-1", 0, 1, 0, "hung")
    announcement = Announcement("epoch", 0, "open", 9.0, FleetSpec(FLEET, "fedavg", {}, {}, 1))
    cam.session.publish(topics.topic_of(FLEET, "state", "cam-1"), encode(presence), retain=True)
    cam.session.publish(topics.topic_of(FLEET, "control", "cam-1"), encode(report))
    cam.session.publish(topics.topic_of(FLEET, "control", "cam-1"), encode(told))
    yard.aggregator.session.publish(topics.topic_of(FLEET, "round"), encode(announcement), retain=True)
    yard.run()
    assert [(event.peer, event.message) for event in yard.aggregator.received] == [
        ("cam-1", presence),
        ("cam-1", report),
        ("cam-1", told),
        ("*", announcement),  # an aggregator hears of others, and of itself where a broker echoes
    ]
    assert [event.message for event in cam.received] == [announcement]


@pytest.mark.parametrize(
    ("topic", "payload"),
    [
        ("replayfleet/v1/other/clients/cam-1/state", encode(Presence("cam-1", "online", "b", 1))),
        (topics.topic_of(FLEET, "state", "cam-2"), encode(Presence("cam-1", "online", "b", 1))),
        (topics.topic_of(FLEET, "up", "cam-1"), encode(Presence("cam-1", "online", "b", 1))),
        (topics.topic_of(FLEET, "control", "cam-1"), b"garbage"),
        ("elsewhere", b"x"),
        (topics.topic_of(FLEET, "up", "cam-1"), b"\x02\x01short"),
    ],
)
def test_words_that_do_not_belong_are_counted_and_dropped(tmp_path: Path, topic: str, payload: bytes) -> None:
    yard = Yard(tmp_path)
    assert yard.aggregator.courier.handle(topic, payload, 0.0) == []
    assert yard.aggregator.courier.counters["malformed"] == 1


def test_nobody_uploads_in_the_name_of_another(yard: Yard, cam: End) -> None:
    cam.offer("cam-1", b"x")
    _, payload = yard.aggregator.inbox[0]
    assert yard.aggregator.courier.handle(topics.topic_of(FLEET, "up", "cam-2"), payload, 0.0) == []
    assert yard.aggregator.courier.counters["malformed"] == 1


@pytest.mark.parametrize("topic", [topics.topic_of(FLEET, "down", "cam-2"), topics.topic_of(FLEET, "control", "cam-2")])
def test_a_client_takes_no_word_that_is_for_another(tmp_path: Path, topic: str) -> None:
    """A broker without access rules delivers whatever somebody subscribed to; only the address tells."""
    (cam,) = Yard(tmp_path, "cam-1").cams
    manifest = a_manifest("cam-2", b"x", direction="down")
    message = Offer("aggregator", "ab" * 16, manifest, (), BLOCK, b"")
    if topic.endswith("control"):
        message = Verdict("aggregator", "ab" * 16, 0, 1, accepted=True)
    assert cam.courier.handle(topic, encode(message), 0.0) == []
    assert cam.courier.counters["malformed"] == 1


def test_a_cleared_retained_message_is_no_news(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    assert yard.aggregator.courier.handle(topics.topic_of(FLEET, "state", "cam-1"), b"", 0.0) == []
    assert yard.aggregator.courier.counters["malformed"] == 0


def test_blocks_and_answers_about_nothing_known_are_ignored(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    progress = encode(Progress("client", "ab" * 16, 0, (), 8))
    assert yard.aggregator.courier.handle(topics.topic_of(FLEET, "control", "cam-1"), progress, 0.0) == []
    assert yard.aggregator.courier.counters["bytes_sent"] == 0


def test_offers_and_blocks_go_one_way_and_answers_the_other_so_that_blocks_delay_no_answer(
    yard: Yard, cam: End
) -> None:
    ways: dict[str, set[str]] = {"control": set(), "data": set()}
    for end in (cam, yard.aggregator):
        for way, topics_seen in ways.items():

            def publish(topic: str, payload: bytes, session: Any = end.session, seen: set[str] = topics_seen) -> None:
                seen.add(topic.rpartition("/")[2])
                session.publish(topic, payload)

            setattr(end.courier._links, way, SimpleNamespace(publish=publish, max_payload_bytes=1 << 20))
    cam.offer("cam-1", os.urandom(3 * BLOCK))
    yard.aggregator.offer("cam-1", os.urandom(3 * BLOCK))
    yard.run()
    assert ways == {"control": {"control"}, "data": {"up", "down"}}


def test_a_courier_knows_which_end_it_is(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with pytest.raises(ValueError, match="own_id"):
        FleetCourier("client", FLEET, SimpleNamespace(), yard.aggregator.store, Plain())


def a_download(yard: Yard, *, held: bool, decodes: bool = True) -> tuple[bytes, End]:
    """Offer a camera a blob that is a difference from another, which it holds or doesn't."""
    raw, base, steps = a_difference()
    (cam,) = yard.cams
    digests = [yard.aggregator.store.put(data) for data in (base, raw)]
    yard.aggregator.store.pack(digests[1], digests[0], steps)
    if held:
        cam.store.put(base)
    manifest = a_manifest("cam-1", raw, direction="down")
    bases = {digests[0]} if decodes else None
    yard.aggregator.courier.send("cam-1", manifest, [digests[1]], yard.clock.now, bases=bases)
    yard.run(5.0)
    return raw, cam


def test_a_difference_from_what_the_receiver_holds_travels_in_its_place(tmp_path: Path) -> None:
    raw, cam = a_download(Yard(tmp_path, "cam-1"), held=True)
    assert cam.store.read(cam.arrived[0].manifest.blobs[0].digest) == raw
    assert cam.arrived[0].bytes_on_wire < 0.4 * len(raw)


def test_who_lacks_the_base_asks_and_gets_the_whole_blob(yard: Yard) -> None:
    raw, cam = a_download(yard, held=False)
    assert cam.store.read(cam.arrived[0].manifest.blobs[0].digest) == raw
    assert len(cam.arrived) == len(yard.aggregator.concluded) == 1
    assert list(cam.store.parts.iterdir()) == []


def test_who_doesnt_say_that_it_takes_packed_blobs_gets_none(yard: Yard) -> None:
    raw, cam = a_download(yard, held=True, decodes=False)
    assert cam.arrived[0].bytes_on_wire > 0.7 * len(raw)


def test_a_difference_waits_for_a_base_that_comes_with_the_shared_bundle(yard: Yard) -> None:
    raw, base, steps = a_difference()
    (cam,) = yard.cams
    store = yard.aggregator.store
    digests = [store.put(data) for data in (base, raw)]
    store.pack(digests[1], digests[0], steps)
    own = a_manifest("cam-1", raw, base, direction="down", shared=True)
    yard.aggregator.courier.send("cam-1", own, [digests[1]], yard.clock.now, bases={digests[0]})
    while cam.work():
        pass
    assert not cam.arrived
    everybody = a_manifest("*", base, direction="down", shared=True)
    yard.aggregator.courier.send("*", everybody, [digests[0]], yard.clock.now, bases=())
    yard.run(3.0)
    assert cam.store.read(digests[1]) == raw
    own_arrival = next(event for event in cam.arrived if event.peer == "cam-1")
    assert own_arrival.bytes_on_wire < 0.4 * len(raw)


def test_a_difference_that_doesnt_lead_to_its_digest_is_refused_and_made_anew(yard: Yard, tmp_path: Path) -> None:
    raw, base, steps = a_difference()
    store = yard.aggregator.store
    digests = [store.put(data) for data in (base, raw)]
    store.pack(digests[1], digests[0], steps)
    (spooled,) = (tmp_path / "aggregator").rglob("*.packed")
    other, other_base, other_steps = a_difference(seed=5)
    store.put(other)
    spooled.write_bytes(pack(other, other_base, other_steps) or b"")
    (cam,) = yard.cams
    cam.store.put(base)
    manifest = a_manifest("cam-1", raw, direction="down")
    yard.aggregator.courier.send("cam-1", manifest, [digests[1]], yard.clock.now, bases={digests[0]})
    yard.run(3.0)
    assert yard.aggregator.concluded[-1].verdict.reason == Reason.WRONG_DIGEST.value
    yard.aggregator.courier.send("cam-1", manifest, [digests[1]], yard.clock.now, bases={digests[0]})
    yard.run(3.0)
    assert cam.store.read(digests[1]) == raw

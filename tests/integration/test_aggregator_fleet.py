from __future__ import annotations

import contextlib
import math
import random
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.tiny_fleet import FLEET, SEED, Crash, TinyExporter, TinyFleet, tiny_spec
from support.tiny_method import TinyMethod, TinyState, TinyUpload

from replayfleet.aggregator.aggregation import restore_artefacts
from replayfleet.aggregator.control.look import facts_of
from replayfleet.aggregator.control.waits import fleet_waits
from replayfleet.aggregator.coordinator import announcement
from replayfleet.aggregator.leading import Claim
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.operator.status import read_status
from replayfleet.aggregator.steps import DEEDS, Step
from replayfleet.aggregator.sync import downloads
from replayfleet.federation.errors import NothingLearned, SettingsError
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.service.loop import FLOOD
from replayfleet.federation.service.waits import Why
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.messages import BlobEntry, Block, Manifest
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.interfaces import Received
from tests.support.memory_broker import Faults


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails in these tests; flushing files would take most of their time."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture
def fleet(tmp_path: Path):
    made = TinyFleet(tmp_path)
    yield made
    made.close()


def state_of(fleet: TinyFleet) -> TinyState:
    return TinyState.unpack(restore_artefacts(fleet.store.state(), fleet.service._parts.blobs))


def runs_through_a_crash(fleet: TinyFleet, step: Step, skip: int = 0) -> None:
    """Kill the aggregator at a step, ``skip`` times later, and run on with another one on its data dir."""
    fleet.crash_at, fleet.skip = step, skip
    with pytest.raises(Crash):
        fleet.run()
    fleet.kill_aggregator()
    fleet.new_service()
    fleet.run()


def events(fleet: TinyFleet, kind: str) -> list[dict]:
    return [event for event in read_journal(fleet.tmp_path / "aggregator") if event["event"] == kind]


def test_a_run_counts_every_upload_once_and_gives_everybody_the_final_download(fleet: TinyFleet):
    fleet.run()
    assert dict(state_of(fleet).times) == {"cam-1": 3, "cam-2": 3, "cam-3": 3}
    for client_id, client in fleet.clients.items():
        assert replace(client.manifest, release=None) == fleet.store.download(client_id)
        assert client.manifest.round == 3
        assert all(verdict.accepted for verdict in client.verdicts)


def test_what_the_broker_has_against_the_aggregator_is_in_health_and_status(fleet: TinyFleet):
    fleet.run(until=lambda: fleet.service.ready)
    assert fleet.service.health()["healthy"]
    said = fleet.service.loop.data.problem = "session taken over: by a copy"
    fleet.run(until=lambda: events(fleet, "broker refuses") != [])
    health, lines = fleet.service.health(), read_status(fleet.tmp_path / "aggregator").lines()
    assert (health["healthy"], health["broker"]) == (False, said)
    assert f"last event: broker refuses: {said}" in lines
    fleet.run(until=lambda: fleet.rounds.index > 0)
    assert len(events(fleet, "broker refuses")) == 1
    fleet.service.loop.data.problem = "broker refuses: Server unavailable"
    fleet.run(until=lambda: len(events(fleet, "broker refuses")) == 2)
    assert events(fleet, "broker refuses")[1]["reason"] == "Server unavailable"


@pytest.mark.parametrize("finished", [True, False])
def test_an_aggregator_that_ends_lets_go_of_what_all_were_sent(tmp_path: Path, finished: bool):
    fleet = TinyFleet(tmp_path)
    fleet.run(until=None if finished else lambda: fleet.rounds.index == 1)
    courier = fleet.service._parts.courier
    assert EVERYBODY in courier._open
    assert not finished or len(courier._open) == 1, "nothing takes the last one's place"
    fleet.close()
    assert not courier._open


def test_an_unchanged_sub_generator_never_travels_down(fleet: TinyFleet):
    fleet.run()
    for client_id, client in fleet.clients.items():
        entry = next(blob for blob in client.manifest.blobs if blob.name == "sub-generator/0")
        assert entry.digest in fleet.store.holdings(client_id)
    downs = [event["bytes"] for event in events(fleet, "download confirmed")]
    assert len(downs) == 12
    assert not events(fleet, "transfer failed")


def test_the_journal_tells_the_rounds_with_weights_and_metrics(fleet: TinyFleet):
    fleet.run()
    committed = events(fleet, "round committed")
    assert [event["round"] for event in committed] == [0, 1, 2]
    assert committed[0]["weights"]["cam-1"] == {"cam-1": 1 / 3, "cam-2": 1 / 3, "cam-3": 1 / 3}
    assert len(events(fleet, "upload accepted")) == 9
    assert all(event["bytes"] > 0 for event in events(fleet, "upload accepted"))
    assert events(fleet, "client report")[-1]["metrics"] == {"accuracy": 0.5}
    assert len(events(fleet, "run finished")) == 1
    assert {event["round"] for event in events(fleet, "shared download sent")} == {1, 2, 3}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    fleet = TinyFleet(tmp_path_factory.mktemp("undisturbed"), num_rounds=2)
    fleet.run()
    yield fleet
    fleet.close()


ALWAYS = [step for step in Step if step not in {Step.EPOCH_RAISED, *DEEDS}]
"""Steps that every run takes."""


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("step", ALWAYS)
def test_a_crash_at_any_step_loses_no_upload_and_counts_none_twice(
    tmp_path: Path, undisturbed: TinyFleet, step: Step, skip: int
):
    skip = 0 if step is Step.ROUND_OPENED else skip
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=2)) as fleet:
        runs_through_a_crash(fleet, step, skip)
        assert dict(state_of(fleet).times) == {"cam-1": 2, "cam-2": 2, "cam-3": 2}
        assert fleet.outcome() == undisturbed.outcome()
        assert [event["round"] for event in events(fleet, "round committed")] == [0, 1]
        assert {event["by"] for event in events(fleet, "round closed")} == {"quorum"}
        assert all(verdict.accepted for client in fleet.clients.values() for verdict in client.verdicts)


def with_an_absurd_upload(folder: Path) -> TinyFleet:
    """A fleet in which one client's uploads are quarantined."""
    fleet = TinyFleet(folder, num_rounds=2)
    absurd = {"task": {"w": torch.full((4,), 1e7)}, "sub-generator/0": {"g": torch.ones(3)}}
    fleet.clients["cam-2"].broken = lambda sent, draft: (Artefacts(absurd, sent.facts), draft)
    return fleet


@pytest.fixture(scope="module")
def quarantined(tmp_path_factory: pytest.TempPathFactory):
    fleet = with_an_absurd_upload(tmp_path_factory.mktemp("quarantined"))
    fleet.run()
    yield fleet
    fleet.close()


@pytest.mark.parametrize("step", [Step.ROUND_CLOSED, Step.AGGREGATED, Step.COMMITTED, Step.PUBLISHED])
def test_a_crash_around_a_quarantine_names_the_same_client_once_and_changes_nothing_for_the_others(
    tmp_path: Path, quarantined: TinyFleet, step: Step
):
    with contextlib.closing(with_an_absurd_upload(tmp_path)) as fleet:
        runs_through_a_crash(fleet, step)
        assert dict(state_of(fleet).times) == {"cam-1": 2, "cam-3": 2}
        assert fleet.outcome() == quarantined.outcome()
        assert fleet.store.quarantined() == quarantined.store.quarantined()
        assert list(fleet.store.quarantined()) == ["cam-2"]


def test_a_crash_after_the_epoch_was_raised_leaves_a_fleet_that_goes_on_in_it(tmp_path: Path):
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=2)) as fleet:
        fleet.run(until=lambda: fleet.rounds.index == 1)
        fleet.kill_aggregator()
        shutil.rmtree(tmp_path / "aggregator")
        for client in fleet.clients.values():
            client.uploaded = -1
        fleet.claim, fleet.crash_at = Claim.ASK, Step.EPOCH_RAISED
        fleet.new_service()
        with pytest.raises(Crash):
            fleet.run()
        assert fleet.store.epoch() == 1
        fleet.kill_aggregator()
        fleet.new_service()
        fleet.run()
        assert dict(state_of(fleet).times) == {"cam-1": 2, "cam-2": 2, "cam-3": 2}
        assert {client.manifest.epoch for client in fleet.clients.values()} == {fleet.store.epoch()}
        assert fleet.store.epoch() == 1


@pytest.mark.parametrize("seed", range(3))
def test_messages_lost_repeated_and_overtaking_each_other_change_no_bit(
    tmp_path: Path, undisturbed: TinyFleet, seed: int
):
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=2, deadline_s=1e6)) as fleet:
        fleet.broker.faults = Faults(random.Random(seed), drop=0.2, duplicate=0.3, reorder=True)
        fleet.run(for_s=3600)
        assert fleet.outcome() == undisturbed.outcome()


def test_clients_that_crash_together_with_the_aggregator_change_nothing(tmp_path: Path, undisturbed: TinyFleet):
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=2)) as fleet:
        fleet.crash_at, fleet.skip = Step.UPLOAD_STORED, 4
        with pytest.raises(Crash):
            fleet.run()
        fleet.kill_aggregator()
        for client_id in list(fleet.clients):
            fleet.kill_client(client_id)
            fleet.add_client(client_id, boot="b2")
        fleet.new_service()
        fleet.run()
        assert fleet.outcome() == undisturbed.outcome()


def test_a_client_that_vanishes_costs_the_round_its_deadline_not_the_run(tmp_path: Path):
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=2)) as fleet:
        fleet.clients["cam-2"].dies_in = 1
        fleet.run(until=lambda: fleet.rounds.index == 1 and fleet.clients["cam-1"].uploaded == 1)
        fleet.kill_client("cam-2")
        fleet.run(until=lambda: fleet.rounds.index == 2)
        assert dict(state_of(fleet).times) == {"cam-1": 2, "cam-2": 1, "cam-3": 2}
        closed = events(fleet, "round closed")[-1]
        assert (closed["by"], closed["uploads"]) == ("deadline", 2)
        assert fleet.store.download("cam-2").round == 2
        fleet.add_client("cam-2", boot="b2")
        fleet.run()
        assert fleet.clients["cam-2"].manifest.round == 2


def test_a_client_that_comes_online_is_told_how_much_time_is_left_now(tmp_path: Path):
    fleet = TinyFleet(tmp_path, ("cam-1",), num_clients=2, deadline_s=60)
    fleet.run(until=lambda: fleet.service.coordinator.rounds.accepted == ("cam-1",))
    end = fleet.now + 7.0
    fleet.run(until=lambda: fleet.now >= end)
    late = fleet.add_client("cam-2")
    heard: list[float] = []

    def told() -> bool:
        if late.announcement is not None:
            heard.append(late.announcement.deadline_s - fleet.rounds.remaining_s(fleet.now))
        return len(heard) > 20

    fleet.run(until=told)
    assert heard[-1] < 2.0
    fleet.close()


def test_a_first_round_has_its_whole_time_however_long_the_models_took_to_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def slowly(exporter: TinyExporter) -> dict[str, bytes]:
        fleet.now += 50
        return {"graph/task": b"a graph"}

    fleet = TinyFleet(tmp_path, deadline_s=60)
    fleet.kill_aggregator()
    shutil.rmtree(tmp_path / "aggregator")
    monkeypatch.setattr(TinyExporter, "graphs", slowly)
    fleet.new_service().start()
    assert fleet.now == 150
    assert fleet.rounds.remaining_s(fleet.now) == 60
    fleet.close()


def test_a_late_joiner_gets_the_average_and_takes_part(tmp_path: Path):
    with contextlib.closing(TinyFleet(tmp_path, ("cam-1", "cam-2"), num_rounds=4)) as fleet:
        fleet.run(until=lambda: fleet.rounds.index == 2)
        late = fleet.add_client("cam-9")
        fleet.run(until=lambda: late.manifest is not None)
        assert late.download().average["w"].equal(state_of(fleet).average["w"])
        fleet.run()
        assert "cam-9" in fleet.store.clients()


def test_a_client_that_lost_its_disk_gets_its_own_sub_generators_back(tmp_path: Path):
    with contextlib.closing(TinyFleet(tmp_path)) as fleet:
        fleet.run(until=lambda: fleet.rounds.index == 1)
        fleet.kill_client("cam-1")
        again = fleet.add_client("cam-1", boot="b2", disk="an-empty-disk")
        fleet.run()
        assert again.download().generators[0]["g"].tolist() == [1, 1, 1]
        assert dict(state_of(fleet).times)["cam-1"] == 3


def test_a_restart_with_another_spec_is_refused(fleet: TinyFleet):
    fleet.run(until=lambda: fleet.rounds.index == 1)
    fleet.kill_aggregator()
    with pytest.raises(SettingsError, match="its run has --seed 7, now 8 is asked for"):
        fleet.new_service(tiny_spec(run_seed=8))
    fleet.new_service()


def test_a_deployed_run_equals_a_plain_loop_to_the_bit(fleet: TinyFleet):
    fleet.run()
    method = TinyMethod()
    state, initial = TinyState(), method.initial_download(seeded_generator(SEED, 0, "initial"))
    downloads = dict.fromkeys(fleet.clients, initial)
    for index in range(3):
        uploads = {}
        for client in fleet.clients:
            rng = seeded_generator(SEED, index, client)
            _, uploads[client] = method.local_round(None, None, downloads[client], rng, sampler=None)
        rng = seeded_generator(SEED, index, "aggregator")
        state, downloads = method.aggregate(state, uploads, rng, sampler=None)
    for name, client in fleet.clients.items():
        assert client.download().personalised["w"].equal(downloads[name].personalised["w"])
        assert client.download().average["w"].equal(downloads[name].average["w"])


def test_a_round_that_its_deadline_closed_stays_closed_over_a_crash(tmp_path: Path):
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=1)) as fleet:
        late = fleet.clients["cam-2"]
        late.dies_in = 0
        fleet.crash_at = Step.ROUND_CLOSED
        with pytest.raises(Crash):
            fleet.run()
        fleet.kill_aggregator()
        late.dies_in = 9
        fleet.new_service()
        fleet.run(for_s=10)
        assert dict(state_of(fleet).times) == {"cam-1": 1, "cam-3": 1}


LATE = {"w": torch.tensor([8.0, -4.0, 2.0, 1.0])}


def with_a_late_client(folder: Path) -> TinyFleet:
    """A fleet of two rounds in which cam-2 sends what it trained for the first while the second is open."""
    fleet = TinyFleet(folder, num_rounds=2, deadline_s=5, late_rounds=1)
    fleet.clients["cam-2"].dies_in = 0
    return fleet


def comes_late(fleet: TinyFleet) -> None:
    """Let cam-2 send it, once round 1 is open."""
    late = fleet.clients["cam-2"]
    fleet.run(until=lambda: late.announcement is not None and (late.announcement.round, fleet.rounds.index) == (1, 1))
    late.send(TinyUpload(LATE, {0: {"g": torch.ones(3)}}, 1).pack(), 0, fleet.now)


def counted_late(fleet: TinyFleet) -> None:
    assert [(event["client"], event["round"], event["rounds_late"]) for event in late_ones(fleet)] == [("cam-2", 1, 1)]
    assert dict(state_of(fleet).times) == {"cam-1": 2, "cam-2": 1, "cam-3": 2}
    assert [(one.accepted, one.counts_in) for one in fleet.clients["cam-2"].verdicts if one.sender == "aggregator"] in (
        [(True, 1)],
        [(True, 1)] * 2,
    )


def late_ones(fleet: TinyFleet) -> list[dict]:
    return [event for event in events(fleet, "upload accepted") if event.get("rounds_late")]


def test_an_upload_that_comes_after_its_round_counts_in_the_next_one_drawn_back_to_the_newest_model(tmp_path: Path):
    with contextlib.closing(with_a_late_client(tmp_path)) as fleet:
        comes_late(fleet)
        newest = state_of(fleet).average["w"]
        fleet.run()
        counted_late(fleet)
        share = 1 / math.sqrt(2)
        expected = (1 - share) * newest + share * LATE["w"]
        torch.testing.assert_close(state_of(fleet).sums["cam-2"]["w"], expected)
        assert events(fleet, "round closed")[1]["by"] == "quorum"


@pytest.mark.parametrize("step", [Step.UPLOAD_STORED, Step.UPLOAD_CONCLUDED, Step.ROUND_CLOSED, Step.COMMITTED])
def test_a_crash_around_a_late_upload_counts_it_once(tmp_path: Path, step: Step):
    with contextlib.closing(with_a_late_client(tmp_path)) as fleet:
        comes_late(fleet)
        runs_through_a_crash(fleet, step)
        counted_late(fleet)


def test_what_was_broadcast_is_not_sent_again_one_by_one(fleet: TinyFleet, monkeypatch: pytest.MonkeyPatch):
    sent: list[tuple[str, int, set[str]]] = []
    send = fleet.service._parts.courier.send

    def noted(peer: str, manifest: Manifest, digests: Sequence[str], now: float, *more: Any, **how: Any) -> str:
        sent.append((peer, manifest.round, set(digests)))
        return send(peer, manifest, digests, now, *more, **how)

    monkeypatch.setattr(fleet.service._parts.courier, "send", noted)
    fleet.run()
    shared = {index: digests for peer, index, digests in sent if peer == "*"}
    assert shared.keys() == {1, 2, 3}
    assert all(not digests & shared.get(index, set()) for peer, index, digests in sent if peer != "*")


def test_a_rounds_downloads_go_out_a_few_at_a_time_and_everybody_gets_its(
    fleet: TinyFleet, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(downloads, "MAX_OFFERS", 1)
    offered: list[tuple[float, str]] = []
    original = fleet.service._parts.courier.send

    def sent(peer: str, manifest: Manifest, *arguments: Any, **how: Any) -> Any:
        if (manifest.round, manifest.client_id) == (3, peer):
            offered.append((fleet.now, peer))
        return original(peer, manifest, *arguments, **how)

    monkeypatch.setattr(fleet.service._parts.courier, "send", sent)
    fleet.run()
    offered = [turn for turn in offered if turn[1] != EVERYBODY]
    assert [peer for _, peer in offered] == ["cam-1", "cam-2", "cam-3"]
    assert len({at for at, _ in offered}) == 2, "not all in one turn of the loop"
    assert {client.manifest.round for client in fleet.clients.values()} == {3}


def test_a_download_made_for_a_round_that_has_passed_is_made_again(fleet: TinyFleet):
    fleet.run(until=lambda: fleet.rounds.index == 1)
    newest = fleet.store.download("cam-1")
    stale = fleet.service._parts.aggregation.download_for("cam-1", 0, None)
    fleet.service.coordinator._downloads._prepared(stale, fleet.now)
    assert fleet.store.download("cam-1") == newest


def test_a_blob_that_is_being_received_is_not_collected(fleet: TinyFleet):
    fleet.run(until=lambda: fleet.rounds.index == 1)
    blobs = fleet.service._parts.blobs
    digest = blobs.put(b"a sub-generator of an upload on its way")
    entry = BlobEntry("sub-generator/1", digest, 39)
    fleet.service._parts.arriving.begin("cam-9", Manifest("up", "tiny-fleet", "cam-9", 1, 1, (entry,)))
    fleet.service.coordinator._collect()
    assert blobs.has(digest)
    fleet.service._parts.arriving.let_go("cam-9")
    fleet.service.coordinator._collect()
    assert not blobs.has(digest)


def test_a_mistake_of_the_method_itself_is_in_the_log_and_every_client_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    fleet = TinyFleet(tmp_path, num_rounds=1)
    monkeypatch.setattr(TinyMethod, "aggregate", lambda *arguments, **more: None)
    try:
        fleet.run()
        (record,) = [one for one in caplog.records if "aggregation fails with every upload" in one.getMessage()]
        assert "aggregate returned None, expected" in str(record.exc_info[1])
        waits = fleet_waits(facts_of(fleet.service._parts, fleet.rounds, 0.0))
        assert [wait.reason for wait in waits] == [Why.AGGREGATION_FAILS]
        assert "round 0 has no aggregation, its uploads were in vain: " in waits[0].text
        assert list(fleet.store.quarantined()) == ["cam-1", "cam-2", "cam-3"]
        assert fleet.rounds.index == 1
    finally:
        fleet.close()


@pytest.mark.parametrize("num_failed", [1, 2])
def test_a_run_ends_with_an_error_if_none_of_its_rounds_was_aggregated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failed: int
):
    with contextlib.closing(TinyFleet(tmp_path, num_rounds=2)) as fleet:
        with monkeypatch.context() as patch:
            patch.setattr(TinyMethod, "aggregate", lambda *arguments, **more: None)
            fleet.run(until=lambda: fleet.rounds.index == num_failed)
        fleet.run()
        fleet.kill_aggregator()
        fleet.new_service().coordinator.finish.grace_s = 0  # the same command once more
        if num_failed == 1:
            assert fleet.service.run(threading.Event())
            return
        with pytest.raises(NothingLearned, match="no upload could be used in 2 rounds"):
            fleet.service.run(threading.Event())


@pytest.mark.parametrize("leads", [True, False])
def test_blocks_that_belong_to_nothing_mute_who_sends_them_unless_another_aggregator_leads(
    tmp_path: Path, leads: bool
) -> None:
    fleet = TinyFleet(tmp_path, ("cam-1",), num_rounds=None)
    fleet.run(until=lambda: fleet.rounds.index == 1)
    if not leads:
        ours = announcement(fleet.service._parts, fleet.rounds, fleet.now)
        ahead = replace(ours, instance="other-0", epoch=ours.epoch + 1)
        fleet.service.coordinator._handle([Received("*", ahead)], fleet.now)
    assert fleet.service.coordinator.leads is leads
    for index in range(2 * FLOOD):
        fleet.service.loop._receive(topic_of(FLEET, "up", "cam-1"), encode(Block("1" * 32, index, b"x")))
    began = fleet.now
    fleet.run(until=lambda: fleet.now > began + 1)
    assert fleet.service.health()["muted"] == (["cam-1"] if leads else []), "it would be deaf to it when it takes over"
    fleet.close()

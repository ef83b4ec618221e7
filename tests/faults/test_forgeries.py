"""Somebody may publish anything on every topic, and has recorded all that was said: no broker rule helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.tiny_fleet import FLEET, TinyFleet

from replayfleet.aggregator.trust.release import Releases
from replayfleet.federation.wire.protocol.codec import decode, encode, is_block
from replayfleet.federation.wire.protocol.messages import (
    Announcement,
    Message,
    Offer,
    Presence,
    Progress,
    RolledBack,
    Verdict,
)
from replayfleet.federation.wire.protocol.topics import parse_topic, topic_of
from replayfleet.federation.wire.transport.seal import SEALED, unseal
from tests.support.client_world import World

Forgery = Callable[["Attacker", str, Message], "list[Message]"]


def run(folder: Path, attack: Callable[[World], Any] | None = None) -> tuple[World, Any]:
    """A run of two clients and two rounds; returns what the aggregator made of it."""
    folder.mkdir()
    world = World(folder, num_clients=2, num_rounds=2)
    if attack is not None:
        attack(world)
    for number in range(2):
        world.start_client(f"cam-{number}", number)
    world.until(lambda: all(client.client.finished for client in world.clients.values()))
    state = world.aggregator._parts.store.state()
    return world, sorted((entry.name, entry.digest) for entry in state.blobs)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    world, outcome = run(tmp_path_factory.mktemp("undisturbed") / "world")
    world.close()
    return outcome


class Attacker:
    """Hears everything, and says it again, changed and signed with a key of its own, or not signed at all."""

    def __init__(self, world: World, forge: Forgery, keys: Path) -> None:
        self._forge = forge
        self._releases = Releases(keys)
        self.num_said = 0
        self._saying = False
        self._session = world.broker.session("attacker", on_message=self._on_message, will=None)
        self._session.subscribe(["replayfleet/#"])
        self._session.start()

    def _on_message(self, topic: str, payload: bytes) -> None:
        if self._saying or self.num_said > 400 or payload[:1] != bytes([SEALED]):
            return
        retain = parse_topic(topic).channel in {"round", "state"}
        self._saying = True
        for forged in self._forge(self, topic, decode(unseal(topic, payload).frame)):
            frame = encode(forged)
            for signed in (frame, self._releases.signer.seal(topic, frame)):
                self.num_said += 1
                self._session.publish(topic, signed, retain=retain)
        self._saying = False

    def signed(self, offer: Offer) -> Offer:
        manifest = msgspec.structs.replace(offer.manifest, version=(1 << 53) - 2)
        return msgspec.structs.replace(offer, manifest=self._releases.signed(manifest))


def as_finished(_: Attacker, topic: str, said: Message) -> list[Message]:
    if not isinstance(said, Announcement):
        return []
    return [msgspec.structs.replace(said, state="finished", instance="x")]


def as_another_task(_: Attacker, topic: str, said: Message) -> list[Message]:
    if not isinstance(said, Announcement):
        return []
    task = {**said.spec.task, "class_names": ("a", "b", "c", "d")}
    spec = msgspec.structs.replace(said.spec, task=task, run_seed=99)
    return [msgspec.structs.replace(said, instance="x", epoch=9, spec=spec)]


def as_refused(_: Attacker, topic: str, said: Message) -> list[Message]:
    if not isinstance(said, Progress):
        return []
    return [Verdict(said.sender, said.transfer_id, 0, 1, accepted=False, reason="wrong-layout", instance="x")]


def as_gone(_: Attacker, topic: str, said: Message) -> list[Message]:
    if not isinstance(said, Presence):
        return []
    return [msgspec.structs.replace(said, status="stopped", sequence=1 << 40)]


def as_rolled_back(_: Attacker, topic: str, said: Message) -> list[Message]:
    if not isinstance(said, Progress):
        return []
    return [RolledBack(parse_topic(topic).peer, 0, 1, 0, "crashed")]


def as_another_upload(_: Attacker, topic: str, said: Message) -> list[Message]:
    if not isinstance(said, Offer) or said.sender != "client":
        return []
    return [msgspec.structs.replace(said, manifest=msgspec.structs.replace(said.manifest, facts=b"\x80"))]


def as_a_foreign_model(attacker: Attacker, topic: str, said: Message) -> list[Message]:
    return [attacker.signed(said)] if isinstance(said, Offer) and said.sender == "aggregator" else []


def as_everything(attacker: Attacker, topic: str, said: Message) -> list[Message]:
    return [forged for forge in FORGERIES for forged in forge(attacker, topic, said)]


FORGERIES = (as_finished, as_another_task, as_refused, as_gone, as_rolled_back, as_another_upload, as_a_foreign_model)


@pytest.mark.parametrize(
    "forge",
    [pytest.param(forge, marks=pytest.mark.slow) for forge in FORGERIES] + [as_everything],
    ids=lambda forge: forge.__name__,
)
def test_what_somebody_else_says_in_a_members_name_changes_nothing(
    forge: Forgery, tmp_path: Path, undisturbed: Any
) -> None:
    made: list[Attacker] = []
    world, outcome = run(tmp_path / "world", lambda world: made.append(Attacker(world, forge, tmp_path / "attacker")))
    assert made[0].num_said > 0
    assert outcome == undisturbed
    assert {client.client.serving_version for client in world.clients.values()} == {3}
    world.close()


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[World, list[tuple[str, bytes]], Any]]:
    """A finished run that is going to be continued, all that was said in it, and a session that may say it again."""
    tape: list[tuple[str, bytes]] = []
    sessions: list[Any] = []

    def listen(world: World) -> None:
        session = world.broker.session("attacker", on_message=lambda *message: tape.append(message), will=None)
        session.subscribe(["replayfleet/#"])
        session.start()
        sessions.append(session)

    world, _ = run(tmp_path / "world", listen)
    yield world, list(tape), sessions[0]
    world.close()


def test_what_was_recorded_and_is_played_again_changes_nothing_for_processes_that_began_later(
    recorded: tuple[World, list[tuple[str, bytes]], Any],
) -> None:
    world, tape, attacker = recorded
    assert any(is_block(payload) for _, payload in tape)
    store = world.aggregator._parts.store
    before = {client: store.download(client) for client in store.clients()}
    for client in list(world.clients.values()):
        client.stop()
    for number in range(2):
        world.start_client(f"cam-{number}", number)
    for _ in range(2):
        for topic, payload in tape:
            attacker.publish(topic, payload, retain=parse_topic(topic).channel in {"round", "state"})
        world.pump()
    world.until(lambda: all(client.client.finished for client in world.clients.values()))
    assert {client: store.download(client) for client in store.clients()} == before
    assert {client.client.serving_version for client in world.clients.values()} == {3}
    assert store.round().index == 2


def test_an_announcement_of_a_process_before_ends_no_aggregator(tmp_path: Path) -> None:
    """One that had restarted took it for a copy's, and ended with exit code 2 or raised the epoch, by their names."""
    fleet, tape = TinyFleet(tmp_path, ("cam-1",), num_clients=2), list[tuple[str, bytes]]()
    attacker = fleet.broker.session("attacker", on_message=lambda *message: tape.append(message), will=None)
    attacker.subscribe([topic_of(FLEET, "round")])
    attacker.start()
    fleet.run(until=lambda: bool(tape))
    for _ in range(4):
        said = list(tape)
        fleet.kill_aggregator()
        fleet.new_service()
        fleet.run(until=lambda: fleet.service.coordinator.leads)
        for topic, payload in said:
            attacker.publish(topic, payload)
        fleet.run(until=lambda end=fleet.now + 1.0: fleet.now >= end)  # type: ignore[misc]
        assert (fleet.service.coordinator.leads, fleet.store.epoch()) == (True, 0)
    fleet.close()

"""What a device's cameras see, on the console's page of it, if the device allows it; and what others can put there."""

from __future__ import annotations

import contextlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from replayfleet.aggregator.operator.backup import back_up
from replayfleet.aggregator.operator.thumbnails import AT_ONCE, FOLDER, KEPT_S, MAX_CAMERAS, ThumbnailDesk, pictures_of
from replayfleet.edge_client.flow import Inputs, Picture, Shown
from replayfleet.edge_client.operator.thumbnails import Thumbnails
from replayfleet.federation.wire.protocol.thumbnails import JPEG, MAX_BYTES, Thumbnail, encode_thumbnail
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.interfaces import Seals
from replayfleet.federation.wire.transport.seal import Signer
from tests.support.client_world import World
from tests.support.consoles import console

pytestmark = pytest.mark.usefixtures("served_here")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, num_rounds=None)
    made.start_client("cam-0")
    made.until(lambda: len(made.aggregator.coordinator.rounds.accepted) == 1)  # a member, by its upload
    yield made
    made.close()


def shown(camera: str, frame: int) -> Shown:
    pixels = np.random.default_rng(frame).integers(0, 256, (720, 1280, 3), dtype=np.uint8)
    return Shown(Picture(camera, frame, pixels, 0.0), Inputs(np.zeros((1, 1, 28, 28), np.float32)), None)


def seen(world: World) -> list[str]:
    return [one.camera for one in pictures_of(world.folder / "aggregator", "cam-0")]


def test_a_device_that_allows_it_is_seen_on_its_page(world: World) -> None:
    folder = world.folder / "aggregator"
    with contextlib.closing(Thumbnails(world.clients["cam-0"].say_thumbnail, every_s=0.01)) as sending:
        for camera in ("rear", "<b>front"):
            sending.watch(shown(camera, 1))
        world.until(lambda: seen(world) == ["<b>front", "rear"])
    (front, _) = pictures_of(folder, "cam-0")
    assert front.jpeg[:3] == JPEG
    assert pictures_of(folder, "cam-0", time.time() + KEPT_S + 60) == []
    with console(folder) as url:
        page = urllib.request.urlopen(f"{url}/clients/cam-0").read().decode()
        assert "What its cameras see" in page
        assert "&lt;b&gt;front" in page
        with urllib.request.urlopen(f"{url}/pictures/cam-0/{front.name}.jpg") as answer:
            assert answer.read() == front.jpeg
        for path in ("cam-0/0000", "cam-9/" + front.name, "..%2f/" + front.name, "cam-0/..%2f..%2flock"):
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(f"{url}/pictures/{path}.jpg")
            refused.value.close()
    back_up(folder, world.folder / "backup")
    assert not (world.folder / "backup" / FOLDER).exists()
    world.aggregator.stop()
    world.aggregator = world.start_aggregator()
    assert seen(world) == []


class AllSealed:
    """Whatever comes was said by who it says."""

    def open(self, address: object, topic: str, payload: bytes, now: float) -> bytes:
        return payload


def test_who_is_no_member_leaves_no_picture_and_a_member_a_few_a_second(tmp_path: Path) -> None:
    desk = ThumbnailDesk(tmp_path, cast("Seals", AllSealed()), {"cam-0"}.__contains__)

    def takes(client: str, picture: bytes, now: float) -> list[bytes]:
        desk.take(topic_of("fleet", "thumbnail", client), encode_thumbnail(Thumbnail("front", 1, JPEG + picture)), now)
        return [one.jpeg.removeprefix(JPEG) for one in pictures_of(tmp_path, client)]

    assert takes("cam-9", b"x", 0.0) == []
    assert not (tmp_path / FOLDER).exists()
    assert [takes("cam-0", b"%d" % number, 0.0) for number in range(int(AT_ONCE))][-1] == [b"15"]
    assert takes("cam-0", b"16", 0.0) == [b"15"], "it takes the aggregator's disk and time"
    assert takes("cam-0", b"17", 1.0) == [b"17"]


def test_a_picture_that_is_being_replaced_hides_no_other_camera(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER / "cam-0"
    folder.mkdir(parents=True)
    (folder / "0.new").symlink_to("what it was renamed to")
    (folder / "1").write_bytes(encode_thumbnail(Thumbnail("front", 1, JPEG + b"x")))
    assert [one.camera for one in pictures_of(tmp_path, "cam-0")] == ["front"]


def test_cameras_that_are_gone_give_their_places_to_those_that_are_there(world: World) -> None:
    client, topic = world.clients["cam-0"], topic_of("fleet", "thumbnail", "cam-0")
    session = world.broker.session("cam-0", on_message=lambda *_: None)
    session.start()

    def say(*cameras: str) -> None:
        for camera in cameras:
            session.publish(topic, client._signer.seal(topic, encode_thumbnail(Thumbnail(camera, 1, JPEG))))

    former = [f"former-{number}" for number in range(MAX_CAMERAS)]
    say(*former)
    world.until(lambda: seen(world) == former)
    folder = world.folder / "aggregator" / FOLDER / "cam-0"
    for path in folder.iterdir():
        os.utime(path, (0, time.time() - KEPT_S - 1))
    say("front", "rear")
    world.until(lambda: seen(world) == ["front", "rear"])
    assert len(list(folder.iterdir())) == 2


def test_strangers_rubbish_and_too_many_cameras_leave_nothing(world: World) -> None:
    client, topic = world.clients["cam-0"], topic_of("fleet", "thumbnail", "cam-0")
    good = encode_thumbnail(Thumbnail("front", 1, JPEG + b"x"))
    stranger, session = Signer(Ed25519PrivateKey.generate()), world.broker.session("x", on_message=lambda *_: None)
    session.start()
    own = client._signer
    for payload in (
        b"", good, b"\x02" + good, stranger.seal(topic, good), own.seal(topic_of("fleet", "state", "cam-0"), good),
        own.seal(topic, b""), own.seal(topic, b"\xff" * (MAX_BYTES + 1)),
        own.seal(topic, encode_thumbnail(Thumbnail("f", 1, b"<svg>"))),
        own.seal(topic, encode_thumbnail(Thumbnail("", 1, JPEG))),
    ):  # fmt: skip
        session.publish(topic, payload)
    for number in range(3 * MAX_CAMERAS):
        session.publish(topic, own.seal(topic, encode_thumbnail(Thumbnail(f"../{number}", 1, JPEG))))
    world.until(lambda: len(seen(world)) == MAX_CAMERAS)
    for _ in range(20):
        world.pump()
    assert len(seen(world)) == MAX_CAMERAS
    assert len(list((world.folder / "aggregator" / FOLDER / "cam-0").iterdir())) == MAX_CAMERAS
    assert world.aggregator.coordinator.rounds.accepted

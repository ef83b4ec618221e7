"""Who feeds the watchdog: a whole client over a real broker, hung in one loop after the other, and a real socket."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.client_world import TASK, ToySource, TrainerThread, World
from support.manager_socket import ManagerSocket

from replayfleet.edge_client.flow import CameraError, Source
from replayfleet.edge_client.frames.answerer import Answerer
from replayfleet.edge_client.frames.inference import InferenceLoop
from replayfleet.edge_client.frames.views import WholePicture
from replayfleet.edge_client.service import ClientService, Identity
from replayfleet.edge_client.serving.slot import ModelSlot
from replayfleet.edge_client.sync.parts import Compute
from replayfleet.federation.service.systemd import Notifier, ServiceManager
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.broker import find_mosquitto, open_broker
from replayfleet.federation.wire.transport.mqtt import MqttSession
from tests.support.ports import free_port

WATCHDOG_S = 2.0
FED_WITHIN_S = 60.0
"""About one second on a quiet machine."""
STILL_S = 4.0
"""A client that turns is fed three times meanwhile."""
LOOPS = ("capture", "inference", "mqtt", "main")


class Hung:
    """Doors in a client's loops that a test shuts."""

    def __init__(self) -> None:
        self._open = {name: threading.Event() for name in LOOPS}
        self.reached = threading.Event()
        self.release()

    def pass_by(self, name: str) -> None:
        if not self._open[name].is_set():
            self.reached.set()
        assert self._open[name].wait(120)

    def hang(self, name: str) -> None:
        self._open[name].clear()

    def release(self) -> None:
        for door in self._open.values():
            door.set()


class MqttWorld(World):
    """The aggregator and the client in this process, mosquitto between them."""

    url = ""

    def _connect(self, client_id: str, on_message: Any, will: Any) -> Any:
        return MqttSession(self.url, client_id, on_message=on_message, will=will, clean=will is None)


class RunningClient:
    """A client whose ``run`` has a thread, with a manager that listens."""

    def __init__(self, world: MqttWorld, folder: Path, name: str) -> None:
        self.name = name
        self.doors = Hung()
        self._stop = threading.Event()
        self.systemd = ManagerSocket(str(folder / f"{name}.notify"))
        self.systemd.__enter__()
        folder.joinpath(name).mkdir()

        def connect(client_id: str, on_message: Callable[[str, bytes], None], will: Any) -> Any:
            def receive(topic: str, payload: bytes) -> None:
                self.doors.pass_by("mqtt")
                on_message(topic, payload)

            return world._connect(client_id, receive, will)

        self.service = ClientService(
            Identity("fleet", name, "cpu", Compute()),
            folder / name,
            connect,
            lambda _: self._source(),
            spawn=TrainerThread,
        )
        self.service.watchers.append(lambda _: self.doors.pass_by("inference"))
        tick = self.service.client.tick
        self.service.client.tick = lambda now: (self.doors.pass_by("main"), tick(now))[1]  # type: ignore[method-assign]
        manager = ServiceManager(Notifier(self.systemd.address), WATCHDOG_S)
        self._thread = threading.Thread(target=self.service.run, args=(self._stop,), kwargs={"manager": manager})
        self._thread.start()

    def _source(self) -> Source:
        source = ToySource(0, rounds=0).source
        camera = source.pictures.cameras[0]
        clock = camera._clock

        def seen() -> float:
            self.doors.pass_by("capture")
            return clock()

        camera._clock = seen
        return source

    def hang(self, loop: str) -> None:
        self.doors.hang(loop)
        if loop != "mqtt":
            return
        visitor = MqttSession(MqttWorld.url, "visitor", on_message=lambda *_: None)
        visitor.start()
        visitor.publish(
            topic_of("fleet", "feedback", self.name), b"{}"
        )  # its callback never comes back; paho's thread lives
        while not visitor.connected:
            time.sleep(0.05)
        visitor.stop()

    def end(self) -> None:
        self.doors.release()
        self._stop.set()
        self._thread.join(60)
        self.systemd.__exit__(None, None, None)


@dataclass(frozen=True)
class Seen:
    """Of a client that hung in one loop: fed before, how often meanwhile, fed afterwards."""

    before: bool
    meanwhile: int
    afterwards: bool


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Clients hang at the same time, each in another loop."""
    if find_mosquitto() is None:
        pytest.skip("no mosquitto on this machine")
    folder = tmp_path_factory.mktemp("watchdog")
    with contextlib.ExitStack() as stack:
        MqttWorld.url = stack.enter_context(open_broker(log=logging.getLogger(__name__))).url
        world = MqttWorld(folder, num_clients=len(LOOPS))
        stack.callback(world.close)
        clients = {loop: RunningClient(world, folder, loop) for loop in LOOPS}
        for client in clients.values():
            stack.callback(client.end)
        world.until(lambda: all(client.service.counts.num_frames > 0 for client in clients.values()))
        before = {loop: client.systemd.hears("WATCHDOG=1", FED_WITHIN_S) for loop, client in clients.items()}
        for loop, client in clients.items():
            client.hang(loop)
            assert client.doors.reached.wait(60), "it hangs from now on, however slow this machine is"
            client.systemd.read()
        time.sleep(STILL_S)
        meanwhile = {loop: client.systemd.read().count("WATCHDOG=1") for loop, client in clients.items()}
        for client in clients.values():
            client.doors.release()
        afterwards = {loop: client.systemd.hears("WATCHDOG=1", FED_WITHIN_S) for loop, client in clients.items()}
    return {loop: Seen(before[loop], meanwhile[loop], afterwards[loop]) for loop in LOOPS}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_hangs_in_one_loop_feeds_no_watchdog(seen: dict[str, Seen], loop: str) -> None:
    assert seen[loop].before, "every loop turns"
    assert seen[loop].meanwhile <= 1, "what turned before it hung may feed it once more"
    assert seen[loop].afterwards, "it turns again"


def test_a_lost_camera_and_an_ended_recording_are_no_reason_to_restart() -> None:
    class Lost:
        name, live, class_names = "lost", True, ()

        def pictures(self, stop: threading.Event) -> Iterator[Any]:
            raise CameraError("unplugged")
            yield

        def describe(self) -> str:
            return "lost"

    class Ended(Lost):
        name, live = "ended", False

        def pictures(self, stop: threading.Event) -> Iterator[Any]:
            yield from ()

    class Broken(Lost):
        name = "broken"

        def pictures(self, stop: threading.Event) -> Iterator[Any]:
            raise RuntimeError("a mistake in the program")
            yield

    answerer = Answerer(ModelSlot(), WholePicture(TASK))
    loop = InferenceLoop([Lost(), Ended(), Broken()], answerer)
    loop.start()
    time.sleep(0.5)
    before = loop.turns
    time.sleep(2.5)
    after = loop.turns
    loop.stop()
    assert set(after) == {"capture lost", "capture broken", "inference"}
    assert after["capture lost"] > before["capture lost"]
    assert after["inference"] > before["inference"], "idle is right where no picture comes"
    assert after["capture broken"] == before["capture broken"], "only a restart brings it back"


def test_a_broker_that_is_away_is_waited_for_and_a_new_client_is_not_ready_before(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "data").mkdir()

    def connect(client_id: str, on_message: Any, will: Any) -> Any:
        return MqttSession(f"mqtt://127.0.0.1:{port}", client_id, on_message=on_message, will=will)

    with ManagerSocket(str(tmp_path / "notify")) as systemd:
        service = ClientService(
            Identity("fleet", "cam-0", "cpu", Compute()),
            tmp_path / "data",
            connect,
            lambda _: ToySource(0),
            spawn=TrainerThread,
        )
        stop = threading.Event()
        manager = ServiceManager(Notifier(systemd.address), WATCHDOG_S)
        thread = threading.Thread(target=service.run, args=(stop,), kwargs={"manager": manager})
        thread.start()
        assert systemd.hears("EXTEND_TIMEOUT_USEC=60000000", FED_WITHIN_S)
        time.sleep(1.0)
        stop.set()
        thread.join(60)
        said = systemd.read()
    assert not [line for line in said if "READY" in line]
    assert said[-1] == "STOPPING=1\nSTATUS=stopping"


def test_paho_is_seen_to_turn_while_nothing_travels() -> None:
    if find_mosquitto() is None:
        pytest.skip("no mosquitto on this machine")
    with open_broker(log=logging.getLogger(__name__)) as broker:
        session = MqttSession(broker.url, "idle", on_message=lambda *_: None)
        session.start()
        deadline = time.monotonic() + 60
        while not session.connected and time.monotonic() < deadline:
            time.sleep(0.05)
        before = session.turns
        time.sleep(3.0)
        assert session.turns > before
        session.stop()

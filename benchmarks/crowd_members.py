"""Light members of ``crowd`` in one process: a connection, a key and a session each, all served by one thread.

Some may be asked to fare badly, ``churn`` percent of them in a minute, a quarter each way:

- *fails*: its connection ends without a goodbye, and it is back under its name, with its disk, after 5 to 60 s;
- *freezes*: it says nothing and reads nothing for so long, its connection open;
- *leaves*: its connection ends for good, and one with a name and a key of its own comes in its place;
- *strays*: its next upload has a number that isn't finite.
"""

from __future__ import annotations

import json
import math
import random
import selectors
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as mqtt
import torch

from benchmarks.idle_method import Idle
from replayfleet.federation.backoff import fleet_backoff
from replayfleet.federation.errors import Reason
from replayfleet.federation.methods.kit.records import Artefacts, RoundData
from replayfleet.federation.wire.transport.connecting import CONTROL_KEEPALIVE_S
from replayfleet.models.specs import TaskSpec

if TYPE_CHECKING:
    from support.tiny_fleet import TinyClient

    from replayfleet.federation.wire.protocol.messages import Manifest, Verdict
    from replayfleet.federation.wire.transport.interfaces import OnMessage, Will

JOIN_EVERY_S = 0.05
"""A member of each process connects so often."""
TICK_S = 0.5
"""A member to whom nobody speaks looks at the time so often."""
SLICE_S = 0.25
"""How long members work before this process looks after heartbeats and connections: a device's own would go on."""
FEW_BYTES = 4096
"""No block of a transfer is so short."""
AWAY_S = (5.0, 60.0)
FATES = ("fails", "freezes", "leaves", "strays")
WHOLE = Idle(task=TaskSpec(1, 28, tuple(f"class {place}" for place in range(10))))
"""The method of a crowd with whole models: ResNet20's 2.8 MB."""


def members(folder: Path, url: str, num_members: int, place: int, processes: int, whole: int, churn: int) -> None:
    """Be every ``processes``-th member until SIGTERM, and say how it went."""
    from replayfleet.federation.service.torch_setup import prepare_torch

    prepare_torch(1)
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    names = [f"cam-{number:05}" for number in range(place, num_members, processes)]
    crowd = _Crowd(folder, url, names, bool(whole), churn, random.Random(place))
    while not terminated.is_set():
        crowd.turn(time.monotonic())
    print(json.dumps(crowd.told()), flush=True)


class _Crowd:
    def __init__(
        self, folder: Path, url: str, names: list[str], whole: bool, churn: int, chance: random.Random
    ) -> None:
        self._folder, self._lines, self._whole, self._chance = folder, _Lines(url), whole, chance
        self._left, self._joins_at, self._fates_at, self._churn = names, 0.0, 0.0, churn
        self._members: list[_Member] = []
        self._away: list[tuple[float, str, int]] = []
        self._said: Counter[str] = Counter()
        self._frozen: list[str] = []
        self._late_s = 0.0

    def turn(self, now: float) -> None:
        back = next((each for each in self._away if each[0] <= now), None)
        if now >= self._joins_at and (back or self._left):
            self._joins_at = now + JOIN_EVERY_S
            if back:
                self._away.remove(back)
            _, name, boot = back or (0.0, self._left.pop(0), 1)
            self._members.append(_Member(self._folder, name, boot, self._lines, self._whole))
        if not self._left and now >= self._fates_at:
            self._fates_at = now + 1.0
            self._deal_fates(now)
        self._lines.turn(now)
        for member in self._members:
            member.beat(now)
        self._work()

    def _work(self) -> None:
        """Who was spoken to in few words works first, then who has waited longest."""
        ends = time.monotonic() + SLICE_S
        for member in sorted(self._members, key=lambda member: (not member.hurries, member.due)):
            now = time.monotonic()
            if now > ends:
                return
            if member.due <= now:
                member.turn(now)

    def _deal_fates(self, now: float) -> None:
        for member in list(self._members):
            if member.wakes_at > now or self._chance.random() * 6000 >= self._churn:
                continue
            fate = self._chance.choice(FATES)
            away_s = self._chance.uniform(*AWAY_S)
            self._said[fate] += 1
            if fate == "strays":
                member.client.broken = _not_finite
            elif fate == "freezes":
                self._frozen.append(member.name)
                member.freeze(now + away_s)
                self._lines.leave_alone(member.line, until=member.wakes_at)
            else:
                self._members.remove(member)
                self._lines.cut(member.line)
                self._count(member)
                if fate == "fails":
                    self._away.append((now + away_s, member.name, member.boot + 1))
                else:
                    self._left.append(f"{member.name}-later")

    def _count(self, member: _Member) -> None:
        self._said.update(f"told {v.reason or 'accepted'}" for v in member.client.verdicts)
        self._late_s = max(self._late_s, member.late_s)

    def told(self) -> dict[str, Any]:
        for member in self._members:
            self._count(member)
        late_s = round(self._late_s, 1)
        return {**self._said, "cut off": self._lines.num_lost, "latest turn, s": late_s, "frozen": self._frozen}


def _not_finite(artefacts: Artefacts, draft: Manifest) -> tuple[Artefacts, Manifest]:
    """Put infinity into the first number of each set."""
    sets = {}
    for name, parameters in artefacts.parameter_sets.items():
        sets[name] = {key: value.clone() for key, value in parameters.items()}
        next(value for value in sets[name].values() if value.is_floating_point()).view(-1)[0] = torch.inf
    return Artefacts(sets, artefacts.facts), draft


class _Member:
    """A light client, which has its turn when somebody has spoken to it, and twice a second."""

    def __init__(self, folder: Path, name: str, boot: int, lines: _Lines, whole: bool) -> None:
        from support.tiny_fleet import TinyClient

        self.name, self.boot, self.wakes_at = name, boot, 0.0
        self._turned_at, self.late_s, self.due, self.hurries = 0.0, 0.0, 0.0, False
        broker = _Broker(lines, self._heard)
        samples = 1 + sum(name.encode()) % 100
        data = RoundData(torch.empty(samples, 1, 1, 1), torch.zeros(samples, dtype=torch.int64))
        self._whole = whole
        self.client: TinyClient = TinyClient(broker, name, folder / name, f"b{boot}", WHOLE if whole else None, data)
        self.line = broker.line
        self._done, self._again_at, self._patience = 0, math.inf, fleet_backoff()

    def _heard(self, num_bytes: int) -> None:
        self.due = min(self.due, time.monotonic())
        self.hurries = self.hurries or num_bytes <= FEW_BYTES

    def beat(self, now: float) -> None:
        """Say that it is there, unless it is frozen."""
        if now >= self.wakes_at:
            self.client.beat(now)

    def freeze(self, until: float) -> None:
        """Do nothing until then."""
        self.wakes_at = self.due = until

    def turn(self, now: float) -> None:
        """Deal with what came, and look at the time."""
        if self.wakes_at:
            self.wakes_at = self._turned_at = 0.0  # nobody else made it late
        self.late_s = max(self.late_s, now - self._turned_at) if self._turned_at else 0.0
        self.due, self.hurries, self._turned_at = now + TICK_S, False, now
        self.client.pump(now)
        if len(self.client.verdicts) > self._done:
            self._done = len(self.client.verdicts)
            self._hears(self.client.verdicts[-1], now)
        if now >= self._again_at:
            self._again_at = math.inf
            self.client.uploaded -= 1  # as an edge client does, it offers once more what was busy

    def _hears(self, verdict: Verdict, now: float) -> None:
        if verdict.accepted:
            self._patience.reset()
        else:
            self.client.broken = None
        if verdict.reason == Reason.BUSY.value:
            self._again_at = now + self._patience.next_s()
        self._tidy_up()

    def _tidy_up(self) -> None:
        """Keep no model but the newest: the crowd's disk is memory."""
        if self._whole and self.client.manifest is not None:
            self.client.blobs.collect({entry.digest for entry in self.client.manifest.blobs})


class _Lines:
    """Connections of one process, all served by its one thread: a thread for each would be most of the work."""

    def __init__(self, url: str) -> None:
        self._address = (url.split("//")[1].split(":")[0], int(url.rsplit(":", 1)[1]))
        self._selector = selectors.DefaultSelector()
        self._lines: dict[_Line, float] = {}  # until when it is left alone
        self._looks_at = 0.0
        self.num_lost = 0

    def add(self, line: _Line) -> None:
        self._lines[line] = 0.0
        line.client.connect(*self._address, keepalive=CONTROL_KEEPALIVE_S)
        self._selector.register(line.client.socket(), selectors.EVENT_READ, line.client)

    def lost(self, line: _Line) -> None:
        """Connect again: a session at the broker outlives its connection."""
        if line in self._lines:
            self.num_lost += 1
            self._drop(line)
            self.add(line)

    def cut(self, line: _Line) -> None:
        """End a connection as a power cut does."""
        self._drop(line)
        line.client.socket().close()

    def leave_alone(self, line: _Line, until: float) -> None:
        """Neither read nor write."""
        self._unregister(line)
        self._lines[line] = until

    def turn(self, now: float) -> None:
        """Serve what is there, for at most a moment."""
        for key, _ in self._selector.select(0.02):
            key.data.loop_read()
        looks = now >= self._looks_at
        if looks:
            self._looks_at = now + TICK_S
        for line, until in list(self._lines.items()):
            if until > now:
                continue
            if until:
                self._lines[line] = 0.0
                self._selector.register(line.client.socket(), selectors.EVENT_READ, line.client)
            if looks:
                line.client.loop_misc()
            if line.client.want_write():
                line.client.loop_write()

    def _drop(self, line: _Line) -> None:
        del self._lines[line]
        self._unregister(line)

    def _unregister(self, line: _Line) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is line.client:
                self._selector.unregister(key.fileobj)


class _Line:
    """A session of MQTT without a thread of its own."""

    max_payload_bytes = 400_000

    def __init__(self, lines: _Lines, client_id: str, on_message: OnMessage, will: Will | None, heard: Any) -> None:
        self._topics: list[str] = []
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id, clean_session=True)
        if will is not None:
            self.client.will_set(will.topic, will.payload, 1, will.retain)

        def came(_client: Any, _data: Any, message: mqtt.MQTTMessage) -> None:
            on_message(message.topic, message.payload)
            heard(len(message.payload))

        self.client.on_message = came
        self.client.on_connect = lambda *_: self.client.subscribe([(topic, 1) for topic in self._topics])
        self.client.on_disconnect = lambda *_: lines.lost(self)
        self.start = lambda: lines.add(self)

    def subscribe(self, topics: Sequence[str]) -> None:
        self._topics += topics

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self.client.publish(topic, payload, 1, retain)


class _Broker:
    """Makes a line whose messages wake its member."""

    line: _Line

    def __init__(self, lines: _Lines, heard: Any) -> None:
        self._lines, self._heard = lines, heard

    def session(self, client_id: str, *, on_message: OnMessage, will: Will | None) -> Any:
        self.line = _Line(self._lines, client_id, on_message, will, self._heard)
        return self.line


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("", "tests")]
    where, url, *numbers = sys.argv[1:]
    members(Path(where), url, *map(int, numbers))

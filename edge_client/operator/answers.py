"""``edge-client start --answers``: what the device sees, as JSON on an MQTT topic of the operator's choice.

One message holds the newest answers of one camera; pictures never leave. A thread sends them, the newest alone, so that
a slow broker delays no answer, and one that is away gets what is new when it is back.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from replayfleet.edge_client.flow import Shown
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.topics import ROOT
from replayfleet.federation.wire.transport.broker_address import Credentials, TlsSettings, redacted
from replayfleet.federation.wire.transport.connecting import Connector
from replayfleet.federation.wire.transport.interfaces import Connect, Session, Will

EVERY_S = 0.2
"""Between two messages of a camera, at least."""
DISCOVERY = "homeassistant"
MAX_TOPIC = 200
ONLINE, OFFLINE = b"online", b"offline"

log = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where answers go.

    Attributes:
        broker: its URL.
        topic: that those of the cameras begin with.
    """

    broker: str
    topic: str

    @classmethod
    def parse(cls, url: str) -> Place:
        """Return what ``mqtt[s]://HOST[:PORT]/TOPIC`` says.

        Raises:
            SettingsError: It names no topic, or one that nobody may publish to.
        """
        shown = redacted(url)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise SettingsError(f"--answers {shown!r} is no URL ({error}); expected mqtts://HOST/TOPIC") from None
        topic = parts.path.strip("/")
        if set(url) & set("?#") or not topic:
            raise SettingsError(f"--answers {shown!r} names no topic; expected mqtts://HOST/TOPIC, as in HOST/yard/cam")
        usable = topic.isprintable() and not set(topic) & set("+#$ ") and "//" not in topic
        if not usable or len(topic.encode()) > MAX_TOPIC:
            raise SettingsError(
                f"--answers: topic {topic!r} can't be used; expected at most {MAX_TOPIC} bytes, no +, $ and spaces"
            )
        if f"{topic}/".startswith((f"{ROOT}/", f"{DISCOVERY}/")):
            raise SettingsError(f"--answers: topic {topic!r} belongs to others; expected one of your own")
        return cls(f"{parts.scheme}://{parts.netloc}", topic)

    def connector(self, ca: Path | None, password_file: Path | None, *, insecure: bool) -> Connector:
        """Return what makes sessions with that broker; neither the fleet's certificate nor its password goes there.

        Raises:
            SettingsError: The address or a file can't be used, or nothing says there who we are.
        """
        tls, user = TlsSettings(ca_file=ca), Credentials.load(password_file, {}) if password_file else None
        connector = Connector(tls, user, insecure=True, insist_on_tls=ca is not None)
        address = connector.check(self.broker)
        if not insecure and not address.on_this_machine and (user is None or not address.encrypted):
            raise SettingsError(
                f"--answers {self.broker}: another machine; expected mqtts:// and --answers-password-file, or "
                "--answers-insecure where everybody may read along"
            )
        tls.context()
        return connector


class AnswerTopic:
    """Publishes what cameras see, each at ``TOPIC/cameras/<camera>``, and at ``TOPIC/status`` whether we are there.

    Args:
        place: where.
        connect: makes the session.
        client: this client's id.
        class_names: of the fleet's task; asked for every message.
        home_assistant: announce every camera to Home Assistant.
        every_s: between two messages of a camera, at least.
        wall_clock: Unix time.
        clock: ``time.monotonic``, of ``Picture.captured_at``.
    """

    def __init__(  # noqa: PLR0913  # the last three have defaults
        self,
        place: Place,
        connect: Connect,
        client: str,
        class_names: Callable[[], Sequence[str]],
        *,
        home_assistant: bool = False,
        every_s: float = EVERY_S,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._topic = place.topic
        self._client = client
        self._class_names = class_names
        self._home_assistant = home_assistant
        self._every_s = every_s
        self._wall_clock = wall_clock
        self._clock = clock
        self._newest: dict[str, Shown] = {}
        self._told: set[str] = set()
        self._left_out: set[str] = set()
        self._greeted = 0
        self._problem = ""
        self._stopping = threading.Event()
        status = Will(f"{self._topic}/status", OFFLINE)
        self._session: Session = connect(f"{client}-answers", lambda topic, payload: None, status)
        self._session.start()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def watch(self, shown: Shown) -> None:
        """Keep a camera's newest answers; called on the serving thread."""
        if shown.prediction is not None:
            self._newest[shown.picture.camera] = shown

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(timeout=5)
        if self._session.connected:
            with contextlib.suppress(ValueError):
                self._session.publish(f"{self._topic}/status", OFFLINE, retain=True)
        self._session.stop()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._send()

    def _send(self) -> None:
        if self._session.problem != self._problem:
            self._problem = self._session.problem
            if self._problem:
                log.warning("answers not sent", reason=self._problem, next="trying again")
        if not self._session.connected:
            return
        if self._session.num_connections != self._greeted:
            self._greeted = self._session.num_connections
            self._told.clear()
            with contextlib.suppress(ValueError):  # a broker that takes next to nothing at once
                self._session.publish(f"{self._topic}/status", ONLINE, retain=True)
        for camera in sorted(self._newest.copy()):
            self._tell(camera, self._newest.pop(camera))

    def _tell(self, camera: str, shown: Shown) -> None:
        try:
            if self._home_assistant and camera not in self._told:
                self._told.add(camera)
                topic = f"{DISCOVERY}/sensor/{self._client}_{camera}/config"
                self._session.publish(topic, _packed(self._discovery(camera)), retain=True)
            self._session.publish(f"{self._topic}/cameras/{camera}", _packed(self._said(shown)))
        except ValueError as error:  # larger than that broker takes, or not finite; the next may be
            if camera not in self._left_out:
                self._left_out.add(camera)
                log.warning("answers left out", camera=camera, reason=error, next="trying the next picture's")

    def _said(self, shown: Shown) -> dict[str, Any]:
        """Return the message of a picture that was answered."""
        prediction = shown.prediction
        assert prediction is not None
        names, answers = self._class_names(), prediction.answers
        surest_first = np.argsort(-answers.confidences, kind="stable").tolist()
        found = []
        for index in surest_first:
            id_ = int(answers.class_ids[index])
            one: dict[str, Any] = {
                "class": names[id_] if 0 <= id_ < len(names) else str(id_),
                "confidence": round(float(answers.confidences[index]), 4),
            }
            if answers.corners is not None:
                one["box"] = [round(float(edge), 1) for edge in answers.corners[index]]
            found.append(one)
        age_s = self._clock() - prediction.captured_at
        return {
            "camera": prediction.camera,
            "frame": prediction.frame_id,
            "time": round(self._wall_clock() - age_s, 3),
            "version": prediction.model_version,
            "size": list(shown.picture.size),
            "class": found[0]["class"] if found else "nothing",
            "count": len(found),
            "answers": found,
        }

    def _discovery(self, camera: str) -> dict[str, Any]:
        """Return how Home Assistant shows a camera: the surest answer's class, and all of the message beside it."""
        topic = f"{self._topic}/cameras/{camera}"
        return {
            "name": camera,
            "unique_id": f"replayfleet_{self._client}_{camera}",
            "state_topic": topic,
            "value_template": "{{ value_json.class }}",
            "json_attributes_topic": topic,
            "availability_topic": f"{self._topic}/status",
            "icon": "mdi:cctv",
            "device": {
                "identifiers": [f"replayfleet_{self._client}"],
                "name": self._client,
                "manufacturer": "Replayfleet",
            },
        }


def _packed(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()

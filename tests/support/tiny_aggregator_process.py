"""An aggregator of the tiny method as a process of its own, which kills itself with SIGKILL at one step.

Arguments: data dir, broker URL, step ("" for none), how often the step is passed over first, rounds (3).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from support.tiny_fleet import TinyExporter, tiny_spec
from support.tiny_method import TinyMethod

from replayfleet.aggregator.founding import Fleet
from replayfleet.aggregator.rounds.machine import RoundRules
from replayfleet.aggregator.service import AggregatorService
from replayfleet.aggregator.steps import Step
from replayfleet.federation.service.logs import configure_logging
from replayfleet.federation.service.torch_setup import prepare_torch
from replayfleet.federation.wire.transport.interfaces import OnMessage, Session, Will
from replayfleet.federation.wire.transport.mqtt import MqttSession


def main(folder: str, url: str, step: str, passes: int, num_rounds: int = 3) -> None:
    remaining = passes

    def checkpoint(passed: Step) -> None:
        nonlocal remaining
        if passed.value == step:
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining -= 1

    def connect(client_id: str, on_message: OnMessage, will: Will | None) -> Session:
        return MqttSession(url, client_id, on_message=on_message, will=will)

    configure_logging()
    prepare_torch(1)
    fleet = Fleet(
        tiny_spec(),
        TinyMethod(),
        lambda _: None,
        TinyExporter(),
        RoundRules(num_clients=3, num_rounds=num_rounds, deadline_s=60),
    )
    service = AggregatorService(fleet, Path(folder), connect, checkpoint=checkpoint)
    service.coordinator.finish.grace_s = 10
    sys.exit(0 if service.run(threading.Event()) else 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))

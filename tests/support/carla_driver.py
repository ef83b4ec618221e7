"""A process with a CARLA camera: ``python -m support.carla_driver HOW``. It stands for ``edge-client``.

A module ``carla`` on ``$PYTHONPATH`` is the stand-in, and ``$CARLA_DOUBLE_STATE`` names the file in which its simulator
outlives every process. It writes ``driving`` once pictures come, and ``ended stopped`` if it ends by itself.
"""

from __future__ import annotations

import contextlib
import sys
import threading

from replayfleet.edge_client.cameras.carla.settings import CarlaSettings
from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera
from replayfleet.federation.service.signals import stopped_by_signals


def main(how: str) -> None:
    settings = CarlaSettings(width=32, height=20, fixed_step=0.05, rate=20.0, timeout_s=0.3, num_vehicles=2)
    camera, stop = SupervisedCamera(settings, "front"), threading.Event()
    with stopped_by_signals(stop) if how == "stopped-by-signals" else contextlib.nullcontext():
        for number, _ in enumerate(camera.pictures(stop)):
            if number == 2:
                say("driving")
    say("ended stopped")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

"""What an idle client takes: ``edge-client start`` on all of Fashion-MNIST, serving its model between two rounds.

A broker, an aggregator and one client, all through their command lines. The fleet's second client never comes, so after
its short round the client serves and waits, and its training process has ended. Memory is the sum over the client's
processes, what they share counted once (PSS); CPU is what they used meanwhile.

    python -m benchmarks.camera.idle_client [--rates 1 30] [--seconds 60] [--out benchmarks/results/idle_client.json]
"""

from __future__ import annotations

import argparse
import logging
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.camera.serving_while_training import Observed
from benchmarks.harness import run
from replayfleet.federation.wire.transport.broker import open_broker
from replayfleet.scripts.launch.plan import aggregator_command, client_command, stream_source
from replayfleet.scripts.launch.processes import Children

MOST = {"cores": 0.05, "memory_mb": 130.0}
"""Of all processes of a client that is shown one picture a second."""

SETTLED_S = 5.0
"""From the end of the training process until nothing of it is left."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {f"{rate:g}": idle(rate, options.seconds) for rate in options.rates}


def idle(rate_hz: float, seconds: float) -> dict[str, Any]:
    """Return cores and memory of each process of a client between rounds, and of all."""
    with tempfile.TemporaryDirectory() as name, open_broker(log=logging.getLogger(__name__)) as broker:
        folder = Path(name)
        server = aggregator_command(
            folder / "aggregator", "bench", clients=2, rounds=2, method="fedavg", task=(), preset="tiny", seed=0
        )
        source = stream_source("tiny", 0, clients=2, rounds=2, seed=0, rate=rate_hz)
        with socket.create_server(("127.0.0.1", 0)) as listener:  # free again at the end of the block
            port = int(listener.getsockname()[1])
        command = [*client_command(folder / "cam-0", "bench", source), "--health-port", str(port)]
        with Children(folder) as children:
            children.start("aggregator", [*server, "--min-clients", "2", "--broker", broker.url])
            client = Observed(children.start("client", [*command, "--broker", broker.url]), port)
            client.until(lambda status: status["training"] != "")
            client.until(lambda status: status["frames"] > 0 and status["trainer_pid"] is None)
            time.sleep(SETTLED_S)
            found = client.observed_for(seconds)
    cores, memory_mb = sum(found["cores"].values()), sum(found["memory_mb"].values())
    print(f"{rate_hz:g} pictures/s: {cores:.3f} cores, {memory_mb:.1f} MB {found}", flush=True)
    return {"cores": cores, "memory_mb": memory_mb, "observed": found}


def missed(result: dict[str, Any]) -> list[str]:
    """Return which bounds are missed at one picture a second."""
    return [f"{name} {result['1'][name]:.3g} > {most}" for name, most in MOST.items() if not result["1"][name] <= most]


if __name__ == "__main__":
    run(measure, __doc__, failed=missed, rates=([1.0, 30.0], "of pictures, in Hz"), seconds=60.0)

"""Flower's simulation with FedAvg, whose clients return what they got; run it with a Python that has Flower.

    pip install torch==2.13.0 "flwr[simulation]==1.41.0"
    python benchmarks/rivals/flower_simulation.py --model model.npz --clients 100 --rounds 12 --out result.json

A round begins when the strategy is asked to configure it and ends when it has aggregated all replies. Evaluation is
off. Each client may have one core, so that as many run side by side as there are cores. With ``--shift`` client p adds
(p + 1) / 100 to every number and says that it has 10 (p + 1) samples, so that the average tells whether it is the
same. ``benchmarks.simulation.simulated_round`` calls this with telemetry and update checks switched off and one thread
a process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()


@client_app.train()
def answer(message: Message, context: Context) -> Message:
    """A client's round."""
    began = time.perf_counter()
    arrays, num_samples = message.content["arrays"], 10
    if message.content["config"]["shift"]:
        place = int(context.node_config["partition-id"]) + 1
        arrays = ArrayRecord({name: Array(shifted(array.numpy(), place)) for name, array in arrays.items()})
        num_samples *= place
    metrics = MetricRecord({"num-examples": num_samples, "compute-s": time.perf_counter() - began})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def shifted(array: np.ndarray[Any, Any], place: int) -> np.ndarray[Any, Any]:
    """Add ``place`` hundredths to floats and nothing to whole numbers."""
    return array + np.asarray(place / 100, array.dtype) if array.dtype.kind == "f" else array


class TimedFedAvg(FedAvg):
    """FedAvg with a stopwatch."""

    def __init__(self, num_clients: int) -> None:
        super().__init__(
            fraction_evaluate=0.0,
            min_train_nodes=num_clients,
            min_available_nodes=num_clients,
        )
        self.rounds: list[dict[str, float]] = []
        self._began = 0.0

    def configure_train(self, *arguments: Any, **keywords: Any) -> Iterable[Message]:
        """Start the stopwatch."""
        self._began = time.perf_counter()
        return super().configure_train(*arguments, **keywords)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[Any, Any]:
        """Wait for all replies, aggregate, stop it."""
        arrived = list(replies)
        received = time.perf_counter()
        result = super().aggregate_train(server_round, arrived)
        ended = time.perf_counter()
        compute_s = max(float(reply.content["metrics"]["compute-s"]) for reply in arrived)
        self.rounds.append(
            {
                "num_replies": len(arrived),
                "round_s": ended - self._began,
                "aggregate_s": ended - received,
                "compute_s": compute_s,
            }
        )
        return result


def main() -> None:
    """Run, and write the rounds' times as JSON and the last average beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="named arrays to start from, as .npz")
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--shift", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with np.load(options.model) as stored:
        initial = ArrayRecord({name: Array(stored[name]) for name in stored.files})
    config = ConfigRecord({"shift": options.shift})
    strategy = TimedFedAvg(options.clients)
    server_app = ServerApp()
    results: list[Any] = []

    @server_app.main()
    def serve(grid: Grid, _context: Context) -> None:
        results.append(strategy.start(grid, initial, num_rounds=options.rounds, train_config=config))

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=options.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": os.cpu_count() or 1},
        },
    )
    average = {name: array.numpy() for name, array in results[0].arrays.items()}
    np.savez(options.out.with_suffix(".npz"), **average)
    found = {
        "rounds": strategy.rounds,
        "peak_rss_bytes": 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:", 1)[1].split()[0]),
        "versions": {name: importlib.metadata.version(name) for name in ("flwr", "ray", "torch", "numpy")},
    }
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

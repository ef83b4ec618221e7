"""Flower's deployed rounds without training, over its bidirectional gRPC stream: the rival of ``deployed_round``.

    python flower_deployed.py server ADDRESS CLIENTS ROUNDS | client ADDRESS

The stream that the server pushes over is deprecated, and the fastest that Flower has. The model is ours in size: as
many arrays and numbers. The server prints a line of JSON: when each aggregation ended.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import numpy as np
from flwr.client import NumPyClient, start_client
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

NUM_ARRAYS, NUM_VALUES = 122, 703_598


class Idle(NumPyClient):
    """Sends back what it got, moved a little."""

    def fit(self, parameters: list[np.ndarray], config: Any) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        return [array * np.float32(1 + 1e-6) for array in parameters], 100, {}


class Timed(FedAvg):
    """FedAvg that notes when it is done."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ends: list[float] = []

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        made = super().aggregate_fit(server_round, results, failures)
        assert not failures
        self.ends.append(time.time())
        return made


def serve(address: str, clients: int, rounds: int) -> None:
    sizes = np.diff(np.linspace(0, NUM_VALUES, NUM_ARRAYS + 1).astype(int))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size, dtype=np.float32) for size in sizes]
    strategy = Timed(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=ndarrays_to_parameters(arrays),
    )
    start_server(server_address=address, config=ServerConfig(num_rounds=rounds), strategy=strategy)
    print(json.dumps(strategy.ends), flush=True)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    role, address, *numbers = sys.argv[1:]
    if role == "server":
        serve(address, *map(int, numbers))
    else:
        start_client(server_address=address, client=Idle().to_client(), insecure=True)

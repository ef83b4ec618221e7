"""The process that drives a Ray cluster for ours: Ray ends whoever drives a cluster that is gone.

It reaches or starts the cluster, says how many tasks that does at a time, and passes on what it is sent: functions,
items and results are bytes here. It ends with its parent, and when the cluster is gone.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

TRIES = 5
"""How often the cluster does a task again whose worker died."""

_REACH_S = 5.0
_GOODBYE_S = 5


def main() -> None:
    """Serve whoever has the other end of a socket, ``sys.argv[1]``, until it says goodbye or is gone."""
    fd, address, num_workers, again_s = sys.argv[1:]
    os.set_inheritable(int(fd), False)  # our end is the sign that we live, and no process of the cluster may hold it
    parent: Connection[Any, Any] = Connection(int(fd))
    try:
        ray, size = _cluster(address, int(num_workers) or None)
    except Exception as error:  # Ray's own kinds, grpc's, and those of the system
        parent.send(" ".join(str(error).split())[:300])
        parent.poll(float(again_s))  # and only then is there another one of us, which tries again
        return
    parent.send(size)
    try:
        _pass_on(ray, size, parent)
    finally:
        signal.alarm(_GOODBYE_S)  # ends us where Ray's goodbye hangs
        ray.shutdown()
        os._exit(0)  # tasks that nobody waits for any more


def _cluster(address: str, num_workers: int | None) -> tuple[Any, int]:
    """Return Ray, connected to a cluster, and how many tasks that does at a time."""
    # Ray listens wherever the machine has an address; from version 2.60 on it asks for a token
    where: dict[str, Any] = {"address": "local", "_node_ip_address": "127.0.0.2", "include_dashboard": False}
    where["num_cpus"] = num_workers
    if address != "ray":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()  # Ray would try for a minute
        where = {"address": address}
    ray = importlib.import_module("ray")
    try:
        ray.init(log_to_driver=False, configure_logging=False, **where)
    except ConnectionError as error:  # Ray's client says no more of a token that is missing or wrong
        token = "" if address == "ray" else "; if it asks for a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN give it"
        raise ConnectionError(f"{error}{token}") from error
    return ray, max(1, int(ray.cluster_resources().get("CPU", 1)))


def _pass_on(ray: Any, size: int, parent: Connection[Any, Any]) -> None:
    """Do what arrives: a function's bytes, or (number, item) for the newest one; until goodbye, None, or its end."""
    task, saying, function = ray.remote(max_retries=TRIES, num_cpus=1)(_call), threading.Lock(), None

    def do(function: Any, number: int, item: bytes) -> None:
        try:
            done = ray.get(task.remote(function, item))
        except ray.exceptions.RayError as error:  # of the work itself too: whoever does it again gets it first hand
            done = " ".join(str(error).split())[-200:]
        except BaseException:  # without a cluster, what Ray's client raises is ConnectionError, or anything
            os._exit(1)
        with saying:
            parent.send((number, done))

    pool = ThreadPoolExecutor(2 * size + 1)  # as many as are begun at a time
    while True:
        try:
            said = parent.recv()
        except (EOFError, OSError):
            return
        if said is None:
            return
        if isinstance(said, bytes):
            function = ray.put(said)
        else:
            pool.submit(do, function, *said)


def _call(function: bytes, item: bytes) -> bytes:
    """On a machine of the cluster."""
    pickled = importlib.import_module("ray.cloudpickle")
    done: bytes = pickled.dumps(pickled.loads(function)(pickled.loads(item)))
    return done

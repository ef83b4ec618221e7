"""Where the same work for many clients is done: in this process, or on a Ray cluster.

A task does one client's work and is a function of its arguments alone, so it can be done again anywhere: who loses a
worker, or the whole cluster, loses time. Equal PyTorch, processors and threads give equal bits.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.torch_setup import prepare_torch

HERE = "here"
TRIES = 5
"""How often a task is done again whose worker died; after that it is done in this process."""

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)


def check_engine(text: str) -> str:
    """Return where work is to be done if it can be.

    Raises:
        SettingsError: Neither ``here`` nor a Ray cluster, or Ray isn't installed.
    """
    if text == HERE:
        return text
    if text != "ray" and not re.fullmatch(r"ray://[^/\s]+:[0-9]{1,5}", text):  # without a port Ray tries for minutes
        raise SettingsError(f"engine {text!r}: expected here, ray, or ray://HOST:PORT, a cluster that runs")
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(f"engine {text}: needs Ray: pip install 'replayfleet[ray]'")
    return text


class RayEngine:
    """Does work as tasks of a Ray cluster.

    Args:
        address: ``ray``: a cluster that is started on this machine, and ends with this process; ``ray://HOST:PORT``.
        num_threads: of one operation; results depend on their number.
        num_workers: of a cluster that is started; None: one for each core.

    Raises:
        SettingsError: Ray isn't installed, or the cluster can't be reached or started.
    """

    def __init__(self, address: str, num_threads: int, num_workers: int | None = None) -> None:
        check_engine(address)
        self._ray: Any = importlib.import_module("ray")
        self._num_threads = num_threads
        where: dict[str, Any] = {"address": address}
        if (
            address == "ray"
        ):  # Ray listens wherever the machine has an address; from version 2.60 on it asks for a token
            where = {"num_cpus": num_workers, "include_dashboard": False, "_node_ip_address": "127.0.0.2"}
        try:
            self._ray.init(log_to_driver=False, configure_logging=False, **where)
            self._size = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        except Exception as error:  # Ray's own kinds, grpc's, and those of the system
            raise SettingsError(f"engine {address}: no Ray cluster ({' '.join(str(error).split())[:300]})") from error
        self._task: Any = self._ray.remote(max_retries=TRIES, num_cpus=1)(_work)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return ``function`` of every item, in order; both are pickled, so they are values and open nothing.

        Raises:
            Exception: The first error of ``function`` itself. That a worker or the cluster is lost is none.
        """
        results: dict[int, R] = {}
        begun: dict[Any, tuple[int, T]] = {}
        shared: Any = None
        for place, item in enumerate(items):
            try:
                shared = self._ray.put(function) if shared is None else shared
                begun[self._task.remote(shared, item, self._num_threads)] = (place, item)
            except self._ray.exceptions.RayError as error:
                results[place] = self._here(function, item, error)
            while len(begun) > 2 * self._size:
                self._collect(function, begun, results)
        while begun:
            self._collect(function, begun, results)
        return [results[place] for place in sorted(results)]

    def close(self) -> None:
        """Leave the cluster; end one that was started."""
        self._ray.shutdown()

    def _collect(self, function: Callable[[T], R], begun: dict[Any, tuple[int, T]], results: dict[int, R]) -> None:
        errors = self._ray.exceptions
        try:
            (ready, *_), _ = self._ray.wait(list(begun), num_returns=1)
        except errors.RayError:
            ready = next(iter(begun))  # the cluster is gone: each is done here
        place, item = begun.pop(ready)
        try:
            results[place] = self._ray.get(ready)
        except errors.RayTaskError as error:
            raise error.cause from error
        except errors.RayError as error:
            results[place] = self._here(function, item, error)

    def _here(self, function: Callable[[T], R], item: T, error: Exception) -> R:
        log.warning("work lost error=%s next=done in this process", " ".join(str(error).split())[:200])
        return function(item)


def _work(function: Callable[[T], R], item: T, num_threads: int) -> R:
    prepare_torch(num_threads)
    return function(item)


@contextlib.contextmanager
def engine(text: str, num_threads: int, num_workers: int | None = None) -> Iterator[RayEngine | None]:
    """Provide what does the work; None: this process does.

    Raises:
        SettingsError: As ``RayEngine``.
    """
    if text == HERE:
        yield None
        return
    made = RayEngine(text, num_threads, num_workers)
    try:
        yield made
    finally:
        made.close()

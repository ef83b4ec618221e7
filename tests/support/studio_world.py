"""A client that watches a film with its label studio open, in a fleet of one round that waits for labels."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replayfleet.edge_client.flow import Shown
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.edge_client.operator.studio.app import StudioServer
from replayfleet.edge_client.operator.studio.studio import Studio
from replayfleet.edge_client.service import ClientService
from replayfleet.edge_client.sources import source_opener
from replayfleet.models.specs import AnyTaskSpec
from tests.support.client_world import World


@contextlib.contextmanager
def taught(
    folder: Path, task: AnyTaskSpec, film: str, num_labels: int, **settings: str
) -> Iterator[tuple[World, ClientService, StudioServer, list[Shown]]]:
    """Yield the world, the client, its studio and what the client has shown so far."""
    world = World(folder, num_clients=1, num_rounds=1, task=task, deadline_s=3600.0, **settings)  # none is cut short
    seen: list[Shown] = []
    learning = LearningSettings(min_samples=num_labels, max_samples=100, hold_out=0)
    opener: Any = source_opener([film], folder, learning=learning)
    client = world.start_client("car-0", open_source=opener, watchers=[seen.append])
    studio = Studio(client.known, client.learn, 60.0, time.monotonic)
    client.watchers.append(studio.watch)
    server = StudioServer(studio, "127.0.0.1", 0)
    try:
        yield world, client, server, seen
    finally:
        server.close()
        world.close()

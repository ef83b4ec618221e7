"""A browser, and fleets in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import CHROMIUM, Browser, chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("Chromium is not installed")
    with chromium(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return what makes a ``tests.support.client_world.World``, and end each that it made."""
    from tests.support.client_world import World

    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(World(tmp_path, *args, **options)))

"""Which sub-generators the aggregator holds of whom, and pictures of what they draw; one process at a time draws."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.children import child_command, child_environment
from replayfleet.federation.service.logs import EventLogger

PATIENCE_S = 600.0
"""Drawing takes seconds of the processor, and gives way to whatever else this machine does."""
MAX_KEPT, MAX_WAITING = 64, 4
_SLOW_KINDS = ("ddpm",)
"""A diffusion model takes minutes for what others draw in a moment."""

_log = EventLogger("console")
_Key: TypeAlias = "tuple[str, tuple[str, ...]]"


@dataclass(frozen=True, slots=True)
class Held:
    """Sub-generators that the aggregator holds since its last round.

    Attributes:
        class_names: of the fleet's task, by class id.
        digests: client -> class id -> digest of its parameters.
    """

    class_names: tuple[str, ...] = ()
    digests: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    def name(self, class_id: int) -> str:
        """What a sub-generator draws."""
        return self.class_names[class_id] if 0 <= class_id < len(self.class_names) else "all classes"


@dataclass(frozen=True, slots=True)
class Picture:
    """Samples of one sub-generator.

    Attributes:
        png: a sheet of them.
        recognised: share that the client's own task model takes for the class; None for a generator of all classes.
    """

    png: bytes
    recognised: float | None


def held(folder: Path) -> Held:
    """Return what can be drawn; nothing where the method has no sub-generators, or slow ones."""
    with contextlib.closing(AggregatorStore(folder, read_only=True)) as store:
        state, spec = store.state(), store.spec()
    if state is None or spec is None or spec.settings.get("sub_generator") in _SLOW_KINDS:
        return Held()
    digests: dict[str, dict[int, str]] = {}
    for entry in state.blobs:
        match entry.name.split("/"):
            case ["clients", client, "sub-generator", kind]:
                class_id = int(kind) if kind.lstrip("-").isdecimal() else -1
                digests.setdefault(client, {})[class_id] = entry.digest
    return Held(tuple(spec.task.get("class_names", ())), digests)


class Samples:
    """Draws what browsers ask for, all of a client at once, and keeps the newest.

    Args:
        folder: the aggregator's data dir.
        drawn: is called when some were drawn, so that pages can be made anew.
    """

    def __init__(self, folder: Path, drawn: Callable[[], None]) -> None:
        self._folder = folder
        self._told = drawn
        self._kept: OrderedDict[_Key, Mapping[int, Picture]] = OrderedDict()
        self._tasks: dict[_Key, asyncio.Task[Mapping[int, Picture]]] = {}
        self._turn = asyncio.Lock()

    def kept(self, client: str, known: Held) -> Mapping[int, Picture]:
        """Return class id -> picture, of those that were drawn already; safe across threads."""
        return self._kept.get(_key(client, known), {})

    async def of(self, client: str, known: Held) -> Mapping[int, Picture]:
        """Return class id -> picture; nothing where none can be drawn for now, or too many are to be."""
        key = _key(client, known)
        if not key[1] or key in self._kept:
            return self._kept.get(key, {})
        if key not in self._tasks:
            if len(self._tasks) >= MAX_WAITING:
                return {}
            self._tasks[key] = asyncio.create_task(self._draw(key))
        return await asyncio.shield(self._tasks[key])

    async def _draw(self, key: _Key) -> Mapping[int, Picture]:
        try:
            async with self._turn:
                found = await self._drawn(key[0])
        finally:
            del self._tasks[key]
        if not found:
            return found  # whoever asks again may have more luck
        self._kept[key] = found
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self._told()
        return found

    async def _drawn(self, client: str) -> Mapping[int, Picture]:
        command = child_command("replayfleet.aggregator.console.drawing", str(self._folder), client)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(),
        )
        try:
            said, wrong = await asyncio.wait_for(process.communicate(), PATIENCE_S)
            if process.returncode != 0:
                _log.warning("samples not drawn", client=client, reason=wrong.decode(errors="replace")[-300:])
                return {}
        except asyncio.TimeoutError:
            _log.warning("samples not drawn", client=client, reason=f"it took longer than {PATIENCE_S:.0f} s")
            return {}
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        found = json.loads(said)
        return {int(name): Picture(base64.b64decode(one["png"]), one["recognised"]) for name, one in found.items()}


def _key(client: str, known: Held) -> _Key:
    return client, tuple(known.digests.get(client, {}).values())

"""What is particular to one kind of engine, behind one seam: everything else about engines knows no more than this.

An engine is a network compiled for one GPU. Building one takes seconds to minutes, so it happens beside serving (see
``build``), and its files are kept (see ``cache``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

from replayfleet.export.engines.cache import Workplace
from replayfleet.export.running.provider_options import BatchProfile, Provider
from replayfleet.federation.errors import ReplayfleetError

Progress: TypeAlias = Callable[[int, int], None]
"""(which part is being built, counted from 1; how many there are)."""


class EngineFailed(ReplayfleetError):
    """An engine can't be built or used; whoever serves goes on without it."""


class EngineMaker(Protocol):
    """Knows one kind of engine."""

    def platform(self) -> Mapping[str, str]:
        """Return the device's name and the versions of the libraries that an engine depends on.

        Raises:
            EngineFailed: There is no such device, or a library is missing; names it.
        """

    def build(self, model: bytes, place: Workplace, profile: BatchProfile, progress: Progress) -> None:
        """Build an engine; called in a process of its own, and may raise anything.

        Args:
            model: a self-contained ONNX file.
            place: where its files and the timing cache go.
            profile: batch sizes to build for.
            progress: to be told when a part begins.
        """

    def providers(
        self, graph: bytes, input_shape: tuple[int, ...], engine: Path, profile: BatchProfile
    ) -> tuple[Provider, ...]:
        """Return the execution providers with which ``OnnxModel`` answers by a built engine.

        Args:
            graph: with or without its parameters.
            input_shape: of one sample.
            engine: the folder that the engine is in.
            profile: what it was built for.
        """


def artefact_digest(graph: str, parameters: str) -> str:
    """Return what tells artefacts apart: one digest of the graph's and of the parameters', which engines hold too."""
    return hashlib.sha256(f"{graph} {parameters}".encode()).hexdigest()

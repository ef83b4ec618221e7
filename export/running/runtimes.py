"""What every way to run a model has in common: ONNX Runtime, TorchScript, eager PyTorch.

Who serves, probes or measures a model knows no more of it than this.
"""

from __future__ import annotations

from typing import Protocol

from replayfleet.export.running.artefact import Array


class Runtime(Protocol):
    """A model that is ready to run; safe to call from several threads."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""

    @property
    def runs_on(self) -> str:
        """What computes: an execution provider's name, ``TorchScript`` or ``eager``."""

    def run(self, x: Array) -> Array:
        """Run one batch: (B, *input_shape) float32 -> (B, ...), B at least 1.

        Raises:
            ValueError: ``x`` has another shape or dtype.
            ArtefactRejected: (load-failed) The runtime failed on it.
        """

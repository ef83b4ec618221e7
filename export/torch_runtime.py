"""Models that PyTorch runs, eagerly or as TorchScript. Serving uses neither unless told so; needs torch."""

from __future__ import annotations

import io
import json
import zipfile

from torch import nn

from replayfleet.export.parity import eager_run
from replayfleet.export.running.artefact import Array
from replayfleet.export.running.facts import PREFIX
from replayfleet.export.torchscript import load_torchscript
from replayfleet.federation.errors import ArtefactRejected, Reason


class TorchModel:
    """Implements ``runtimes.Runtime`` with a module.

    Args:
        module: set to eval mode.
        input_shape: of one sample.
        runs_on: what to call it.
    """

    def __init__(self, module: nn.Module, input_shape: tuple[int, ...], runs_on: str = "eager") -> None:
        self.input_shape = input_shape
        self.runs_on = runs_on
        self._run = eager_run(module)

    def run(self, x: Array) -> Array:
        """Run one batch: (B, *input_shape) float32 -> (B, ...).

        Raises:
            ValueError: ``x`` has another shape or dtype.
            ArtefactRejected: (load-failed) PyTorch failed on it.
        """
        if x.dtype.name != "float32" or x.shape[1:] != self.input_shape or x.ndim < 1 or len(x) < 1:
            expected = ", ".join(str(side) for side in self.input_shape)
            raise ValueError(f"input is {x.shape} {x.dtype}, expected (B, {expected}) float32 with B >= 1")
        try:
            return self._run(x)
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            detail = f"PyTorch failed on a batch of {len(x)}: {lines[-1] if lines else ''}"
            raise ArtefactRejected(Reason.LOAD_FAILED, detail) from error


def torchscript_model(data: bytes, digest: str) -> TorchModel:
    """Return the model in a TorchScript file of ``model-export``.

    Args:
        data: the file.
        digest: its sha256, from somebody who is trusted: a TorchScript file is code.

    Raises:
        ArtefactRejected: (wrong-digest, load-failed) The bytes are others, don't load, or don't say their input.
    """
    return TorchModel(load_torchscript(data, digest), _input_shape(data), "TorchScript")


def _input_shape(data: bytes) -> tuple[int, ...]:
    """Read the fact ``input`` from the archive, which holds it as a file of its own."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next((name for name in archive.namelist() if name.endswith(f"/extra/{PREFIX}input")), None)
        text = b"" if name is None else archive.read(name)
    try:
        return tuple(int(side) for side in json.loads(text))
    except (ValueError, TypeError):
        detail = f"a TorchScript file without the fact {PREFIX}input; export it with model-export"
        raise ArtefactRejected(Reason.LOAD_FAILED, detail) from None

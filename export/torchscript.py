"""TorchScript, for runtimes that take nothing else. The one place where ``torch.jit`` is used.

``torch.jit`` is deprecated since torch 2.15 without a date of removal. A TorchScript file is code: it is never sent to
a device, and loaded only if its digest is one that the caller already trusts.
"""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from replayfleet.export.running.facts import PREFIX
from replayfleet.federation.errors import ArtefactRejected, Reason


def torchscript_bytes(module: nn.Module, input_shape: tuple[int, ...], facts: Mapping[str, str]) -> bytes:
    """Return ``module``, traced in eval mode, as the bytes of a TorchScript file.

    Args:
        module: holds its parameters; set to eval mode.
        input_shape: of one sample; any batch size can be run.
        facts: stored as extra files ``replayfleet.<key>``.
    """
    buffer = io.BytesIO()
    with _deprecation_expected(), torch.no_grad():
        traced = torch.jit.trace(module.eval(), torch.zeros(2, *input_shape), check_trace=False)
        extra = {PREFIX + key: value for key, value in sorted(facts.items())}
        torch.jit.save(traced, buffer, _extra_files=extra)
    return _without_source_paths(buffer.getvalue())


def load_torchscript(data: bytes, digest: str) -> torch.jit.ScriptModule:
    """Return the model in ``data`` if its sha256 is ``digest``.

    Raises:
        ArtefactRejected: (wrong-digest, load-failed) The bytes are others, or don't load.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ArtefactRejected(Reason.WRONG_DIGEST, f"TorchScript file has sha256 {found}, expected {digest}")
    with _deprecation_expected():
        try:
            loaded: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(data), map_location="cpu")  # noqa: TID251
        except RuntimeError as error:
            raise ArtefactRejected(
                Reason.LOAD_FAILED, f"not a TorchScript file: {str(error).splitlines()[0]}"
            ) from error
    return loaded


def torchscript_facts(data: bytes) -> dict[str, str]:
    """Return the facts that ``torchscript_bytes`` stored, without the prefix; runs nothing.

    Raises:
        ArtefactRejected: (load-failed) It is no such file.
    """
    facts = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            for entry in file.namelist():
                folder, _, name = entry.rpartition("/")
                if folder.endswith("/extra") and name.startswith(PREFIX):
                    facts[name.removeprefix(PREFIX)] = file.read(entry).decode()
    except (zipfile.BadZipFile, ValueError, EOFError, RuntimeError, zlib.error) as error:  # also of a password
        raise ArtefactRejected(Reason.LOAD_FAILED, f"not a TorchScript file: {error}") from error
    return facts


def _without_source_paths(data: bytes) -> bytes:
    """Drop the debug records, which hold absolute paths and source lines of the exporting machine, and their digest."""
    stripped = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(stripped, "w", zipfile.ZIP_STORED) as target:
        for entry in source.infolist():
            if not entry.filename.endswith((".debug_pkl", "/.data/serialization_id")):
                target.writestr(zipfile.ZipInfo(entry.filename), source.read(entry))
    return stripped.getvalue()


@contextmanager
def _deprecation_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", message=r".*torch\.jit.*", category=category)
        yield

"""Parameter files: one model's tensors as safetensors, with what they belong to in the header.

Blobs that a fleet exchanges have no such header: their digest names the tensors alone, so that equal parameters are
stored and sent once, whoever made them with whichever version. There the graph that a manifest lists beside them says
it, and a client holds that against what its fleet agreed on. A file that a person moves about has to say it itself.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as format_safetensors

from replayfleet.export.files import read_file
from replayfleet.export.running.artefact import Array
from replayfleet.export.running.facts import PREFIX, own_facts, sub_generator_facts, task_facts
from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import UNREADABLE, SettingsError
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec, TaskSpec

_MAX_HEADER_BYTES = 1 << 20
_MAX_SPEC_CHARS = 1 << 19
"""4,096 names of 100 characters; longer ones are no fleet's."""


@dataclass(frozen=True, slots=True)
class Model:
    """A trained model: parameters, and what they are parameters of.

    Attributes:
        kind: ``task``, ``sub-generator`` or ``detector``.
        spec: the task; a sub-generator's gives shape and width.
        parameters: name -> tensor, as in the network's state dict.
    """

    kind: str
    spec: AnyTaskSpec
    parameters: Mapping[str, Array]

    def __post_init__(self) -> None:
        # Files are written from memory as it lies, which of a view (and of a number, which has none) isn't the tensor.
        plain = {name: np.asarray(array, order="C") for name, array in self.parameters.items()}
        object.__setattr__(self, "parameters", plain)

    def __eq__(self, other: object) -> bool:
        """Whether they are equal files; NumPy would ask which number of an array is meant."""
        return isinstance(other, Model) and self.encode() == other.encode()

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Write a ``.safetensors`` file that says what it holds.

        Args:
            path: of the file; a model that was saved there is replaced.
            overwrite: replace anything else too.

        Raises:
            SettingsError: It can't be written there, or something else is there.
        """
        target = Path(path)
        if target.exists() and not (overwrite or target.is_dir() or is_saved_model(target)):
            raise SettingsError(f"{target} is there, and is no saved model; choose another path, or overwrite=True")
        try:
            write_atomic(target, self.encode())
        except OSError as error:
            raise SettingsError(f"{target} can't be written ({error.strerror})") from error
        return target

    def encode(self) -> bytes:
        """Return that file's bytes."""
        spec = json.dumps(msgspec.to_builtins(self.spec), ensure_ascii=False, sort_keys=True)
        about = {
            **_facts(self.kind, self.spec),
            "spec": spec,
            "spec_sha256": hashlib.sha256(spec.encode()).hexdigest(),
            "version": importlib.metadata.version("replayfleet"),
        }
        # The library would write these texts in another order each time, and equal models are equal files.
        plain = format_safetensors(dict(self.parameters))
        end = 8 + int.from_bytes(plain[:8], "little")
        told = {PREFIX + key: about[key] for key in sorted(about)}
        header = json.dumps({"__metadata__": told, **json.loads(plain[8:end])}, ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)  # tensors begin where a machine likes to read
        return len(header).to_bytes(8, "little") + header + plain[end:]


@dataclass(frozen=True, slots=True)
class ParameterFile:
    """What a safetensors file holds.

    Attributes:
        parameters: its tensors.
        model: the same with what the file says of them; None where it says nothing.
    """

    parameters: Mapping[str, Array]
    model: Model | None

    @property
    def facts(self) -> Mapping[str, str]:
        """What a graph for these parameters says too; empty where the file says nothing."""
        return {} if self.model is None else _facts(self.model.kind, self.model.spec)


def read_parameter_file(path: Path) -> ParameterFile:
    """Read a file from anywhere.

    Raises:
        SettingsError: It can't be read, isn't safetensors of plain dtypes, or its header isn't what was once written.
    """
    data = read_file(path)
    try:
        parameters: dict[str, Array] = parse_safetensors(data)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"{path}: not a safetensors file of plain dtypes ({error})") from error
    try:
        about = own_facts(_metadata(data))
        return ParameterFile(parameters, _described(about, parameters) if about else None)
    except (*UNREADABLE, KeyError) as error:
        raise SettingsError(f"{path}: its header is damaged ({error}); export it again from where it came") from error


def is_saved_model(path: Path) -> bool:
    """Return whether this is a file that ``Model.save`` or ``model-export`` wrote."""
    try:
        return read_parameter_file(path).model is not None
    except SettingsError:
        return False


def read_parameters(path: Path) -> dict[str, Array]:
    """Return a file's tensors, whatever it says of them; errors are ``read_parameter_file``'s."""
    return dict(read_parameter_file(path).parameters)


def _metadata(data: bytes) -> dict[str, str]:
    """Return a header's texts; the library that has read it checked that they are texts, but not how many."""
    size = int.from_bytes(data[:8], "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"it has {size} bytes, at most {_MAX_HEADER_BYTES} are read")
    found = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    return {str(key): str(value) for key, value in found.items()}


def _described(about: Mapping[str, str], parameters: Mapping[str, Array]) -> Model:
    text, kind = about["spec"], about["kind"]
    if len(text) > _MAX_SPEC_CHARS:
        raise ValueError(f"its spec has {len(text)} characters, at most {_MAX_SPEC_CHARS} are read")
    if hashlib.sha256(text.encode()).hexdigest() != about["spec_sha256"]:
        raise ValueError("the digest of its spec is another")
    kinds: Mapping[str, type[AnyTaskSpec]] = {"task": TaskSpec, "sub-generator": TaskSpec, "detector": DetectionSpec}
    if kind not in kinds:
        raise ValueError(f"kind is {kind[:40]!r}")
    spec = msgspec.json.decode(text, type=kinds[kind])
    for key, value in _facts(kind, spec).items():
        if about.get(key) != value:
            raise ValueError(f"{key} is {about.get(key, 'absent')[:80]!r}, its spec says {value[:80]!r}")
    return Model(kind, spec, parameters)


def _facts(kind: str, spec: AnyTaskSpec) -> dict[str, str]:
    """Return architecture, classes and preprocessing, as exported files say them."""
    is_generator = kind == "sub-generator" and isinstance(spec, TaskSpec)
    return sub_generator_facts(spec) if is_generator else task_facts(spec)  # type: ignore[arg-type]

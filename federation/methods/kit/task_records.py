"""Records of methods that exchange nothing but task models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters
from replayfleet.models.build import build_task_model
from replayfleet.models.specs import AnyTaskSpec


@dataclass(frozen=True, slots=True)
class TaskUpload:
    """A trained task model.

    Attributes:
        task_parameters: its parameters.
        num_samples: real samples it was trained on in this round.
    """

    task_parameters: Parameters
    num_samples: int

    def pack(self) -> Artefacts:
        """Return ``task``."""
        return Artefacts({packing.TASK: self.task_parameters}, {"num_samples": self.num_samples})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> TaskUpload:
        """Return the upload again."""
        num_samples = packing.whole_number(artefacts.facts.get("num_samples"), "num_samples")
        return cls(packing.required(artefacts, packing.TASK), num_samples)


@dataclass(frozen=True, slots=True)
class TaskDownload:
    """The task model that a client serves and starts its next round from."""

    task_parameters: Parameters

    def pack(self) -> Artefacts:
        """Return ``task``."""
        return Artefacts({packing.TASK: self.task_parameters})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> TaskDownload:
        """Return the download again."""
        return cls(packing.required(artefacts, packing.TASK))


@dataclass(frozen=True, slots=True)
class NoState:
    """The state of a half that remembers nothing."""

    def pack(self) -> Artefacts:
        """Return nothing."""
        return Artefacts()

    @classmethod
    def unpack(cls, _artefacts: Artefacts) -> NoState:
        """Return the state again."""
        return cls()


@dataclass(frozen=True, slots=True)
class TaskModels:
    """Task models by client id, and the one that everybody else gets.

    Attributes:
        clients: client id -> the task model it downloads.
        common: what clients without an entry download; empty if there is none yet.
    """

    clients: Mapping[ClientId, Parameters] = field(default_factory=dict)
    common: Parameters = field(default_factory=dict)

    def pack(self) -> Artefacts:
        """Return ``average`` and ``clients/<id>/task``."""
        sets: dict[str, Parameters] = {packing.AVERAGE: self.common} if self.common else {}
        sets |= {f"clients/{client_id}/{packing.TASK}": parameters for client_id, parameters in self.clients.items()}
        return Artefacts(sets, {"clients": sorted(self.clients)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> TaskModels:
        """Return the state again."""
        clients = {
            str(client_id): packing.required(artefacts, f"clients/{client_id}/{packing.TASK}")
            for client_id in artefacts.facts.get("clients", [])
        }
        return cls(clients, artefacts.parameter_sets.get(packing.AVERAGE, {}))


def task_upload_layout(spec: AnyTaskSpec, name: str) -> Parameters | None:
    """Return the layout of ``task``, the one parameter set of a ``TaskUpload``; None for other names."""
    return packing.layout(build_task_model(spec, device="meta")) if name == packing.TASK else None


def check_task_upload(upload: TaskUpload) -> None:
    """Raise ValueError if the upload says that it was trained on nothing."""
    if upload.num_samples < 1:
        raise ValueError("num_samples is 0, expected at least 1")

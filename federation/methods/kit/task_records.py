"""Records of methods that exchange nothing but task models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from replayfleet.federation.methods.kit.packing import COUNT, ByClient, OneSet, Record
from replayfleet.federation.methods.kit.records import ClientId, Parameters


@dataclass(frozen=True, slots=True)
class TaskUpload(Record):
    """A trained task model.

    Attributes:
        task_parameters: its parameters.
        num_samples: real samples it was trained on in this round.
    """

    task_parameters: Annotated[Parameters, OneSet("task")]
    num_samples: Annotated[int, COUNT]


@dataclass(frozen=True, slots=True)
class TaskDownload(Record):
    """The task model that a client serves and starts its next round from."""

    task_parameters: Annotated[Parameters, OneSet("task", served=True)]


@dataclass(frozen=True, slots=True)
class NoState(Record):
    """The state of a half that remembers nothing."""


@dataclass(frozen=True, slots=True)
class TaskModels(Record):
    """Task models by client id, and the one that everybody else gets.

    Attributes:
        clients: client id -> the task model it downloads.
        common: what clients without an entry download; empty if there is none yet.
    """

    clients: Annotated[Mapping[ClientId, Parameters], ByClient(part=OneSet("task"))] = field(default_factory=dict)
    common: Annotated[Parameters, OneSet("average")] = field(default_factory=dict)

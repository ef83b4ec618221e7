"""Hostile clients of a simulation: what they learn from, and what they send in place of what they learned.

They keep to the protocol: layouts are right, numbers finite, variances not negative, counts true. So admission takes
what they send, and only screening and a robust average stand between it and the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import AnyTaskSpec, TaskSpec

ATTACKS: Mapping[str, str] = {
    "sign-flip": "the update with its sign turned: away from what was learned, as far as an honest one goes towards it",
    "tenfold": "the update times ten",
    "label-flip": "an honest update, learned from labels counted from the other end: class c is called K - 1 - c",
    "random": "a task model with new random parameters",
}
"""Name -> what a hostile client sends."""

_SCALES = {"sign-flip": -1.0, "tenfold": 10.0}


@dataclass(frozen=True, slots=True)
class Attack:
    """What some clients do in every round.

    Attributes:
        kind: a key of ``ATTACKS``.
        num_hostile: clients that do it, the last ones of the stream: what the others meet doesn't depend on them.
    """

    kind: str
    num_hostile: int = 1

    def check(self, method: Any, num_clients: int) -> None:
        """Raise SettingsError if it can't be made on a fleet with this method."""
        if not 1 <= self.num_hostile < num_clients:
            raise SettingsError(
                f"--hostile is {self.num_hostile}, expected 1 to {num_clients - 1}: somebody must be honest"
            )
        if self.kind == "label-flip":
            if not isinstance(method.task, TaskSpec):
                raise SettingsError("--attack label-flip needs one class for every picture; the task is to find boxes")
        elif "task_parameters" not in getattr(method.Upload, "__dataclass_fields__", ()):
            raise SettingsError(f"--attack {self.kind}: an upload of {method.name} is no task model; take label-flip")

    def data(self, data: RoundData, task: AnyTaskSpec) -> RoundData:
        """Return what a hostile client learns from in place of its round data."""
        if self.kind != "label-flip" or not isinstance(task, TaskSpec):
            return data
        return RoundData(data.images, task.num_classes - 1 - data.labels)

    def upload(self, upload: Any, download: Any, method: Any, rng: torch.Generator) -> Any:
        """Return what a hostile client sends in place of its upload; its own state stays what it learned."""
        if self.kind == "label-flip":
            return upload
        learned: Parameters = upload.task_parameters
        if self.kind == "random":
            drawn = initialise(build_task_model(method.task), rng).state_dict()
            return replace(upload, task_parameters={key: drawn[key].to(learned[key].device) for key in learned})
        start = getattr(download, getattr(method, "start_from", "task_parameters"))
        return replace(upload, task_parameters=_scaled(start, learned, _SCALES[self.kind]))


def _scaled(start: Parameters, learned: Parameters, factor: float) -> dict[str, Tensor]:
    """Return ``start + factor (learned - start)``; variances stay 0 or more, which admission and screening ask for."""
    sent = {}
    for name, tensor in learned.items():
        moved = start[name] + factor * (tensor - start[name]) if tensor.is_floating_point() else tensor
        sent[name] = moved.clamp_min(0) if name.endswith("running_var") else moved
    return sent

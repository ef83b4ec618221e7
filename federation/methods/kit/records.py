"""The values that cross a method's boundary.

Axes: B batch, C channels, H height, W width, K classes, Z latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

ClientId: TypeAlias = str
Parameters: TypeAlias = Mapping[str, Tensor]
"""Named tensors of one model: parameters and buffers, as in its state dict. Never mutated in place."""


@runtime_checkable
class OnePiece(Protocol):
    """What a set of parameters may have besides: its floating tensors as one, to be summed in one go."""

    @property
    def in_order(self) -> tuple[str, ...]:
        """Names of its floating tensors as ``floats`` has them, the same object for sets of equal layout; or none."""

    def floats(self) -> Tensor:
        """Return them (P,), flat and one behind the other."""


Facts: TypeAlias = Mapping[str, Any]
"""Small msgpack-able values: None, bool, int, float, str, and lists and str-keyed dicts of them."""

Draw: TypeAlias = Callable[[Tensor], Tensor]
"""Latents (B, Z) float32 -> images (B, C, H, W) float32 in [-1, 1], the generator in eval mode."""

Sampler: TypeAlias = Callable[[Parameters], Draw]
"""Binds one sub-generator's parameters: eager PyTorch in simulation, ONNX Runtime on a device."""

Judge: TypeAlias = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) -> logits (B, K), or a detector's raw outputs, in eval mode and without gradients."""


@dataclass(frozen=True, slots=True)
class RoundData:
    """The labelled samples a client may use in this round, and only in this round.

    Attributes:
        images: (B, C, H, W) float32 in [-1, 1].
        labels: (B,) int64 class ids. For detection (B, M, 5) float32: class id, centre x, centre y, width and height in
            shares of the picture's; class id -1 is padding, and centres lie in the picture.
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.float32:
            raise ValueError(f"images must be (B, C, H, W) float32, got {tuple(self.images.shape)} {self.images.dtype}")
        if self.labels.ndim == 3:
            _check_boxes(self.labels)
        elif self.labels.ndim != 1 or self.labels.dtype != torch.int64:
            raise ValueError(f"labels must be (B,) int64, got {tuple(self.labels.shape)} {self.labels.dtype}")
        if len(self.images) != len(self.labels):
            raise ValueError(f"round data has {len(self.images)} images but {len(self.labels)} labels")

    def counts(self) -> dict[int, int]:
        """Samples per class id, classes in rising order, absent classes left out.

        Raises:
            ValueError: The labels are boxes: a picture then has no one class.
        """
        if self.labels.ndim != 1:
            raise ValueError(
                "samples of a detection task have boxes, not one class each; they can't be counted by class"
            )
        classes, counts = torch.unique(self.labels, return_counts=True)
        return dict(zip(classes.tolist(), counts.tolist(), strict=True))


def _check_boxes(labels: Tensor) -> None:
    """Raise ValueError unless ``labels`` are boxes as ``RoundData`` describes them."""
    if labels.shape[2] != 5 or labels.dtype != torch.float32:
        raise ValueError(f"boxes must be (B, M, 5) float32, got {tuple(labels.shape)} {labels.dtype}")
    class_ids = labels[..., 0]
    if not bool(((class_ids >= -1) & (class_ids == class_ids.floor())).all()):
        raise ValueError("boxes must have whole numbers of at least -1 as class ids")
    true = labels[class_ids >= 0]
    inside = (true[:, 1:3] >= 0) & (true[:, 1:3] <= 1)
    sized = (true[:, 3:] > 0) & true[:, 3:].isfinite()
    if not bool((inside & sized).all()):
        raise ValueError(
            "boxes must have centres from 0 to 1 and finite sizes above 0, in shares of the picture's size"
        )


@dataclass(frozen=True, slots=True)
class Artefacts:
    """Any state, upload or download in the one form that travels and is stored.

    Attributes:
        parameter_sets: name -> parameters. Each becomes one content-addressed blob, so an unchanged set costs nothing.
            Names are ``[A-Za-z0-9_/-]{1,128}``, for example ``task`` or ``sub-generator/3``.
        facts: everything else.
    """

    parameter_sets: Mapping[str, Parameters] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)


class Method(Protocol):
    """What the simulator and the services rely on; a method need not inherit from anything.

    A method is a frozen dataclass: ``task: TaskSpec``, or an ``AnyTaskSpec``, first, then its settings, all with
    defaults. Both functions are pure: same arguments, same bits, arguments untouched. Each of
    its four records is a ``packing.Record``.
    """

    name: ClassVar[str]
    stores_data: ClassVar[bool]
    """True if the client's state holds real samples, which operators must see."""
    deployable: ClassVar[bool]
    """False if it predicts with more than the fleet's task model, which the simulator can run but no device serves."""
    Upload: ClassVar[type[Any]]
    Download: ClassVar[type[Any]]
    ClientState: ClassVar[type[Any]]
    AggregatorState: ClassVar[type[Any]]

    def initial_states(self) -> tuple[Any, Any]:
        """Return (a client's state, the aggregator's state) before round 0."""

    def initial_download(self, rng: torch.Generator) -> Any:
        """Return the download that every client starts round 0 from."""

    def local_round(
        self, state: Any, data: RoundData, download: Any, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[Any, Any]:
        """One client's half of a round: (state, upload); a ``pace: Pace | None`` beside these may shorten it."""

    def aggregate(
        self, state: Any, uploads: Mapping[ClientId, Any], rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[Any, dict[ClientId, Any]]:
        """The aggregator's half: (state, a download for every client the state knows, absent ones included).

        Raises:
            ValueError: There are no uploads.
        """

    def download_for(self, state: Any, client_id: ClientId, initial: Any) -> Any:
        """The latest download for one client; ``initial`` (round 0's) where nothing better exists yet."""

    def upload_layout(self, name: str) -> Parameters | None:
        """Meta tensors that an upload's parameter set ``name`` must match, or None if the name is unknown."""

    def check_upload(self, upload: Any) -> None:
        """Raise ValueError if counts or other facts of an upload are impossible."""

    def predictor(self, download: Any) -> Judge:
        """What a device with this download answers: if deployable, the task model with the download's served set."""

"""What a fleet's models look like, as plain values: this module never imports torch.

Both ends derive every parameter shape from a ``TaskSpec``, so the spec travels once and shapes never do.
"""

from __future__ import annotations

import dataclasses
import operator
import unicodedata
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from replayfleet.federation.errors import nearest
from replayfleet.federation.extensions import MODELS_GROUP, Extended

LATENT_SIZE = 100
"""Z: entries of a sub-generator's latent vector."""

IMAGE_SIZES = (28, 32, 64)
"""Image sides, in pixels, that a WGAN-GP sub-generator exists for."""

STEMS = ("cifar", "imagenet")
"""Beginning of a ResNet: a 3x3 convolution with stride 1, or what halves; see ``models.resnet.ResNetShape``."""

Model: TypeAlias = Literal[
    "resnet20",
    "resnet20-cosine",
    "cnn",
    "lenet",
    "resnet18",
    "resnet18-cosine",
    "resnet20-he",
    "resnet20-he-cosine",
    "linear",
]
"""Task models of a classification: pFedGRP's, those of the other papers (``models.resnet``, ``models.cnn``)."""

ARCHITECTURES: tuple[str, ...] = get_args(Model)

ADDED_MODELS: Extended[Any] = Extended(
    MODELS_GROUP, "task model", {}, lambda _, found: "" if callable(found) else f"{found!r} makes no module"
)
"""Those of other packages: each a function of a ``TaskSpec`` that gives its module, see ``models.build``."""

DETECTION_STRIDES = (8, 16, 32)
"""Pixels between neighbouring cells of a detector's grid; 32 is the published one, finer ones see smaller things."""

DETECTORS = ("tiny-yolo", "pyramid")
"""Networks of a detector: the published one (``models.tiny_yolo``), and one for small things (``models.pyramid``)."""

STANDARD_WIDTH = 16
"""Channels of the published tiny YOLO's first convolution."""

_BREAKING = frozenset(("Cc", "Zl", "Zp"))
"""Unicode's categories of controls, and of breaks of lines and paragraphs."""

_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Unicode's marks that turn the text around them; those of Hebrew and Arabic names don't."""

MAX_CLASS_NAME = 255
"""Characters of a class's name: what a folder of pictures may be called."""

NARROW_WIDTH = 4
"""Of one for small boards: a sixteenth of the parameters and of the arithmetic."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """The classification task that a fleet learns.

    Attributes:
        image_channels: C, 1 or 3.
        image_size: side of the square image in pixels, one of ``IMAGE_SIZES``.
        class_names: K names; a class id is an index into them.
        stem: one of ``STEMS``.
        generator_width: channels of the sub-generator's last hidden layer (16, 64, 128 in the paper).
        architecture: of the task model, one of ``ARCHITECTURES`` or ``ADDED_MODELS``; only the ResNets have a stem.
    """

    image_channels: int
    image_size: int
    class_names: tuple[str, ...]
    stem: str = "cifar"
    generator_width: int = 16
    architecture: str = "resnet20"

    def __post_init__(self) -> None:
        _take_plain(self, "image_channels", "image_size", "generator_width")
        if self.image_channels not in {1, 3}:
            raise ValueError(f"image_channels is {self.image_channels}, expected 1 or 3")
        if self.image_size not in IMAGE_SIZES:
            raise ValueError(f"image_size is {self.image_size}, expected one of {IMAGE_SIZES}")
        if self.stem not in STEMS:
            raise ValueError(f"stem is {self.stem!r}, expected one of {STEMS}")
        check_architecture(self.architecture)
        given: object = self.class_names
        if isinstance(given, str):
            raise ValueError(f"class_names is {given!r:.80}, expected several names")
        if not 2 <= len(self.class_names) <= 4096:
            raise ValueError(f"a task needs 2 to 4096 classes, got {len(self.class_names)}")
        _check_names(self.class_names)
        object.__setattr__(self, "class_names", tuple(map(str, self.class_names)))
        if not 1 <= self.generator_width <= 512:
            raise ValueError(f"generator_width is {self.generator_width}, expected 1 to 512")

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image; values are float32 in [-1, 1]."""
        return (self.image_channels, self.image_size, self.image_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """What the task model answers for one image: (K,) logits."""
        return (self.num_classes,)


def check_architecture(name: Any) -> None:
    """Raise a ValueError unless this is a task model of ours, or of a package that is installed; imports nothing."""
    if name not in ARCHITECTURES and name not in ADDED_MODELS:
        known = {*ARCHITECTURES, *ADDED_MODELS}
        raise ValueError(
            f"architecture is {name!r}, no task model of ours or of an installed package{nearest(name, known)}"
        )


def plain_task(task: TaskSpec | DetectionSpec) -> dict[str, Any]:
    """Return a task's fields; one that came later is left out at its default, so that old runs stay the same."""
    fields = dataclasses.asdict(task)
    if fields["architecture"] in {ARCHITECTURES[0], DETECTORS[0]}:
        del fields["architecture"]
    return fields


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """A sub-generator that is a mixture of Gaussians (``models.gaussian``), for the images of a task.

    Attributes:
        task: gives the image shape.
        num_dims: D, dimensions of each Gaussian, 1 to ``LATENT_SIZE`` - 1.
        num_components: M, 1 to 16.
    """

    task: TaskSpec
    num_dims: int = 32
    num_components: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_dims < LATENT_SIZE:
            raise ValueError(f"a Gaussian has {self.num_dims} dimensions, expected 1 to {LATENT_SIZE - 1}")
        if not 1 <= self.num_components <= 16:
            raise ValueError(f"a mixture has {self.num_components} components, expected 1 to 16")

    @property
    def num_pixels(self) -> int:
        """P = C * H * W."""
        return self.task.image_channels * self.task.image_size**2

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image; values are float32 in [-1, 1]."""
        return self.task.image_shape


GeneratorSpec: TypeAlias = TaskSpec | MixtureSpec
"""What ``models.build.build_generator`` takes: a WGAN-GP's generator as wide as its task says, or a mixture."""


@dataclass(frozen=True, slots=True)
class DetectionSpec:
    """The detection task that a fleet learns: which things are to be seen in a picture, and where.

    Attributes:
        image_channels: C, 1 or 3.
        image_height: H in pixels, a multiple of ``stride``.
        image_width: W in pixels, a multiple of ``stride``.
        class_names: K names; a class id is an index into them.
        anchors: A typical boxes, (width, height) in shares of the picture's; see ``federation.streams.anchors``.
        width: channels of the first convolution; ``STANDARD_WIDTH`` or, for small boards, ``NARROW_WIDTH``.
        stride: one of ``DETECTION_STRIDES``. Parameters don't depend on it; arithmetic does.
        max_boxes: M, most boxes that a picture's label holds; labels of a fleet all have this length.
        architecture: one of ``DETECTORS``; a ``pyramid`` needs sides that are multiples of 32 at every stride.
    """

    image_channels: int
    image_height: int
    image_width: int
    class_names: tuple[str, ...]
    anchors: tuple[tuple[float, float], ...]
    width: int = STANDARD_WIDTH
    stride: int = 32
    max_boxes: int = 32
    architecture: str = DETECTORS[0]

    def __post_init__(self) -> None:
        _take_plain(self, "image_channels", "image_height", "image_width", "width", "stride", "max_boxes")
        if self.image_channels not in {1, 3}:
            raise ValueError(f"image_channels is {self.image_channels}, expected 1 or 3")
        if self.stride not in DETECTION_STRIDES:
            raise ValueError(f"stride is {self.stride}, expected one of {DETECTION_STRIDES}")
        if self.architecture not in DETECTORS:
            raise ValueError(f"architecture is {self.architecture!r}, expected one of {DETECTORS}")
        factor = self.stride if self.architecture == "tiny-yolo" else max(DETECTION_STRIDES)
        for name in ("image_height", "image_width"):
            pixels = getattr(self, name)
            if not 32 <= pixels <= 4096 or pixels % factor:
                raise ValueError(f"{name} is {pixels}, expected 32 to 4096 pixels and a multiple of {factor}")
        if not 1 <= len(self.class_names) <= 4096:
            raise ValueError(f"a detector needs 1 to 4096 classes, got {len(self.class_names)}")
        _check_names(self.class_names)
        object.__setattr__(self, "class_names", tuple(map(str, self.class_names)))
        _check_anchors(self.anchors)
        if not 1 <= self.width <= 512:
            raise ValueError(f"width is {self.width}, expected 1 to 512")
        if not 1 <= self.max_boxes <= 1000:
            raise ValueError(f"max_boxes is {self.max_boxes}, expected 1 to 1000")

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def num_anchors(self) -> int:
        """A."""
        return len(self.anchors)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image; values are float32 in [-1, 1]."""
        return (self.image_channels, self.image_height, self.image_width)

    @property
    def grid_shape(self) -> tuple[int, int]:
        """(rows, columns) of cells."""
        return (self.image_height // self.stride, self.image_width // self.stride)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """What the detector answers for one image: (A * (5 + K), rows, columns)."""
        return (self.num_anchors * (5 + self.num_classes), *self.grid_shape)


def _take_plain(spec: TaskSpec | DetectionSpec, *numbers: str) -> None:
    """Have these be whole numbers of Python's, and texts its texts: messages and files hold none of NumPy's."""
    for name in ("stem", "architecture"):
        if isinstance(text := getattr(spec, name, None), str):
            object.__setattr__(spec, name, str(text))
    for name in numbers:
        given = getattr(spec, name)
        try:
            object.__setattr__(spec, name, int(operator.index(given)))
        except TypeError:
            raise ValueError(f"{name} is {given!r:.80}, expected a whole number") from None


def _check_names(class_names: tuple[str, ...]) -> None:
    """Labels name classes, so a name that two of them had would say nothing."""
    seen = set()
    for name in class_names:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"a class is named {name!r}, expected a name")
        if len(name) > MAX_CLASS_NAME:
            raise ValueError(
                f"a class's name has {len(name)} characters, expected at most {MAX_CLASS_NAME}: {name!a:.80}"
            )
        if any(c in _TURNING or unicodedata.category(c) in _BREAKING for c in name):
            raise ValueError(
                f"a class is named {name!a:.80}, expected what can be printed in a line, without marks that turn it"
            )
        if name in seen:
            raise ValueError(f"two classes are named {name!r}, expected a name of its own for each")
        seen.add(name)


def _check_anchors(anchors: tuple[tuple[float, float], ...]) -> None:
    if not 1 <= len(anchors) <= 64:
        raise ValueError(f"a detector needs 1 to 64 anchors, got {len(anchors)}")
    for anchor in anchors:
        if len(anchor) != 2 or not all(0 < side <= 2 for side in anchor):
            raise ValueError(f"anchor is {anchor}, expected (width, height), each above 0 and at most 2 pictures")


@dataclass(frozen=True, slots=True)
class DetectionRules:
    """Which of a detector's thousands of boxes count as found.

    Attributes:
        score_threshold: boxes with a lower score are dropped; a score is confidence times class probability, 0 to 1.
        iou_threshold: of two boxes of one class that overlap by more, the one with the lower score is dropped.
        max_detections: most boxes of one picture; those with the highest scores.
    """

    score_threshold: float = 0.25
    iou_threshold: float = 0.45
    max_detections: int = 100

    def __post_init__(self) -> None:
        for name in ("score_threshold", "iou_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 to 1")
        if self.max_detections < 1:
            raise ValueError(f"max_detections is {self.max_detections}, expected at least 1")


EVALUATION_RULES = DetectionRules(score_threshold=0.01)
"""For mean average precision, which weighs every threshold: nearly everything counts as found."""

AnyTaskSpec: TypeAlias = TaskSpec | DetectionSpec
"""What a fleet can learn."""

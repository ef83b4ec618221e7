"""The networks of a fleet and their specs.

The classes are imported on first use, so that ``import replayfleet.models.specs`` (a device that only serves, a CLI's
``--help``) never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayfleet.models.pyramid import Pyramid
    from replayfleet.models.resnet import ResNet
    from replayfleet.models.specs import DetectionSpec, TaskSpec
    from replayfleet.models.tiny_yolo import TinyYolo
    from replayfleet.models.wgan import Critic, Generator

__all__ = ["Critic", "DetectionSpec", "Generator", "Pyramid", "ResNet", "TaskSpec", "TinyYolo"]

_HOMES = {
    "Critic": "replayfleet.models.wgan",
    "DetectionSpec": "replayfleet.models.specs",
    "Generator": "replayfleet.models.wgan",
    "Pyramid": "replayfleet.models.pyramid",
    "ResNet": "replayfleet.models.resnet",
    "TaskSpec": "replayfleet.models.specs",
    "TinyYolo": "replayfleet.models.tiny_yolo",
}


def __getattr__(name: str) -> Any:
    """Import a public class from its module (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'models' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__

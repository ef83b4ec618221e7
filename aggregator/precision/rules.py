"""What an operator lets clients serve beside float32; without torch or numpy, for command lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replayfleet.devices.profiles import FP16, FP32, INT8, PRECISIONS
from replayfleet.federation.errors import SettingsError

if TYPE_CHECKING:
    from replayfleet.export.running.artefact import Array

NONE = "none"


@dataclass(frozen=True, slots=True)
class PrecisionRules:
    """How models are rounded for those who want it.

    Attributes:
        allowed: of ``devices.profiles.PRECISIONS``.
        max_loss_points: of agreement with the float32 model; None: what ``model-export`` lets the format lose.
        images: (N, C, H, W) in [-1, 1] to calibrate and judge with; None: replay.
    """

    allowed: tuple[str, ...] = (FP16, INT8)
    max_loss_points: float | None = None
    images: Array | None = None


def check_precisions(names: Any) -> None:
    """Raise a SettingsError unless clients can be served all of these."""
    names = (names,) if isinstance(names, str) else names
    for name in names:
        if name not in (*PRECISIONS, NONE) or name == FP32:
            raise SettingsError(f"precisions {name!r}: expected fp16 or int8, several of them, or none")
    if NONE in names and len(set(names)) > 1:
        raise SettingsError(f"precisions {', '.join(names)}: none goes with no other; leave it out, or the others")


def allowed_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those that clients may be served; ``none`` forbids all."""
    return () if NONE in names else names

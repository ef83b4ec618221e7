"""Which cameras there are: URI scheme -> its settings, and what takes its pictures.

Modules are imported when a scheme is used, so that a client with one camera loads nothing of the others.
``ALL_CAMERAS`` knows those of other packages too (``federation.extensions``), and is where a scheme is looked up.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from replayfleet.federation.extensions import Extended


@dataclass(frozen=True, slots=True)
class CameraKind:
    """Where one kind of camera lives.

    Attributes:
        module: that has settings and camera; one that begins with a dot is below ``edge_client.cameras``.
        settings_name: its settings' class there.
        camera_name: what makes a camera of ``(settings, name)`` there, or of ``(settings, name, take_stderr, alive)``
            where it is supervised; ``other_module:name`` where it lives elsewhere.
        place: the setting that the middle of the URI fills; ``host`` fills ``port`` too, and ``url`` is the whole URI.
        supervised: read in a process of its own, which can be killed when a driver hangs; ours only.
    """

    module: str
    settings_name: str
    camera_name: str
    place: str
    supervised: bool = False

    def settings(self) -> type[Any]:
        kind: type[Any] = self._found(self.settings_name)
        return kind

    def camera(self) -> Any:
        return self._found(self.camera_name)

    def _found(self, name: str) -> Any:
        module, _, attribute = name.rpartition(":")
        return getattr(importlib.import_module(module or self.module, __package__), attribute)


_OPENCV = ".live.opencv:capture_loop"

CAMERAS: dict[str, CameraKind] = {
    "camera": CameraKind(".live.device", "DeviceCameraSettings", _OPENCV, "place", supervised=True),
    "csi": CameraKind(".live.csi", "CsiCameraSettings", _OPENCV, "sensor", supervised=True),
    "rtsp": CameraKind(".live.rtsp", "RtspCameraSettings", _OPENCV, "url", supervised=True),
    "rtsps": CameraKind(".live.rtsp", "RtspCameraSettings", _OPENCV, "url", supervised=True),
    "carla": CameraKind(".carla.settings", "CarlaSettings", ".carla.drive:carla_drive", "host", supervised=True),
    "video": CameraKind(".recorded.video", "VideoSettings", "VideoCamera", "path"),
    "images": CameraKind(".recorded.images", "ImagesSettings", "ImagesCamera", "path"),
    "carla-replay": CameraKind(".recorded.carla_replay", "CarlaReplaySettings", "CarlaReplayCamera", "path"),
    "synthetic": CameraKind(".recorded.synthetic", "SyntheticSettings", "SyntheticCamera", ""),
}
"""Scheme -> camera."""


def _fault(scheme: str, kind: object) -> str:
    if not isinstance(kind, CameraKind):
        return f"{kind!r} is no CameraKind (replayfleet.edge_client.cameras.kinds)"
    if not re.fullmatch("[a-z-]+", scheme):
        return "a scheme has small letters and hyphens only"
    return "only replayfleet's own cameras can be supervised" if kind.supervised else ""


ALL_CAMERAS: Extended[CameraKind] = Extended("replayfleet.sources", "source scheme", CAMERAS, _fault)
"""``CAMERAS``, and those of other packages, which are imported when they are used."""

"""Which cameras there are, and how one is opened: URI scheme -> its settings and its class.

Modules are imported when a scheme is used, so that a client with one camera loads nothing of the others.
``ALL_CAMERAS`` knows those of other packages too (``federation.extensions``), and is where a scheme is looked up.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from replayfleet.edge_client.flow import Camera
from replayfleet.federation.extensions import Extended


@dataclass(frozen=True, slots=True)
class CameraKind:
    """Where one kind of camera lives.

    Attributes:
        module: that has both classes; one that begins with a dot is below ``edge_client.cameras``.
        settings_name: its settings' class there.
        camera_name: its camera's class there.
        place: the setting that the middle of the URI fills; ``host`` fills ``port`` too, and ``url`` is the whole URI.
        supervised: read in a process of its own, which can be killed when a driver hangs; ours only.
    """

    module: str
    settings_name: str
    camera_name: str
    place: str
    supervised: bool = False

    def settings(self) -> type[Any]:
        """Return the settings' class."""
        return getattr(importlib.import_module(self.module, __package__), self.settings_name)  # type: ignore[no-any-return]

    def open(self, settings: Any, name: str) -> Camera:
        """Return a camera; nothing is captured yet.

        Raises:
            SettingsError: It can't be used on this machine, or what it reads isn't there.
        """
        module = importlib.import_module(self.module, __package__)
        camera: Camera = getattr(module, self.camera_name)(settings, name)
        if not self.supervised:
            return camera
        from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera

        return SupervisedCamera(settings, name)


CAMERAS: dict[str, CameraKind] = {
    "camera": CameraKind(".live.device", "DeviceCameraSettings", "DeviceCamera", "place", supervised=True),
    "csi": CameraKind(".live.csi", "CsiCameraSettings", "CsiCamera", "sensor", supervised=True),
    "rtsp": CameraKind(".live.rtsp", "RtspCameraSettings", "RtspCamera", "url", supervised=True),
    "rtsps": CameraKind(".live.rtsp", "RtspCameraSettings", "RtspCamera", "url", supervised=True),
    "video": CameraKind(".recorded.video", "VideoSettings", "VideoCamera", "path"),
    "images": CameraKind(".recorded.images", "ImagesSettings", "ImagesCamera", "path"),
    "carla-replay": CameraKind(".recorded.carla_replay", "CarlaReplaySettings", "CarlaReplayCamera", "path"),
    "carla": CameraKind(".carla.live", "CarlaSettings", "CarlaCamera", "host"),
    "synthetic": CameraKind(".recorded.synthetic", "SyntheticSettings", "SyntheticCamera", ""),
}
"""Scheme -> camera."""


def _fault(scheme: str, kind: object) -> str:
    """Return why something can't be the camera of this scheme, or ""."""
    if not isinstance(kind, CameraKind):
        return f"{kind!r} is no CameraKind (replayfleet.edge_client.cameras.opening)"
    if not re.fullmatch("[a-z-]+", scheme):
        return "a scheme has small letters and hyphens only"
    return "only replayfleet's own cameras can be supervised" if kind.supervised else ""


ALL_CAMERAS: Extended[CameraKind] = Extended("replayfleet.sources", "source scheme", CAMERAS, _fault)
"""``CAMERAS``, and those of other packages, which are imported when they are used."""

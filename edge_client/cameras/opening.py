"""Which cameras there are, and how one is opened: URI scheme -> its settings and its class.

Modules are imported when a scheme is used, so that a client with one camera loads nothing of the others.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from replayfleet.edge_client.flow import Camera


@dataclass(frozen=True, slots=True)
class CameraKind:
    """Where one kind of camera lives.

    Attributes:
        module: below ``edge_client.cameras``.
        settings_name: its settings' class there.
        camera_name: its camera's class there.
        place: the setting that the middle of the URI fills; ``host`` fills ``port`` too, and ``url`` is the whole URI.
        supervised: read in a process of its own, which can be killed when a driver hangs.
    """

    module: str
    settings_name: str
    camera_name: str
    place: str
    supervised: bool = False

    def settings(self) -> type[Any]:
        """Return the settings' class."""
        return getattr(importlib.import_module(f"replayfleet.edge_client.cameras.{self.module}"), self.settings_name)  # type: ignore[no-any-return]

    def open(self, settings: Any, name: str) -> Camera:
        """Return a camera; nothing is captured yet.

        Raises:
            SettingsError: It can't be used on this machine, or what it reads isn't there.
        """
        module = importlib.import_module(f"replayfleet.edge_client.cameras.{self.module}")
        camera: Camera = getattr(module, self.camera_name)(settings, name)
        if not self.supervised:
            return camera
        from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera

        return SupervisedCamera(settings, name)


CAMERAS: dict[str, CameraKind] = {
    "camera": CameraKind("live.device", "DeviceCameraSettings", "DeviceCamera", "place", supervised=True),
    "csi": CameraKind("live.csi", "CsiCameraSettings", "CsiCamera", "sensor", supervised=True),
    "rtsp": CameraKind("live.rtsp", "RtspCameraSettings", "RtspCamera", "url", supervised=True),
    "rtsps": CameraKind("live.rtsp", "RtspCameraSettings", "RtspCamera", "url", supervised=True),
    "video": CameraKind("recorded.video", "VideoSettings", "VideoCamera", "path"),
    "images": CameraKind("recorded.images", "ImagesSettings", "ImagesCamera", "path"),
    "carla-replay": CameraKind("recorded.carla_replay", "CarlaReplaySettings", "CarlaReplayCamera", "path"),
    "carla": CameraKind("carla.live", "CarlaSettings", "CarlaCamera", "host"),
    "synthetic": CameraKind("recorded.synthetic", "SyntheticSettings", "SyntheticCamera", ""),
}
"""Scheme -> camera."""

"""Which live cameras there are: URI scheme -> settings and class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec

from replayfleet.edge_client.cameras.live.csi import CsiCamera, CsiCameraSettings
from replayfleet.edge_client.cameras.live.device import DeviceCamera, DeviceCameraSettings
from replayfleet.edge_client.cameras.live.opencv import Complaints, no_complaints
from replayfleet.edge_client.cameras.live.rtsp import RtspCamera, RtspCameraSettings
from replayfleet.edge_client.flow import Camera
from replayfleet.federation.errors import SettingsError

LiveSettings: TypeAlias = DeviceCameraSettings | CsiCameraSettings | RtspCameraSettings


class LiveCamera(Camera, Protocol):
    """A camera that this machine may be unable to read at all."""

    def check(self) -> None:
        """Raise SettingsError if so; says what to install."""


LIVE_CAMERAS: dict[str, tuple[type[Any], Callable[..., LiveCamera]]] = {
    "camera": (DeviceCameraSettings, DeviceCamera),
    "csi": (CsiCameraSettings, CsiCamera),
    "rtsp": (RtspCameraSettings, RtspCamera),
}


def kind_of(settings: LiveSettings) -> str:
    """Return the key of ``LIVE_CAMERAS`` that such settings belong to."""
    return next(kind for kind, (settings_type, _) in LIVE_CAMERAS.items() if isinstance(settings, settings_type))


def build_camera(
    kind: str, name: str, settings: Mapping[str, Any], complaints: Complaints = no_complaints
) -> LiveCamera:
    """Return a camera from settings that travelled as JSON.

    Raises:
        SettingsError: They aren't settings of that kind.
    """
    settings_type, camera_type = LIVE_CAMERAS[kind]
    try:
        typed = msgspec.convert(settings, settings_type)
    except msgspec.ValidationError as error:
        raise SettingsError(f"source: {error}") from error
    return camera_type(typed, name, complaints)

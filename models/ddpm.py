"""The denoising network of a diffusion model that draws one class: diffusers' U-Net in the shape of the DDPM paper.

Ho et al. 2020, "Denoising Diffusion Probabilistic Models", appendix B: two residual blocks per resolution, channels
doubled once below the first one, self-attention at 16x16 (14x14 for 28 pixels). At 32 pixels and width 128 it is the
CIFAR-10 model with 35.7 million parameters. Dropout is left out, for it would draw from PyTorch's global generator.
28 pixels halve only twice, so they have three resolutions instead of four.

``diffusers`` is an extra; nothing here imports it before it is needed.
Axes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch import Tensor, nn

from replayfleet.federation.errors import SettingsError
from replayfleet.models.build import build_like
from replayfleet.models.specs import TaskSpec

_ATTENTION_AT = (14, 16)
"""Sides, in pixels, of the maps that attend to themselves."""

_NUM_RESOLUTIONS = {28: 3, 32: 4, 64: 4}
_MAX_GROUPS = 32
_CLASSES = ("UNet2DModel", "DDPMScheduler", "DPMSolverMultistepScheduler")


def require_diffusers() -> None:
    """Check that the extra is installed, and load what is used of it.

    ``diffusers`` loads its modules as their names are first asked for, which fails where two threads do so at the same
    time; so a method asks as it is made, before its clients train.

    Raises:
        SettingsError: It isn't; names the extra.
    """
    if importlib.util.find_spec("diffusers") is None:
        raise SettingsError("sub-generators of kind 'ddpm' need diffusers; install replayfleet[ddpm]")
    diffusers = importlib.import_module("diffusers")
    for name in _CLASSES:
        getattr(diffusers, name)


class Denoiser(nn.Module):
    """Noised images (B, C, H, W) and their timesteps (B,) int64 -> the noise in them (B, C, H, W).

    Args:
        image_channels: C.
        image_size: H and W, one of ``models.specs.IMAGE_SIZES``.
        width: channels at full resolution; a multiple of 32, or less than 32.
    """

    def __init__(self, image_channels: int, image_size: int, width: int) -> None:
        super().__init__()
        from diffusers import UNet2DModel

        num_resolutions = _NUM_RESOLUTIONS[image_size]
        attends = [image_size >> depth in _ATTENTION_AT for depth in range(num_resolutions)]
        self.unet: Any = UNet2DModel(
            sample_size=image_size,
            in_channels=image_channels,
            out_channels=image_channels,
            layers_per_block=2,
            block_out_channels=(width, *[2 * width] * (num_resolutions - 1)),
            down_block_types=tuple("AttnDownBlock2D" if yes else "DownBlock2D" for yes in attends),
            up_block_types=tuple("AttnUpBlock2D" if yes else "UpBlock2D" for yes in reversed(attends)),
            norm_num_groups=min(_MAX_GROUPS, width),
            norm_eps=1e-6,
            attention_head_dim=None,
            downsample_padding=0,
            flip_sin_to_cos=False,
            freq_shift=1,
        )

    def forward(self, noised: Tensor, timesteps: Tensor) -> Tensor:
        """Return the predicted noise."""
        noise: Tensor = self.unet(noised, timesteps, return_dict=False)[0]
        return noise


def build_denoiser(spec: TaskSpec, width: int, *, device: str = "cpu") -> Denoiser:
    """Return the denoiser for the images of ``spec``; see ``models.build.build_task_model``.

    Raises:
        SettingsError: ``diffusers`` is not installed.
    """
    require_diffusers()
    return build_like(Denoiser, spec.image_channels, spec.image_size, width, device=device)

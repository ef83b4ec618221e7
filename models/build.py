"""From a task's spec to modules, and from an explicit generator to their first parameters.

Modules are made on the meta device, where PyTorch's own initialisation draws nothing: global randomness is untouched.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, overload

import torch
from torch import nn

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.extensions import packages_with
from replayfleet.models import cnn, resnet
from replayfleet.models.cnn import LinearHead, SmallCnn
from replayfleet.models.data_free import PixelScale
from replayfleet.models.gaussian import GaussianMixture
from replayfleet.models.pyramid import Pyramid
from replayfleet.models.resnet import CosineHead, ResNet
from replayfleet.models.specs import (
    ADDED_MODELS,
    ARCHITECTURES,
    AnyTaskSpec,
    DetectionSpec,
    GeneratorSpec,
    MixtureSpec,
    TaskSpec,
)
from replayfleet.models.tiny_yolo import DetectionHead, TinyYolo
from replayfleet.models.wgan import Critic, Generator

M = TypeVar("M", bound=nn.Module)

_SOUND: dict[TaskSpec, Any] = {}
"""Task -> what made its task model when that was found to be as ours are (``_added``)."""

_SAME_ANSWER = 1e-4
"""Of two ways to compute it, in shares of it; orders of float32 sums differ by less."""

_DCGAN_STD = 0.02
"""Radford et al. 2016, "Unsupervised Representation Learning with DCGANs", section 4."""


def build_task_model(spec: AnyTaskSpec, *, device: str = "cpu") -> Any:
    """Return the network of ``spec``: one of ours, or what another package adds (``_added``).

    Its parameters are zero until ``initialise`` or ``load_state_dict``.
    ``device="meta"`` gives shapes and dtypes without memory, for layouts and ``functional_call``.
    """
    if isinstance(spec, TaskSpec) and spec.architecture not in ARCHITECTURES:
        return _build(lambda: _added(spec), device)
    return build_like(_ours, spec, device=device)


def _ours(spec: AnyTaskSpec) -> nn.Module:
    """Return our network of ``spec``, on whatever device is the default."""
    if isinstance(spec, DetectionSpec):
        network = Pyramid if spec.architecture == "pyramid" else TinyYolo
        return network(spec.image_channels, spec.num_classes, spec.num_anchors, spec.width, spec.stride)
    if spec.architecture in cnn.SHAPES:
        return SmallCnn(spec.image_channels, spec.num_classes, spec.image_size, spec.architecture)
    if spec.architecture == "linear":
        return LinearHead(math.prod(spec.image_shape), spec.num_classes)
    name = spec.architecture.removesuffix("-cosine")
    shape = resnet.SHAPES[name]
    return ResNet(spec.image_channels, spec.num_classes, spec.stem, shape, cosine=name != spec.architecture)


def _added(spec: TaskSpec) -> nn.Module:
    """Return the task model that another package adds, on whatever device is the default.

    It is as ours are: ``forward(images)`` is ``head(features(images))``, (B, C, H, W) -> (B, D) -> (B, K), and
    ``head.weight`` is (K, D). A layer that ``initialise`` doesn't know has a method ``draw(rng)`` for its parameters.
    All this is looked at once a process, for it takes several times as long as making a module.

    Raises:
        SettingsError: Its package can't be used, or makes something else.
    """
    name = spec.architecture
    what, make = f"task model {name!r} of {packages_with(ADDED_MODELS.group, name)}", ADDED_MODELS[name]
    try:
        module: nn.Module = make(spec)
        if _SOUND.get(spec) is make:
            return module.train()
        module.eval()
        if absent := [part for part in ("features", "head") if not callable(getattr(module, part, None))]:
            raise SettingsError(
                f"{what} has no {' and no '.join(absent)}; expected a module whose forward(images) is "
                "head(features(images)), and head.weight of (classes, features)"
            )
        images = torch.empty(2, *spec.image_shape)
        features = module.features(images)  # type: ignore[operator]
        found = [tuple(each.shape) for each in (module(images), module.head(features), module.head.weight)]  # type: ignore
        lost = {key for key, _ in module.named_buffers()} - module.state_dict().keys()
        undrawn = [type(layer).__name__ for layer in module.modules() if not (_is_known(layer) or _draws(layer))]
    except SettingsError:
        raise
    except Exception as error:  # it is not our code, and may fail in any way
        raise SettingsError(f"{what} can't be built ({type(error).__name__}: {error})") from error
    logits = (2, spec.num_classes)
    if found != [logits, logits, (spec.num_classes, *features.shape[1:])]:
        shapes = ", ".join(map(str, found))
        raise SettingsError(
            f"{what} has answers, head(features) and head.weight of {shapes}; expected {logits} twice, and "
            f"({spec.num_classes}, number of features)"
        )
    if lost:
        raise SettingsError(f"{what} has buffers that its state_dict leaves out: {', '.join(sorted(lost))}")
    if undrawn:
        raise SettingsError(
            f"{what} has layers with parameters or buffers that nothing draws: {', '.join(sorted(set(undrawn)))}; give "
            "them a method draw(rng) that sets all of them, for they are zero until then"
        )
    try:
        furthest = _furthest_from_head(make(spec), spec)
    except Exception as error:
        raise SettingsError(f"{what} gives no answers ({type(error).__name__}: {error})") from error
    if not furthest <= _SAME_ANSWER:
        raise SettingsError(
            f"{what} answers by forward(images) otherwise than by head(features(images)), by up to {furthest:.2g}; "
            "expected the same, for methods train either"
        )
    _SOUND[spec] = make
    return module.train()


@torch.no_grad()
def _furthest_from_head(module: nn.Module, spec: TaskSpec) -> float:
    """Return by how much ``forward`` and ``head(features)`` differ at most on two images, in shares of the largest."""
    rng = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        drawn: Any = initialise(_placed(module, "cpu"), rng).eval()
        images = torch.empty(2, *spec.image_shape).uniform_(-1, 1, generator=rng)
        with torch.random.fork_rng(devices=[]):  # noise that it may draw is the same for both
            answers = drawn(images)
        with torch.random.fork_rng(devices=[]):
            expected = drawn.head(drawn.features(images))
    return float((answers - expected).abs().max() / expected.abs().max().clamp(min=_SAME_ANSWER))


def num_features(spec: TaskSpec) -> int:
    """Return D: how many features the task model's head sees."""
    width: int = build_task_model(spec, device="meta").head.weight.shape[1]
    return width


def class_rows(spec: TaskSpec) -> frozenset[str]:
    """Return the names of the task model's tensors that have a row (dimension 0) for each class."""
    more = dataclasses.replace(spec, class_names=(*(f"class {i}" for i in range(spec.num_classes)), "one more"))
    now, then = (build_task_model(one, device="meta").state_dict() for one in (spec, more))
    return frozenset(name for name in now if now[name].shape != then[name].shape)


@overload
def build_generator(spec: TaskSpec, *, device: str = ...) -> Generator: ...
@overload
def build_generator(spec: MixtureSpec, *, device: str = ...) -> GaussianMixture: ...
def build_generator(spec: GeneratorSpec, *, device: str = "cpu") -> Generator | GaussianMixture:
    """Return a sub-generator of ``spec``; a mixture's moments are zero. See ``build_task_model``."""
    if isinstance(spec, MixtureSpec):
        return _build(lambda: GaussianMixture(spec), device)
    return build_like(Generator, spec.image_channels, spec.generator_width, spec.image_size, device=device)


def build_critic(spec: TaskSpec, *, device: str = "cpu") -> Critic:
    """Return a sub-generator's critic; see ``build_task_model``."""
    return build_like(Critic, spec.image_channels, spec.generator_width, spec.image_size, device=device)


def build_like(construct: Callable[..., M], *given: Hashable, device: str = "cpu") -> M:
    """Return what ``construct`` makes of ``given``, which is made once and copied: PyTorch takes ten times as long.

    For networks whose modules have nothing of their own but layers and what nobody changes in place; see
    ``build_task_model``.
    """
    pattern: M = _pattern(torch.get_default_dtype(), construct, *given)
    return _placed(_copy(pattern, {}), device)


def build_module(construct: Callable[[], M], *, device: str = "cpu") -> M:
    """Return what ``construct`` makes, for networks that need more than a ``TaskSpec``; see ``build_task_model``."""
    return _build(construct, device)


@torch.no_grad()
def initialise(module: M, rng: torch.Generator) -> M:
    """Draw all parameters of ``module`` anew from ``rng``, reset all buffers, and return it.

    Convolutions and linear layers get PyTorch's default, U(-1/sqrt(fan_in), 1/sqrt(fan_in)) (He et al. 2015 with
    a = sqrt 5), and normalisations scale 1 and shift 0; a detector's confidences start at ``DetectionHead.PRIOR``.
    A ``Generator`` or ``Critic`` gets DCGAN's N(0, 0.02) and scales from N(1, 0.02). Layers are visited in the order of
    ``module.modules()``.

    Args:
        module: not on the meta device; changed in place.
        rng: on the module's device.

    Raises:
        TypeError: A layer with parameters for which no scheme is defined here.
    """
    draw = _draw_dcgan if isinstance(module, (Generator, Critic)) else _draw_default
    for layer in module.modules():
        if isinstance(layer, (nn.modules.batchnorm._NormBase)):
            layer.reset_running_stats()
        if _has_tensors(layer):
            draw(layer, rng)
    return module


def _build(construct: Callable[[], M], device: str) -> M:
    return _placed(_on_meta(construct), device)


@functools.lru_cache(maxsize=64)
def _pattern(dtype: torch.dtype, construct: Callable[..., M], *given: Hashable) -> M:
    """Make it, of PyTorch's default ``dtype``."""
    return _on_meta(lambda: construct(*given))


_CONTAINERS = (dict, OrderedDict, set)
"""In which PyTorch keeps what a module has."""


def _copy(module: M, copies: dict[nn.Module, Any]) -> M:
    """Return a network on the meta device once more; see ``build_like``. ``copies``: of parts that it has already."""
    if module in copies:
        return copies[module]  # type: ignore[no-any-return]
    copied = copies[module] = object.__new__(type(module))
    for name, value in vars(module).items():
        object.__setattr__(copied, name, value.copy() if type(value) in _CONTAINERS else value)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            copied._parameters[name] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for name, part in module._modules.items():
        copied._modules[name] = None if part is None else _copy(part, copies)
    return copied


def _on_meta(construct: Callable[[], M]) -> M:
    with torch.device("meta"), torch.inference_mode(mode=False):
        return construct()


def _placed(module: M, device: str) -> M:
    if device == "meta":
        return module
    # Not ``to_empty``: for meta tensors it imports SymPy, 0.7 s and 40 MB.
    zeros = {
        name: torch.zeros(each.shape, dtype=each.dtype, device=device) for name, each in module.state_dict().items()
    }
    module.load_state_dict(zeros, assign=True)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._NormBase):
                layer.reset_running_stats()
    return module


_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
_NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm, nn.LayerNorm)


def _has_tensors(layer: nn.Module) -> bool:
    """Whether a layer has parameters of its own, or buffers that it says how to set."""
    return any(True for _ in layer.parameters(recurse=False)) or (
        _draws(layer) and any(True for _ in layer.buffers(recurse=False))
    )


def _draws(layer: nn.Module) -> bool:
    return callable(getattr(layer, "draw", None))


def _is_known(layer: nn.Module) -> bool:
    """Whether all of a layer's own tensors, if it has any, are drawn by ``initialise`` without its help."""
    if isinstance(layer, (*_CONVOLUTIONS, *_NORMALISATIONS, CosineHead, PixelScale)):
        return True
    if any(True for _ in layer.parameters(recurse=False)):
        return False
    is_reset = isinstance(layer, nn.modules.batchnorm._NormBase)
    return is_reset or not any(True for _ in layer.buffers(recurse=False))


def _draw_default(layer: nn.Module, rng: torch.Generator) -> None:
    if isinstance(layer, _CONVOLUTIONS):
        bound = 1 / math.sqrt(layer.weight[0].numel())
        layer.weight.uniform_(-bound, bound, generator=rng)
        if layer.bias is not None:
            layer.bias.uniform_(-bound, bound, generator=rng)
        if isinstance(layer, DetectionHead):
            layer.start_unconfident()
    elif isinstance(layer, _NORMALISATIONS):
        if layer.weight is not None:
            layer.weight.fill_(1.0)
        if layer.bias is not None:
            layer.bias.zero_()
    elif isinstance(layer, CosineHead):
        bound = 1 / math.sqrt(layer.weight[0].numel())
        layer.weight.uniform_(-bound, bound, generator=rng)
        layer.scale.fill_(layer.FIRST_SCALE)
    elif isinstance(layer, PixelScale):
        layer.mean.fill_(PixelScale.INITIAL)
        layer.std.fill_(PixelScale.INITIAL)
    elif callable(draw := getattr(layer, "draw", None)):
        draw(rng)
    else:
        raise TypeError(
            f"no initialisation is defined for {type(layer).__name__}; give it a method draw(rng), which draws its "
            "parameters, or add one to replayfleet.models.build"
        )


def _draw_dcgan(layer: nn.Module, rng: torch.Generator) -> None:
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        layer.weight.normal_(0.0, _DCGAN_STD, generator=rng)
    elif isinstance(layer, (nn.BatchNorm2d, nn.InstanceNorm2d)):
        layer.weight.normal_(1.0, _DCGAN_STD, generator=rng)
        layer.bias.zero_()
    else:
        raise TypeError(
            f"no DCGAN initialisation is defined for {type(layer).__name__}; add one to replayfleet.models.build"
        )

"""One run, as an operator asks for it: a value that command line, tables and scripts share.

Every option of ``fleet-sim METHOD`` is a field, with its help; the command line is made from the fields and a command
that does the same is made from a value. Between processes it travels as JSON. Imports neither torch nor NumPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec

from replayfleet.federation.errors import SettingsError, nearest

_TYPES = {"int": int, "float": float, "Path": click.Path(path_type=Path)}
"""Word of a field's annotation -> what click takes; any other is a text, or a flag."""

FROM_STDIN = "_run"
"""The only argument of ``fleet-sim`` between our own processes: the run stands in JSON on stdin."""

_SAMPLERS = ("eager", "onnx")
_ALWAYS_NAMED = ("scenario", "dataset", "preset", "seed", "threads")
"""What a written command says even where it is the default, which may change."""


def _option(help_text: str, default: Any = dataclasses.MISSING, flags: str = "", **more: Any) -> Any:
    """Return a field that is an option, too; ``flags`` where they aren't made from its name, ``more`` is click's."""
    return field(default=default, metadata={"help": help_text, "flags": flags, **more})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What an operator asked for, unchecked; ``--help`` says what each means. None is "of the preset"."""

    method: str
    scenario: str = _option("What comes when: gradual, circulating, extreme, driving.", "circulating")
    dataset: str = _option(
        "fashion-mnist, mnist, emnist-byclass, cifar-10, cifar-100, imagenet-10, tinyimagenet-100, carla-crops, "
        "carla-boxes (with --scenario driving), or folder.",
        "fashion-mnist",
    )
    preset: str = _option("Stream size and method: paper, small, demo, tiny.", "small", "--settings")
    clients: int | None = _option("Number of clients.  [default: of the settings]", None)
    rounds: int | None = _option("Number of rounds.  [default: of the settings]", None)
    overlap: int | None = _option("Classes that adjacent task types of a client share.  [default: 0]", None)
    absent: int | None = _option("Clients that miss a round, drawn anew for each but the first.  [default: 0]", None)
    seed: int = _option("Of the stream, the models and the training.", 0)
    out: Path = _option("Folder for the results.", required=True)  # noqa: RUF009 - it returns a field
    data_root: Path | None = _option("Folder of data sets; else $REPLAYFLEET_DATA.", None)  # noqa: RUF009
    download: bool = _option("Let torchvision fetch a data set that is not found.", False)
    image_size: int | None = _option("Side in pixels, for --dataset folder: 32 or 64.", None)
    overrides: tuple[str, ...] = _option(
        "Change one setting; repeatable.", (), "--set", multiple=True, metavar="KEY=VALUE"
    )
    threads: int = _option("Of one operation; results depend on it.", 1)
    workers: int | None = _option(
        "Clients that train at the same time; results don't depend on it.  [default: cores / threads; 1 on a GPU]",
        None,
    )
    torch_device: str = _option("Where methods compute: cpu, cuda, cuda:1, ...", "cpu")
    in_step: bool | None = _option(
        "Train what clients ask for at the same time as one network.  [default: in step on a GPU only]",
        None,
        "--in-step/--one-by-one",
    )
    minutes: float | None = _option("Begin no round, after the first, that would end later; --resume goes on.", None)
    sampler: str = _option("What runs sub-generators: eager (PyTorch) or onnx (as on a device).", "eager")
    compare: tuple[Path, ...] = _option(
        "result.json of another run on the same stream, for the chart; centralized's gives the regret. Repeatable.",
        (),
        multiple=True,
    )
    resume: bool = _option("Continue an interrupted run in --out.", False)
    overwrite: bool = _option("Replace an earlier run in --out.", False)

    def check(self) -> None:
        """Raise SettingsError for what is wrong whatever the method, the data set and the machine are."""
        if self.sampler not in _SAMPLERS:
            raise SettingsError(f"unknown sampler {self.sampler!r}{nearest(self.sampler, _SAMPLERS)}")
        for name in ("threads", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"--{name} is {value}, expected at least 1")
        if self.minutes is not None and not self.minutes >= 0:
            raise SettingsError(f"--minutes is {self.minutes:g}, expected 0 or more")
        if self.resume and self.overwrite:
            raise SettingsError("--resume and --overwrite exclude each other")

    def command(self) -> list[str]:
        """Return the words of a command that does the same."""
        words = ["fleet-sim", self.method]
        for one in dataclasses.fields(self)[1:]:
            value, (flag, _, opposite) = getattr(self, one.name), _flags(one).partition("/")
            if value == one.default and one.name not in _ALWAYS_NAMED:
                continue
            if isinstance(value, bool):
                words.append(flag if value else opposite)
            else:
                several = value if isinstance(value, tuple) else (value,)
                words += [word for single in several for word in (flag, str(single))]
        return words

    def encode(self) -> bytes:
        """Return it as JSON, for another process."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decode(cls, data: bytes) -> RunSpec:
        """Return what ``encode`` was given."""
        return msgspec.json.decode(data, type=cls, dec_hook=lambda kind, text: kind(text))


def click_options(names: Sequence[str] = (), **helps: str) -> list[click.Parameter]:
    """Return the options of these fields, of all if none is named; ``helps`` says what some mean elsewhere."""
    return [
        click.Option(
            [_flags(one), one.name],
            type=next((kind for word, kind in _TYPES.items() if word in str(one.type)), None),
            **{
                **({} if one.default is dataclasses.MISSING else {"default": one.default}),
                **({"is_flag": True} if one.default is False else {}),
                **{key: value for key, value in one.metadata.items() if key != "flags"},
                **({"help": helps[one.name]} if one.name in helps else {}),
            },
        )
        for one in dataclasses.fields(RunSpec)
        if one.metadata and (not names or one.name in names)
    ]


def _flags(one: dataclasses.Field[Any]) -> str:
    return str(one.metadata["flags"]) or f"--{one.name.replace('_', '-')}"

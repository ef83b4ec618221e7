"""Whatever somebody mistypes: one line on stderr, the documented exit code, nothing written, no traceback.

Most lines are made from the options themselves: a word where a number belongs, numbers outside of their bounds, paths
that can't be what is meant, names that don't exist. The others are written by hand.
"""

from __future__ import annotations

import importlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from support.authority import Authority

from replayfleet.federation.paths import PathType, check_folder
from replayfleet.federation.service.command import SettingOption
from replayfleet.federation.service.settings import Setting
from replayfleet.federation.simulator.tables.command import table


@dataclass(frozen=True)
class Line:
    """A command line that can't be used.

    Attributes:
        program: as its errors begin.
        words: behind it.
        variables: in the environment.
        files: name -> content, where it runs.
        code: that it ends with.
        says: part of its one line.
    """

    program: str
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    code: int = 2
    says: str = ""

    def __str__(self) -> str:
        words = " ".join((*(f"{name}={value}" for name, value in self.variables.items()), self.program, *self.words))
        return words[:120].encode("ascii", "backslashreplace").decode() + (
            f" {sorted(self.files)}" if self.files else ""
        )


MAINS = {
    "aggregator": "replayfleet.aggregator.cli:main",
    "edge-client": "replayfleet.edge_client.cli:main",
    "fleet-sim": "replayfleet.federation.simulator.cli:main",
    "model-export": "replayfleet.cli:model_export",
    "replayfleet": "replayfleet.cli:main",
    "demo": "replayfleet.scripts.demo.__main__:main",
    "demo-carla": "replayfleet.scripts.carla.__main__:main",
    "fleet": "replayfleet.scripts.fleet.__main__:main",
    "tcp-link": "replayfleet.scripts.fleet.tcp_link:main",
}
COMMANDS = {
    "aggregator": "replayfleet.aggregator.cli:cli",
    "edge-client": "replayfleet.edge_client.cli:cli",
    "fleet-sim": "replayfleet.federation.simulator.cli:fleet_sim",
    "model-export": "replayfleet.export.cli:main",
    "replayfleet": "replayfleet.cli:cli",
    "demo": "replayfleet.scripts.demo.__main__:demo",
    "demo-carla": "replayfleet.scripts.carla.__main__:demo_carla",
    "fleet": "replayfleet.scripts.fleet.__main__:fleet",
    "tcp-link": "replayfleet.scripts.fleet.tcp_link:tcp_link",
}
START = ("start", "--broker", "mqtt://localhost:1", "--client-id", "a", "--source", "synthetic://")
SERVE = ("serve", "--clients", "1", "--data-dir", "data")
ENROLL = ("enroll", "cam-1", "--data-dir", "data")
TASK = ("task", "--parameters", "none.safetensors", "--out", "out.onnx")
GOOD: dict[tuple[str, ...], tuple[str, ...]] = {
    ("aggregator", "serve"): SERVE[1:],
    ("aggregator", "enroll"): ENROLL[1:],
    ("aggregator", "renew"): ENROLL[1:],
    ("aggregator", "revoke"): (*ENROLL[1:], "--yes"),
    ("aggregator", "clients"): ENROLL[2:],
    ("edge-client", "start"): (*START[1:], "--data-dir", "data"),
    ("fleet-sim",): ("fedavg", "--out", "out"),
    ("fleet-sim", "table"): ("1", "--out", "out"),
    ("model-export", "check"): ("model.onnx",),
    ("replayfleet", "init"): (),
    ("tcp-link",): ("--to", "1"),
    **{("model-export", kind): TASK[1:] for kind in ("task", "sub-generator", "detector", "sampler")},
}
"""What else stands in a line, so that one thing is wrong with it."""

LONG = "x" * 300


def _found(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _commands() -> Iterator[tuple[str, tuple[str, ...], click.Command]]:
    """Every command: its program, the words that lead to it, and itself."""
    for program, place in COMMANDS.items():
        root = _found(place)
        if isinstance(root, click.Group):
            yield from ((program, (name,), command) for name, command in root.commands.items())
        else:
            yield program, (), root
    yield "fleet-sim", ("table",), table


WRONG_FOLDERS = ("a-file", "/proc/x/y", "a-file/below", "leads-nowhere", LONG)


def _wrong_values(option: click.Parameter) -> list[str]:
    """Values that an option can't have, from what it says of itself."""
    if isinstance(option, SettingOption):
        return _wrong_settings(option.setting)
    kind = option.type
    if isinstance(kind, PathType):
        return ["", *(WRONG_FOLDERS if kind._check is check_folder else [LONG])]
    if isinstance(kind, (click.IntRange, click.FloatRange)):
        beyond = (None if kind.min is None else kind.min - 1, None if kind.max is None else kind.max + 1)
        return ["many", *(str(value) for value in beyond if value is not None)]
    return ["many"] if kind in (click.INT, click.FLOAT) else []


def _wrong_settings(setting: Setting) -> list[str]:
    kinds, meta = set(setting.kinds), setting.meta or msgspec.Meta()
    beyond = [meta.gt, meta.lt]
    beyond += [None if meta.ge is None else meta.ge - 1, None if meta.le is None else meta.le + 1]
    found = [str(value) for value in beyond if value is not None]
    found += [f"{choice}x" for choice in setting.choices]
    if kinds & {int, float}:
        found += ["many", "1.5" if float not in kinds else "nan" if found else "much"]
    if Path in kinds:
        found += ["", *(WRONG_FOLDERS if setting.option and setting.option.check is check_folder else ())]
    return found


def _of_options() -> Iterator[Line]:
    for program, words, command in _commands():
        good = GOOD.get((program, *words), ())
        yield Line(program, (*words, *good, "--no-such-option"))
        for option in command.params:
            if isinstance(option, click.Argument):
                values = _wrong_values(option) if program == "replayfleet" else []
                yield from (Line(program, (*words, value)) for value in values)
            elif option.is_flag:  # type: ignore[attr-defined]
                yield Line(program, (*words, *good, f"{option.opts[0]}=perhaps"))
            else:
                wrong = (f"{option.opts[0]}={value}" for value in _wrong_values(option))
                yield from (Line(program, (*words, *good, word)) for word in wrong)


def _of_programs() -> Iterator[Line]:
    for program in ("aggregator", "edge-client", "model-export", "replayfleet"):
        yield Line(program, ("sevre",))
        yield Line(program, ("--no-such-option",))
    for name, setting in (("HEALTH_PORT", "65536"), ("THREADS", "many"), ("INSECURE", "perhaps"), ("FLEET", "a/b")):
        for program, words in (("aggregator", SERVE), ("edge-client", (*START, "--data-dir", "data"))):
            yield Line(program, words, {f"REPLAYFLEET_{name}": setting}, says=f"REPLAYFLEET_{name}")
    for content in _WRONG_FILES:
        words = (*START, "--data-dir", "data", "--config", "edge.toml")
        yield Line("edge-client", words, files={"edge.toml": content}, says="edge.toml")


_WRONG_FILES = (
    b"threads = ",
    b"\xff\xfe\x00",
    b"frame_rat = 1\n",
    b"threads = 'many'\n",
    b"threads = 2000\n",
    b"threads = [1]\n",
    b"threads = {a = 1}\n",
    b"threads = true\n",
    b"max_power_w = nan\n",
    b"max_power_w = -inf\n",
    b"data_dir = ''\n",
    b"data_dir = 3\n",
    b'data_dir = "a\\u0000b"\n',
    b"source = 7\n",
    b"source = ['camera://0', 7]\n",
    b"broker = false\n",
    b"fleet = 'a b'\n",
    b"x = " + b"[" * 5000 + b"]" * 5000,
    b"threads = 1" + b"0" * 5000 + b"\n",
    b"# " + b"x" * (2 << 20) + b"\nthreads = 1\n",
    b"threads = 1\nthreads = 2\n",
)

SOURCES = (
    *("", "://", "camera", "camera//0", "camera://front door", "camera://-1", "camera://0?rate=nan"),
    *("camera://0?rate=1e99", "camera://0?rat=1", "camera://0?rate", "camera://0?rate=1&rate=x"),
    *("csi://9999999999999999999", "rtsp://", "rtsp://host:notaport/x", "rtsp://host/x#transport=pigeon"),
    *("video://", "video:///nowhere.mp4", "images://", "images:///nowhere", "folder://", "folder://nowhere"),
    *("folder://a-file", "folder://~nouser/x", "folder://images?per_round=0", "folder://images?per_round=1.5"),
    *("carla-replay://~nouser", "carla-replay://nowhere", "carla-replay://", "carla-replay://images?town=a&towns=b"),
    *("carla://:notaport", "carla://host:99999999", "synthetic://nowhere", "synthetic://?rate=no", "dataset://"),
    *("dataset://nothing", "dataset://fashion-mnist?clients=0", "dataset://fashion-mnist?client=9", "dataset://[::1"),
    *("dataset://fashion-mnist?scenario=gradul", "dataset://fashion-mnist?seed=x", "video:///" + LONG + ".mp4"),
    *("images:///" + LONG, "video:///a-file?annotations=~nouser/x", "camera://0?annotations=x", f"folder://{LONG}"),
    *("%zz://", "video:///%00", "images:///%00", "folder://%00", "rtsp://[::1/x", "camera://\u2603", "=camera://0"),
)
BROKERS = (
    *(
        "",
        "localhost:x",
        "broker.example",
        "mqtts://192.0.2.7",
        "http://localhost",
        "mqtt://",
        "mqtt://:1883",
        "mqtt://localhost:0",
        "mqtt://localhost:65536",
    ),
    *("mqtt://localhost:x", "mqtt://user:secret@localhost", "mqtt://example.org", "mqtts://[::1", "mqtt://a b"),
)


def _authority() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return Authority(Path(folder)).ca.read_bytes()


def _written() -> Iterator[Line]:
    client, data = START[3:5], ("--data-dir", "data")
    for source in SOURCES:
        yield Line("edge-client", ("start", "--broker", "mqtt://localhost:1", *client, f"--source={source}", *data))
    for broker in BROKERS:
        words = (f"--broker={broker}",)
        yield Line("edge-client", ("start", *words, *client, "--source", "synthetic://", *data))
        yield Line("aggregator", (*SERVE, *words))
    for name in ("a b", "a/b", "+", "#", "", "x" * 65, "ä", "a\nb"):
        yield Line("edge-client", (*START, *data, f"--client-id={name}"))
        yield Line("aggregator", (*SERVE, f"--fleet={name}"))
    twice = ("--serve", "best", "--set", "serve=downloaded")
    yield Line("aggregator", (*SERVE, *twice), says="--set serve=downloaded are about the same")
    for option in ("identity", "tls-ca", "tls-cert", "tls-key", "password-file"):
        yield Line("edge-client", (*START, *data, f"--{option}", "nowhere"))
        yield Line("edge-client", (*START, *data, f"--{option}", "a-file"))
        yield Line("aggregator", (*SERVE, f"--{option}", "images"))
    start = (*START, *data)
    yield from (
        Line("edge-client", words)
        for words in (
            (*start, "--source", "synthetic://", "--source", "folder://images"),
            (*start, "--source", "a=synthetic://", "--source", "a=synthetic://"),
            (*start, "--device", "jetsen"),
            (*start, "--require-provider", "tensort"),
            (*start, "--blob-store", ""),
            (*start, "--record", "film.mp3"),
            (*start, "--record", "nowhere/film.webm"),
            (*start, "--config", "nowhere.toml"),
            (*start, "--config", "images"),
            (*start, "--config", ""),
            (*start, "word"),
            ("start",),
            ("start", *START[1:3]),
            ("status",),
            ("status", "--data-dir", "nowhere"),
            ("status", "--data-dir", "a-file"),
            ("doctor", "--broker", "http://x"),
            ("doctor", "--source", "camra://0"),
            ("bench", "nowhere.onnx"),
            ("bench", "a-file"),
            ("bench", "--data-dir", "nowhere"),
        )
    )
    yield from (
        Line("aggregator", words)
        for words in (
            (*SERVE, "--blob-store", ""),
            (*SERVE, "--min-clients", "2"),
            (*SERVE, "--method", "fedavgg"),
            (*SERVE, "--method", "pfedgrp", "--set", "nothing=1"),
            (*SERVE, "--set", "batch_size"),
            (*SERVE, "--set", "=1"),
            (*SERVE, "--set", "batch_size=many"),
            (*SERVE, "--set", "batch_size=-1"),
            (*SERVE, "--set", "learning_rate=nan"),
            (*SERVE, "--set", "batch_size=1", "--set", "batch_size=2"),
            (*SERVE, "--settings", "tinny"),
            (*SERVE, "--dataset", "fashion"),
            (*SERVE, "--task", "nowhere.toml"),
            (*SERVE, "--task", "a-file"),
            (*SERVE, "--task", "images"),
            ("serve", "--clients", "1"),
            ("status", "--data-dir", "nowhere"),
            ("status", "--data-dir", "images"),
            ("status", "--data-dir", ""),
        )
    )
    yield from (
        Line("aggregator", words)
        for words in (
            ("enroll", "a/b", *ENROLL[2:]),
            ("enroll", "broker", *ENROLL[2:]),
            (*ENROLL, "--fleet", "a b"),
            (*ENROLL, "--host", "a b"),
            (*ENROLL, "--host", "broker.example:8883"),
            (*ENROLL, "--broker-dir", "a\nb"),
            (*ENROLL, "--request", "nowhere"),
            (*ENROLL, "--request", "a-file"),
            (*ENROLL, "--signing-key", "images"),
            ("renew", *ENROLL[1:]),
            ("revoke", *ENROLL[1:]),
            ("clients", *ENROLL[2:]),
        )
    )
    yield Line("edge-client", (*START, "--data-dir", "data", "--tls-ca", "ca.pem"), files={"ca.pem": _authority()})
    for task in (
        b"kind = 'segmentation'\n",
        b"class_names = 7\n",
        b"image_channels = 1\nimage_size = 28\nclass_names = ['a', 'a']\n",
        b"image_channels = 1\nimage_size = 27\nclass_names = ['a', 'b']\n",
        b"image_channels = 99\nimage_size = 28\nclass_names = ['a', 'b']\n",
        b"image_channels = 1\nimage_size = 28\nclass_names = ['a', 'b']\nstem = 'x'\n",
        b"image_channels = 1\nimage_size = 28\nclass_names = ['a', '']\n",
        b"kind = 'detection'\nclass_names = ['a']\n",
        b"kind = 3\n",
    ):
        yield Line("aggregator", (*SERVE, "--task", "task.toml"), files={"task.toml": task})
    run = ("fedavg", "--out", "out")
    yield from (
        Line("fleet-sim", words)
        for words in (
            (),
            ("fedavgg", "--out", "out"),
            ("fedavg",),
            ("fedavg", "--out", ""),
            ("fedavg", "--out", "/proc/x"),
            (*run, "word"),
            (*run, "--clients", "0"),
            (*run, "--clients", "-3"),
            (*run, "--rounds", "0"),
            (*run, "--overlap", "-1"),
            (*run, "--absent", "99"),
            (*run, "--scenario", "gradul"),
            (*run, "--dataset", "fashon-mnist"),
            (*run, "--dataset", "folder"),
            (*run, "--dataset", "folder", "--data-root", "nowhere"),
            (*run, "--settings", "tinny"),
            (*run, "--set", "nothing=1"),
            (*run, "--set", "batch_size"),
            (*run, "--torch-device", "quantum"),
            (*run, "--torch-device", "cuda:99"),
            (*run, "--resume"),
            (*run, "--resume", "--overwrite"),
            (*run, "--image-size", "27"),
            (*run, "--data-root", "a-file"),
            (*run, "--compare", "nowhere.json"),
            (*run, "--compare", "a-file"),
            (*run, "--sampler", "onxx"),
            ("table",),
            ("table", "77"),
            ("table", "1"),
            ("table", "1", "--out", "out", "--jobs", "0"),
            ("table", "1", "--out", "out", "--seeds", "a"),
            ("table", "1", "--out", "out", "--seeds", ","),
            ("table", "1", "--out", "out", "--methods", "fedavgg"),
            ("table", "1", "--out", "out", "--features", "inception"),
            ("table", "10", "--out", "out", "--features", "eyes"),
            ("table", "6", "--seeds", "1"),
            ("table", "driving-crops", "--out", "a-file"),
            ("table", "driving-crops", "--out", "/proc/x"),
        )
    )
    yield from (
        Line("model-export", words)
        for words in (
            ("task",),
            ("task", "--out", "x.onnx"),
            TASK,
            ("task", "--parameters", "a-file", "--out", "x.onnx"),
            ("task", "--parameters", "images", "--out", "x.onnx"),
            ("task", "--from", "nowhere", "--out", "x.onnx"),
            ("task", "--from", "images", "--out", "x.onnx"),
            ("task", "--from", "images", "--parameters", "a-file", "--out", "x.onnx"),
            (*TASK, "--format", "onx"),
            (*TASK, "--device", "jetsen"),
            (*TASK, "--stem", "cifra"),
            (*TASK, "--classes", "a"),
            (*TASK, "--classes", ""),
            (*TASK, "--classes", "a,a"),
            (*TASK, "--client", "3"),
            ("detector", *TASK[1:], "--picture-size", "320"),
            ("detector", *TASK[1:], "--picture-size", "axb"),
            ("detector", *TASK[1:], "--anchors", "nowhere"),
            ("detector", *TASK[1:], "--anchors", "1x2x3"),
            ("sampler", *TASK[1:], "--width", "33"),
            ("check", "nowhere.onnx"),
            ("check", "a-file"),
            ("check", "images"),
            ("check", "model.pt"),
            ("check", "a-file", "--sha256", "zz"),
            ("tsak",),
        )
    )
    yield Line("replayfleet", ("init",))
    yield Line("replayfleet", ("demo", "--rounds", "many"))
    for program in ("demo", "fleet"):
        yield Line(program, ("--settings", "tinny"))
        yield Line(program, ("--clients", "0"))
        yield Line(program, ("--rounds", "0"))
        yield Line(program, ("--data-root", "nowhere"))
        yield Line(program, ("--time-limit-s", "nan"))
    yield Line("fleet", ("--fault", "kill-everybody"))
    yield Line("fleet", ("--source", "dreams"))
    yield Line("fleet", ("--rate", "0", "--source", "synthetic"))
    yield Line("fleet", ("--deadline-s", "-1", "--source", "synthetic"))
    yield Line("fleet", ("--method", "nothing", "--source", "synthetic"))
    for program in ("demo", "demo-carla"):
        yield Line(program, ("--port", "65536"))
        yield Line(program, ("--port", "-1"))
    yield Line("demo-carla", ("--data-root", "nowhere"))
    yield Line("demo-carla", ("--time-limit-s", "0", "--synthetic"))
    for option, value in (
        ("delay-ms", "-4"),
        ("rate-kb", "-1"),
        ("cut-every-s", "nan"),
        ("to", "0"),
        ("port", "99999"),
    ):
        yield Line("tcp-link", ("--to", "1", f"--{option}", value))
    yield Line("tcp-link", ())


LINES = [*_of_options(), *_of_programs(), *_written()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a file, a folder of pictures and a link that leads nowhere, in which commands run."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "REPLAYFLEET_DATA"):
        monkeypatch.setenv(name, str(tmp_path.parent / "home"))  # others put what they cache there
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "a-file").write_text("not what you think")
    (tmp_path / "leads-nowhere").symlink_to("nowhere-at-all")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def too_slow(*_: object) -> None:
        raise AssertionError("it runs, though it can't be used")

    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(60)
    yield tmp_path
    signal.alarm(0)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_wrong_command_line_is_one_line_and_its_exit_code_and_nothing_else(
    line: Line, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in line.variables.items():
        monkeypatch.setenv(name, value)
    for name, content in line.files.items():
        (place / name).write_bytes(content)
    before = sorted(place.rglob("*"))
    monkeypatch.setattr(sys, "argv", [line.program, *line.words])
    with pytest.raises(SystemExit) as ended:
        _found(MAINS[line.program])()
    told = capfd.readouterr()
    assert ended.value.code == line.code, told.err
    assert told.err.count("\n") == 1, told.err
    assert told.err.startswith((f"{line.program}: ", "demo: "))
    assert len(told.err) < 1500
    assert "secret" not in told.err
    assert line.says in told.err
    assert told.out == ""
    assert sorted(place.rglob("*")) == before, "nothing was written"


def test_there_are_many_and_they_differ() -> None:
    assert len({(line.program, line.words, *line.variables, *line.files.values()) for line in LINES}) >= 400

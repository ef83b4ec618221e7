"""What other packages add is found by name, imported when it is used, and can't harm who doesn't use it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.image_sets import small_dataset

from replayfleet.aggregator.serving import OnnxExporter
from replayfleet.edge_client.cameras.uri import CameraUri, parse_source
from replayfleet.edge_client.sources import _opened
from replayfleet.federation import extensions
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.extensions import METHODS_GROUP, STORING_METHODS, Extended
from replayfleet.federation.methods import ALL_METHODS, METHODS
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.service.fleet.presets import stores_data
from replayfleet.federation.service.fleet.spec import build_method, make_spec
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.service.fleet.variants import resolved
from replayfleet.federation.simulator.checkpoints import Checkpoints
from replayfleet.federation.simulator.job import identity_of, simulation_of, wanted_stream
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.settings import method_from
from replayfleet.federation.streams.datasets import ALL_DATASETS, load_dataset, task_for
from replayfleet.models.build import build_task_model, class_rows, initialise
from replayfleet.models.specs import TaskSpec
from replayfleet.runs import _written

GROUP = "replayfleet.tests"
Install = Callable[..., None]

METHOD = """
import dataclasses
from typing import ClassVar
from replayfleet.federation.methods.fedavg import FedAvg

@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Yard(FedAvg):
    name: ClassVar[str] = "yard"
    stores_data: ClassVar[bool] = {stores}
"""

DATASET = """
import numpy as np
from replayfleet.federation.streams.datasets import DatasetKind
from replayfleet.federation.streams.labelled_images import LabelledImages
from replayfleet.models.specs import TaskSpec
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Lay out an installed package with entry points, as pip does."""
    before = set(sys.modules)

    def add(package: str, code: str = "", version: str = "1.0", **groups: dict[str, str]) -> None:
        root = tmp_path / package
        information = root / f"{package}-{version}.dist-info"
        information.mkdir(parents=True)
        (root / f"{package}.py").write_text(code)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        lines = []
        for group, entries in groups.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (information / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(root)
        extensions.added.cache_clear()
        extensions._warn.cache_clear()

    yield add
    extensions.added.cache_clear()
    for name in set(sys.modules) - before:
        if (tmp_path / name).is_dir():
            del sys.modules[name]


def of_tests(**built_in: int) -> Extended[int]:
    return Extended(
        GROUP, "number", built_in, lambda _, found: "" if isinstance(found, int) else f"{found!r} is no int"
    )


def test_a_name_is_known_without_its_package_and_imported_when_it_is_used(install: Install) -> None:
    install("yard", "three = 3", **{GROUP: {"three": "yard:three"}})
    numbers = of_tests(one=1)
    assert list(numbers) == ["one", "three"]
    assert len(numbers) == 2
    assert "three" in numbers
    assert "yard" not in sys.modules
    assert numbers["three"] == 3
    assert numbers.named("one") == 1


def test_an_unknown_name_is_told_the_nearest_of_ours_and_theirs(install: Install) -> None:
    install("yard", "three = 3", **{GROUP: {"three": "yard:three"}})
    with pytest.raises(SettingsError, match=r"unknown number 'thre'; did you mean 'three'\?"):
        of_tests(one=1).named("thre")
    with pytest.raises(SettingsError, match="did you mean 'variant'"):
        of_tests(one=1).named("varian", ["variant"])


def test_ours_is_never_replaced_and_the_package_that_tries_is_told_of(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("yard", "raise SystemExit", **{GROUP: {"one": "yard:one"}})
    numbers = of_tests(one=1)
    with caplog.at_level(logging.WARNING):
        assert list(numbers) == ["one"]
        assert list(numbers) == ["one"]
    assert [record.getMessage() for record in caplog.records] == [
        "number 'one' of yard 1.0 is left out: replayfleet has one of this name"
    ]
    assert numbers["one"] == 1
    assert len(numbers) == 1


def test_a_method_named_like_a_variant_of_ours_is_an_error_for_who_asks_for_it(install: Install) -> None:
    install("yard", METHOD.format(stores=False), **{METHODS_GROUP: {"pfedgrp-as3": "yard:Yard"}})
    with pytest.raises(SettingsError, match=r"'pfedgrp-as3' is a variant of pfedgrp and a method of yard 1\.0"):
        resolved("pfedgrp-as3", "tiny")
    assert resolved("pfedgrp-as1", "tiny") == ("pfedgrp", {"filter_replay": "False"})


def test_a_name_that_two_packages_add_is_nobody_s(install: Install) -> None:
    install("yard", "three = 3", **{GROUP: {"three": "yard:three", "four": "yard:three"}})
    install("barn", "three = 33", **{GROUP: {"three": "barn:three"}})
    numbers = of_tests()
    with pytest.raises(SettingsError, match=r"'three' is added by barn 1\.0 and yard 1\.0; uninstall all but one"):
        _ = numbers["three"]
    assert numbers["four"] == 3


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import absent_library", r"can't be imported \(ModuleNotFoundError: No module named 'absent_library'\)"),
        ("1 / 0", r"can't be imported \(ZeroDivisionError: division by zero\)"),
        ("", r"can't be imported \(AttributeError: "),
        ("import sys; sys.exit(3)", r"can't be imported \(SystemExit: 3\)"),
        ("three = 'drei'", "can't be used: 'drei' is no int"),
    ],
)
def test_a_broken_package_is_one_error_for_who_uses_it_and_nothing_for_others(
    install: Install, code: str, problem: str
) -> None:
    install("yard", code, **{GROUP: {"three": "yard:three"}})
    install("barn", "four = 4", **{GROUP: {"four": "barn:four"}})
    numbers = of_tests(one=1)
    with pytest.raises(SettingsError, match=f"number 'three' of yard 1.0 {problem}"):
        numbers.named("three")
    assert [numbers["one"], numbers["four"]] == [1, 4]
    assert list(numbers) == ["one", "four", "three"]


def test_a_method_that_keeps_samples_is_known_as_one_without_being_imported(install: Install) -> None:
    groups = {"replayfleet.methods": {"yard": "yard:Yard"}}
    install("yard", METHOD.format(stores=True), **groups, **{STORING_METHODS: {"yard": "yard:Yard"}})
    assert stores_data("yard")
    assert stores_data("der")
    assert not stores_data("fedavg")
    assert "yard" not in sys.modules
    assert ALL_METHODS["yard"].stores_data
    assert "yard" not in METHODS


@pytest.mark.parametrize("stores", [True, False])
def test_a_method_can_t_hide_that_it_keeps_samples(install: Install, stores: bool) -> None:
    listed = {} if stores else {STORING_METHODS: {"yard": "yard:Yard"}}
    install("yard", METHOD.format(stores=stores), **{"replayfleet.methods": {"yard": "yard:Yard"}}, **listed)
    with pytest.raises(SettingsError, match=rf"stores_data is {stores}; the group {STORING_METHODS} has exactly those"):
        _ = ALL_METHODS["yard"]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (METHOD.format(stores=False).replace('"yard"', '"other"'), "the name in Yard is 'other'"),
        ("class Yard:\n    name = 'yard'", "is no dataclass"),
        ("import dataclasses\n@dataclasses.dataclass\nclass Yard:\n    name = 'yard'", "Yard has no initial_states, "),
    ],
)
def test_what_is_no_method_is_refused_before_it_is_built(install: Install, code: str, problem: str) -> None:
    install("yard", code, **{"replayfleet.methods": {"yard": "yard:Yard"}})
    with pytest.raises(SettingsError, match=problem):
        _ = ALL_METHODS["yard"]


def test_a_data_set_brings_its_task_and_a_source_its_settings(install: Install) -> None:
    code = """
import dataclasses
from replayfleet.edge_client.cameras.kinds import CameraKind
from replayfleet.federation.streams.datasets import DatasetKind
from replayfleet.models.specs import TaskSpec

YARD = DatasetKind((28,), lambda folder, size: None, "ask the yard", task=TaskSpec(1, 28, ("gate", "cart")))
SMALL = dataclasses.replace(YARD, image_sizes=(32,))
NONE = dataclasses.replace(YARD, image_sizes=(), task=None)
GATE = CameraKind("yard", "Settings", "Camera", "path")
BARE = CameraKind("yard", "Nothing", "Camera", "path")
PLAIN = CameraKind("builtins", "int", "int", "path")
WATCHED = dataclasses.replace(GATE, supervised=True)

@dataclasses.dataclass(frozen=True)
class Settings:
    path: str
    rate: float = 2.0
"""
    install(
        "yard",
        code,
        **{
            "replayfleet.datasets": {"yard": "yard:YARD", "small": "yard:SMALL", "none": "yard:NONE"},
            "replayfleet.sources": {"gate": "yard:GATE", "watched": "yard:WATCHED", "Gate_2": "yard:GATE"}
            | {"bare": "yard:BARE", "plain": "yard:PLAIN"},
        },
    )
    assert task_for("yard").class_names == ("gate", "cart")
    with pytest.raises(SettingsError, match=r"image_sizes is \(32,\), its task has images of 28 pixels"):
        _ = ALL_DATASETS["small"]
    with pytest.raises(SettingsError, match=r"image_sizes is \(\), expected a tuple of sides in pixels"):
        _ = ALL_DATASETS["none"]
    parsed = parse_source("gate:///left?rate=5")
    assert isinstance(parsed, CameraUri)
    assert parsed.settings.rate == 5.0
    with pytest.raises(
        SettingsError, match=r"source camera-0: gate://, of an installed package, failed .*has no attribute"
    ):
        _opened(parsed)
    with pytest.raises(SettingsError, match=r"source bare://, of an installed package, has no settings \(AttributeErr"):
        parse_source("bare:///left")
    with pytest.raises(SettingsError, match=r"its settings .* are no dataclass"):
        parse_source("plain:///left")
    for scheme, problem in (("watched", "can be supervised"), ("Gate_2", "small letters"), ("gat", "mean 'gate'")):
        with pytest.raises(SettingsError, match=problem):
            parse_source(f"{scheme}:///left")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("", ""),
        ("live = None", "TypeError: its live is None, expected bool"),
        ("class_names = ['a']", "class_names is .* expected tuple"),
        ("class_names = ('a', None)", r"class_names are \('a', None\), expected names that differ"),
        ("class_names = ('a', 'a')", "expected names that differ"),
        ("describe = lambda self: 1 / 0", "ZeroDivisionError"),
        ("describe = lambda self: exit(3)", "SystemExit: 3"),
        ("del describe", "AttributeError"),
        ("name = 'other'", "TypeError: its name is 'other', expected 'camera-0'"),
    ],
)
def test_a_camera_of_a_package_is_held_against_what_a_camera_is_before_anything_starts(
    install: Install, change: str, problem: str
) -> None:
    code = f"""
import dataclasses
from replayfleet.edge_client.cameras.kinds import CameraKind

GATE = CameraKind("yardcam", "Settings", "Camera", "path")

@dataclasses.dataclass(frozen=True)
class Settings:
    path: str

class Camera:
    live, class_names, name = True, (), "camera-0"

    def __init__(self, settings, name):
        pass

    def pictures(self, stop):
        yield from ()

    def describe(self):
        return "a gate"

    {change}
"""
    install("yardcam", code, **{"replayfleet.sources": {"gate": "yardcam:GATE"}})
    parsed = parse_source("gate:///left")
    assert isinstance(parsed, CameraUri)
    with pytest.raises(SettingsError, match=problem) if problem else contextlib.nullcontext():
        _opened(parsed)


@pytest.mark.parametrize(
    ("size", "kind", "labels", "problem"),
    [
        ("2, 28, 28, 1", "uint8", "[0, 1]", ""),
        ("2, 32, 32, 1", "uint8", "[0, 1]", r"train images are \(2, 32, 32, 1\) uint8, not \(N, 28, 28, 1\) uint8"),
        ("2, 28, 28, 3", "uint8", "[0, 1]", r"train images are \(2, 28, 28, 3\) uint8, not"),
        ("2, 28, 28, 1", "float32", "[0, 1]", "float32, not"),
        ("2, 28, 28, 1", "uint8", "[0, 2]", r"read\(folder, 28\) raised ValueError: labels must be 0 to 1, got 0 to 2"),
        ("2, 28, 28, 1", "uint8", "[0]", "raised ValueError: 2 images but 1 labels; the folder was"),
        ("2, 28, 28, 1", "uint8", "[0., 1.]", r"train labels are \(2,\) float64, not \(N,\) int64"),
        ("2, 28, 28, 1", "uint8", "np.array([0, 1], np.uint8)", r"train labels are \(2,\) uint8, not \(N,\) int64"),
        ("0, 28, 28, 1", "uint8", "np.empty(0, int)", "its train part has no samples"),
        ("1 / 0", "uint8", "[0]", "raised ZeroDivisionError: division by zero"),
        ("", "", "", "read gave int, expected a tuple of two LabelledImages, for training and for testing, or None"),
    ],
)
def test_what_a_package_s_data_set_gives_is_held_against_its_task(
    install: Install, tmp_path: Path, size: str, kind: str, labels: str, problem: str
) -> None:
    code = f"""
def read(folder, size):
    if not "{size}":
        return 42
    part = LabelledImages(np.zeros(({size}), "{kind}"), np.array({labels or []}), ("gate", "cart"))
    return part, part

YARD = DatasetKind((28,), read, "ask the yard", task=TaskSpec(1, 28, ("gate", "cart")))
"""
    install("yard", DATASET + code, **{"replayfleet.datasets": {"yard": "yard:YARD"}})
    with pytest.raises(SettingsError, match=problem) if problem else contextlib.nullcontext():
        assert len(load_dataset("yard", data_root=tmp_path).train.labels) == 2


def test_what_a_package_s_download_raises_says_whose_it_is(install: Install, tmp_path: Path) -> None:
    code = """
from replayfleet.federation.streams.datasets import DatasetKind
from replayfleet.models.specs import TaskSpec

def download(folder):
    raise ConnectionError("the yard doesn't answer")

TASK = TaskSpec(1, 28, ("gate", "cart"))
YARD = DatasetKind((28,), lambda folder, size: None, "ask the yard", download=download, task=TASK)
"""
    install("yard", code, **{"replayfleet.datasets": {"yard": "yard:YARD"}})
    told = r"data set yard, of an installed package: download\(folder\) raised ConnectionError: the yard doesn't answer"
    with pytest.raises(SettingsError, match=told):
        load_dataset("yard", data_root=tmp_path, download=True)


def test_a_data_set_of_lists_is_told_that_they_are_no_arrays(install: Install, tmp_path: Path) -> None:
    code = """
PART = LabelledImages([[[[0]]]], np.array([0]), ("gate", "cart"))
YARD = DatasetKind((28,), lambda *_: (PART, PART), "ask the yard", task=TaskSpec(1, 28, ("gate", "cart")))
"""
    install("yard", DATASET + code, **{"replayfleet.datasets": {"yard": "yard:YARD"}})
    with pytest.raises(SettingsError, match=r"data set yard, .* package: train images are a list, expected an array"):
        load_dataset("yard", data_root=tmp_path)


@pytest.mark.parametrize("names", ["('cart', 'gate')", "('gate',)"])
def test_a_test_part_whose_classes_are_others_would_be_judged_by_wrong_labels(
    install: Install, tmp_path: Path, names: str
) -> None:
    code = f"""
def read(folder, size):
    images, labels = np.zeros((1, 28, 28, 1), "uint8"), np.array([0])
    return LabelledImages(images, labels, ["gate", "cart"]), LabelledImages(images, labels, {names})

YARD = DatasetKind((28,), read, "ask the yard", task=TaskSpec(1, 28, ("gate", "cart")))
"""
    install("yard", DATASET + code, **{"replayfleet.datasets": {"yard": "yard:YARD"}})
    with pytest.raises(SettingsError, match=r"its test part has classes .*, expected .* in their order: gate, cart"):
        load_dataset("yard", data_root=tmp_path)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("keep: 'Missing' = 0.5", "an annotation of Yard can't be resolved where methods are read"),
        ("keep: object = max", "JSON can't hold a default of its settings"),
    ],
)
def test_settings_of_a_package_s_method_that_can_t_be_read_are_told(install: Install, field: str, problem: str) -> None:
    code = METHOD.format(stores=False) + f"    {field}\n"
    install("yard", code, **{"replayfleet.methods": {"yard": "yard:Yard"}})
    with pytest.raises(SettingsError, match=problem):
        _ = ALL_METHODS["yard"]


def test_a_list_among_the_settings_of_a_package_s_method_is_set_as_json(install: Install) -> None:
    code = METHOD.format(stores=False) + "    widths: tuple[int, ...] = (1, 2)\n"
    install("yard", code, **{"replayfleet.methods": {"yard": "yard:Yard"}})
    kind, task = ALL_METHODS["yard"], TaskSpec(1, 28, ("gate", "cart"))
    for text in ("[3, 4]", _written((3, 4)), _written([np.int64(3), 4])):
        assert method_from(kind, task, "tiny", {"widths": text}).widths == (3, 4)
    spec = make_spec("fleet", "yard", task, preset="tiny", overrides={"widths": "[3, 4]"}, run_seed=0)
    made: Any = build_method(kind, task, spec.settings)
    assert made.widths == (3, 4)
    for wrong in ("3,4", "[3, 4", '["a"]'):
        with pytest.raises(SettingsError, match=r"expected a list in JSON, as \[1, 2\], each of which is a whole"):
            method_from(kind, task, "tiny", {"widths": wrong})
        with pytest.raises(SettingsError, match="setting 'widths' of method 'yard'"):
            make_spec("fleet", "yard", task, preset="tiny", overrides={"widths": wrong}, run_seed=0)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("    shots: int = 9", "has the setting shots, which a stream has too: --set would never reach it"),
        ("    def __post_init__(self):\n        {}['gone']", "yard: KeyError: 'gone'"),
    ],
)
def test_a_package_s_method_that_can_t_be_set_or_made_is_told(install: Install, more: str, problem: str) -> None:
    install("yard", METHOD.format(stores=False) + more, **{"replayfleet.methods": {"yard": "yard:Yard"}})
    with pytest.raises(SettingsError, match=problem):
        method_from(ALL_METHODS["yard"], TaskSpec(1, 28, ("a", "b")), "tiny", {"shots": "3"})


def test_a_setting_of_another_version_of_a_package_is_told_as_the_package_s(install: Install) -> None:
    install("yard", METHOD.format(stores=False), **{"replayfleet.methods": {"yard": "yard:Yard"}})
    with pytest.raises(SettingsError, match=r"method 'yard' has no setting 'depth', which another version of its pack"):
        build_method(ALL_METHODS["yard"], TaskSpec(1, 28, ("a", "b")), {"depth": 3})


def test_a_run_is_another_one_with_other_code_of_a_package(install: Install, tmp_path: Path) -> None:
    """Numbers of former code would be taken for those of this one, and a run would be resumed half and half."""
    install(
        "yard", METHOD.format(stores=False) + "    beta: float = 0.5", **{"replayfleet.methods": {"yard": "yard:Yard"}}
    )
    asked = RunSpec(
        method="yard",
        scenario="circulating",
        dataset="fashion-mnist",
        preset="tiny",
        out=tmp_path,
        overrides=("beta=0.0",),
    )

    def identity() -> dict[str, Any]:
        data = small_dataset(train_per_class=60, test_per_class=40)
        return identity_of(asked, simulation_of(asked, wanted_stream(asked), data))

    before = identity()
    assert before["settings"]["beta"] == 0.0, "what is left out of our own methods' settings, theirs may have too"
    assert before["packages"]["replayfleet.methods yard"]["package"] == "yard"
    assert identity() == before
    path = tmp_path / "yard" / "yard.py"
    checkpoints = Checkpoints(tmp_path / "state")
    checkpoints.begin(before, resume=False)
    checkpoints.check_same(identity())
    path.write_text(path.read_text() + "\n# other code\n")
    assert identity() != before
    with pytest.raises(SettingsError, match="holds a run of other code: package yard has changed since; its rounds"):
        checkpoints.check_same(identity())
    ours = dataclasses.replace(asked, method="fedavg", overrides=())
    data = small_dataset(train_per_class=60, test_per_class=40)
    assert "packages" not in identity_of(ours, simulation_of(ours, wanted_stream(ours), data))


def test_what_an_editor_leaves_beside_the_files_of_a_package_is_none_of_them(install: Install, tmp_path: Path) -> None:
    install("yard", **{"replayfleet.methods": {"yard": "yards:Yard"}})
    folder = tmp_path / "yard" / "yards"
    folder.mkdir()
    (folder / "__init__.py").write_text("Yard = 1")
    before = extensions.code_of(METHODS_GROUP, "yard", METHODS)
    assert before["package"] == "yard"
    (folder / ".#__init__.py").symlink_to("somebody@somewhere.1234")
    assert extensions.code_of(METHODS_GROUP, "yard", METHODS) == before
    (folder / "more.py").write_text("")
    assert extensions.code_of(METHODS_GROUP, "yard", METHODS) != before


MODEL = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8))

    def forward(self, values):
        return values * self.scale

    def draw(self, rng):
        self.scale.uniform_(0.5, 1.5, generator=rng)

class Net(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.conv = nn.Conv2d(task.image_channels, 8, 5, stride=4)
        self.scale = Scale()
        self.head = nn.Linear(8, task.num_classes)

    def features(self, images):
        return self.scale(torch.relu(self.conv(images)).mean(dim=(2, 3)))

    def forward(self, images):
        return self.head(self.features(images))
"""


def yard_task(name: str = "yard") -> TaskSpec:
    return TaskSpec(1, 28, ("gate", "cart", "crate"), architecture=name)


def test_a_task_model_of_a_package_is_exported_and_drawn_like_ours(install: Install) -> None:
    install("yardnet", MODEL, **{"replayfleet.models": {"yard": "yardnet:Net"}})
    task = yard_task()
    assert "yardnet" not in sys.modules  # a device that only serves needs no torch for it
    first, second = (initialise(build_task_model(task), torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.scale.scale.min() >= 0.5
    assert class_rows(task) == {"head.weight", "head.bias"}
    method = FedAvg(task=task)
    probe = OnnxExporter(method, task).probe(first.state_dict())  # ONNX Runtime answers as it does
    assert probe.batch_size


def test_buffers_of_a_layer_of_a_package_are_what_the_layer_sets(install: Install) -> None:
    code = MODEL.replace("def draw(self, rng):", "def draw(self, rng):\n        self.mean.fill_(2.0)").replace(
        "self.scale = nn.Parameter(torch.empty(8))",
        "self.scale = nn.Parameter(torch.empty(8)); self.register_buffer('mean', torch.zeros(1))",
    )
    only = code.replace("self.scale = nn.Parameter(torch.empty(8))", "self.register_buffer('scale', torch.zeros(8))")
    for name, one in (("yardnet", code), ("barnnet", only)):
        install(name, one, **{"replayfleet.models": {name: f"{name}:Net"}})
        assert initialise(build_task_model(yard_task(name)), torch.Generator()).scale.mean.item() == 2.0


def test_a_task_model_of_a_package_is_looked_at_once(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("yardnet", MODEL, **{"replayfleet.models": {"yard": "yardnet:Net"}})
    names = build_task_model(yard_task()).state_dict().keys()
    monkeypatch.setattr(sys.modules["yardnet"].Net, "features", None)
    assert build_task_model(yard_task()).state_dict().keys() == names


def test_a_fleet_s_task_names_it_and_who_lacks_the_package_is_told(install: Install) -> None:
    install("yardnet", MODEL, **{"replayfleet.models": {"yard": "yardnet:Net"}})
    spec = make_spec("fleet", "fedavg", yard_task(), preset="tiny", overrides={}, run_seed=3)
    assert task_of(spec) == yard_task()
    with pytest.raises(ValueError, match=r"architecture is 'yart', no task model .*; did you mean 'yard'\?"):
        yard_task("yart")
    extensions.added.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(extensions, "added", lambda group: {})
        with pytest.raises(SettingsError, match="architecture is 'yard', no task model of ours or of an installed"):
            task_of(spec)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("Net = 3", "can't be used: 3 makes no module"),
        ("def Net(task): return 1 / 0", r"can't be built \(ZeroDivisionError"),
        (MODEL.replace("self.head(self.features(images))", "self.features(images)"), r"expected \(2, 3\) twice"),
        (MODEL.replace("task.num_classes", "2"), r"of \(2, 2\), \(2, 2\), \(2, 8\); expected \(2, 3\) twice"),
        (MODEL.replace("def features", "def feature"), "has no features; expected a module whose forward"),
        (MODEL.replace("self.head", "self.last"), "has no head; expected a module whose forward"),
        (MODEL.replace("self.head(self.features(images))", "2 * self.head(self.features(images))"), "by up to 1; exp"),
        (MODEL.replace("uniform_(0.5", "uniform(0.5"), r"gives no answers \(AttributeError"),
        (
            MODEL.replace(
                "self.scale = Scale()",
                "self.scale = Scale(); self.register_buffer('seen', torch.zeros(1), persistent=False)",
            ),
            "has buffers that its state_dict leaves out: seen",
        ),
        (
            MODEL.replace("def draw", "def drew"),
            "parameters or buffers that nothing draws: Scale; give them a method draw",
        ),
        (
            MODEL.replace("self.scale = Scale()", "self.scale = Scale(); self.register_buffer('mean', torch.ones(1))"),
            "nothing draws: Net",
        ),
    ],
)
def test_what_is_no_task_model_is_refused_when_it_is_built(install: Install, code: str, problem: str) -> None:
    install("yardnet", code, **{"replayfleet.models": {"yard": "yardnet:Net"}})
    task = yard_task()
    with pytest.raises(SettingsError, match=f"task model 'yard' of yardnet 1.0 .*{problem}|{problem}"):
        build_task_model(task)

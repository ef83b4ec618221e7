"""What a simulation or a fleet left on disk, opened through the public interface."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.image_sets import write_fashion_mnist

import replayfleet
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.edge_client.state_store import Choice, HeldDownload, StateStore, TrainingCommit, spec_digest
from replayfleet.export.cli import main
from replayfleet.export.parameters import Model
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.artefact_codec import decode_own, encode_artefacts, encode_parameters
from replayfleet.federation.service.data_dir import claim_data_dir
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.service.fleet.spec import make_spec
from replayfleet.federation.simulator.checkpoints import Checkpoints
from replayfleet.federation.simulator.serving import ServedModels
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec, Manifest, Probe, Serving
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.build import build_generator, build_task_model, initialise
from replayfleet.runs import Run, open_run, stored_model

TASK = TASKS["fashion-mnist"]
SMALL = {"samples_per_class": 3, "test_samples_per_class": 1, "local_epochs": 1, "sub_generator_epochs": 1}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    write_fashion_mnist(folder / "data", train_per_class=6, test_per_class=4)
    return replayfleet.simulate(
        np.str_("pfedgrp"),
        out=folder / "out",
        settings=np.str_("tiny"),
        set=SMALL,
        clients=np.int64(2),
        rounds=2,
        data_root=folder / "data",
    )


def fleet() -> FleetSpec:
    return make_spec("fleet", "pfedgrp", TASK, preset="tiny", overrides={}, run_seed=0)


def download(folder: Path, client: str, seed: int) -> Manifest:
    """A download as the aggregator publishes it, its blobs in the data dir."""
    blobs, generator = DiskBlobStore(folder / "blobs"), torch.Generator().manual_seed(seed)
    sets = {
        "average": build_task_model(TASK),
        "personalised": build_task_model(TASK),
        "sub-generator/3": build_generator(TASK),
    }
    data = {name: encode_parameters(initialise(module, generator).state_dict()) for name, module in sets.items()}
    entries = tuple(BlobEntry(name, blobs.put(found), len(found)) for name, found in data.items())
    serving = Serving("graph/task", "personalised", Probe(0, 1, (0.0,), 1e-4))
    return Manifest("down", "fleet", client, 1, 0, entries, b"\x80", serving)


@pytest.fixture
def data_dirs(tmp_path: Path) -> Path:
    """A folder as the packaged units fill it: an aggregator's data dir and a client's."""
    claim_data_dir(tmp_path / "aggregator", fleet="fleet", role="aggregator").close()
    store = AggregatorStore(tmp_path / "aggregator")
    store.found(fleet(), 0.0)
    for seed, client in enumerate(("cam-1", "cam-2")):
        store.put_download(download(tmp_path / "aggregator", client, seed))
    store.close()
    claim_data_dir(tmp_path / "client", fleet="fleet", role="client", owner="cam-2").close()
    StateStore(tmp_path / "client").hold(HeldDownload(download(tmp_path / "client", "cam-2", 1), fleet()))
    return tmp_path


def same(one: Model, other: Model) -> bool:
    pairs = [(one.parameters[name], other.parameters[name]) for name in one.parameters.keys() | other.parameters.keys()]
    return all(np.array_equal(first, second) for first, second in pairs)


def test_a_simulation_returns_what_it_measured_and_the_models_that_were_measured(simulated: Run) -> None:
    assert (simulated.kind, simulated.method, simulated.num_rounds) == ("simulation", "pfedgrp", 2)
    assert simulated.clients == ("client-0", "client-1")
    assert simulated.task == TASK
    assert len(simulated.results.rounds) == 2
    first, second = simulated.task_model(0), simulated.task_model("client-1")
    assert not same(first, second), "each client has a model of its own"
    network = replayfleet.as_network(first)
    assert network(torch.zeros(3, *TASK.image_shape)).shape == (3, 10)
    drawn = simulated.sub_generators(0)
    assert drawn
    assert drawn.keys() <= set(TASK.class_names)
    generator = replayfleet.as_network(next(iter(drawn.values())))
    assert generator(torch.zeros(2, 100)).shape == (2, *TASK.image_shape)


def test_what_a_program_set_in_pytorch_neither_counts_nor_changes(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "data", train_per_class=6, test_per_class=4)
    mkldnn: Any = torch.backends.mkldnn  # its stubs lack ``conv``

    def learned(out: str) -> Model:
        few: dict[str, Any] = {"set": {"samples_per_class": 3, "test_samples_per_class": 1}, "clients": 1, "rounds": 1}
        data_root = tmp_path / "data"
        run = replayfleet.simulate("fedavg", out=tmp_path / out, settings="tiny", data_root=data_root, **few)
        return run.task_model()

    def now() -> tuple[Any, ...]:
        flushes = not (torch.full((1,), 1e-40, dtype=torch.float32, device="cpu") * 1).any()
        matmul, conv = torch.get_float32_matmul_precision(), mkldnn.conv.fp32_precision
        return torch.get_num_threads(), torch.get_default_dtype(), matmul, conv, flushes

    def choose(threads: int, dtype: torch.dtype, matmul: str, conv: str, flushes: bool) -> None:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(matmul)
        mkldnn.conv.fp32_precision = conv
        torch.set_flush_denormal(flushes)

    expected, ours, theirs = learned("ours"), now(), (2, torch.float64, "medium", "bf16", False)
    try:
        choose(*theirs)
        with torch.device("meta"), torch.autocast("cpu"):
            model = learned("theirs")
            network = replayfleet.as_network(model)
            replayfleet.export_model(model, tmp_path)
        assert now() == theirs
    finally:
        choose(*ours)
    assert same(model, expected)
    assert {(str(one.device), one.dtype) for one in network.parameters()} == {("cpu", torch.float32)}
    assert (tmp_path / "task.onnx").is_file()


def test_opening_a_run_changes_nothing_in_its_folder(simulated: Run, data_dirs: Path) -> None:
    def content(folder: Path) -> dict[str, str]:
        files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    for folder in (simulated.path, data_dirs):
        before = content(folder)
        open_run(folder).task_model(1 if folder == simulated.path else "cam-1")
        assert content(folder) == before


def test_a_data_dir_holds_the_models_that_are_served(data_dirs: Path) -> None:
    run = open_run(data_dirs)
    assert (run.kind, run.clients, run.task, run.results) == ("aggregator", ("cam-1", "cam-2"), TASK, None)
    own = open_run(data_dirs / "client")
    assert (own.kind, own.clients) == ("client", ("cam-2",))
    assert same(own.task_model(), run.task_model("cam-2"))
    assert not same(own.task_model(), run.task_model("cam-1"))
    assert list(own.sub_generators()) == [TASK.class_names[3]]
    assert stored_model(data_dirs, "cam-1", "sub-generator", "3").kind == "sub-generator"


def test_sub_generators_that_never_leave_their_client_are_read_where_it_keeps_them(
    simulated: Run, data_dirs: Path, tmp_path: Path
) -> None:
    """They were taken from its download alone, so a client of FedAVG-replay seemed to have none."""
    few: dict[str, Any] = {"set": SMALL, "clients": 1, "rounds": 1, "data_root": simulated.path.parent / "data"}
    run = replayfleet.simulate("fedavg-replay", out=tmp_path / "out", settings="tiny", **few)
    assert run.sub_generators().keys() == {
        TASK.class_names[met] for met in run.results.rounds[0].clients["client-0"].classes
    }

    generator = initialise(build_generator(TASK), torch.Generator().manual_seed(9)).state_dict()
    data = encode_parameters(generator)
    entry = BlobEntry("sub-generator/5", DiskBlobStore(data_dirs / "client" / "blobs").put(data), len(data))
    StateStore(data_dirs / "client").commit_training(
        TrainingCommit(0, 1, spec_digest(fleet()), (entry,), b"", (), b"", 1.0, 4, 1), fleet()
    )
    device = open_run(data_dirs / "client")
    drawn = device.sub_generators()
    assert drawn.keys() == {TASK.class_names[3], TASK.class_names[5]}
    wanted = Model("sub-generator", TASK, {name: tensor.numpy() for name, tensor in generator.items()})
    assert same(drawn[TASK.class_names[5]], wanted)


def test_where_a_device_chose_what_it_serves_its_model_is_what_it_chose(simulated: Run, data_dirs: Path) -> None:
    """It was what the device downloaded, which neither answers its camera nor was measured."""
    chosen = initialise(build_task_model(TASK), torch.Generator().manual_seed(9)).state_dict()
    wanted = Model("task", TASK, {name: tensor.numpy() for name, tensor in chosen.items()})

    store, data = StateStore(data_dirs / "client"), encode_parameters(chosen)
    entry = BlobEntry("chosen", DiskBlobStore(data_dirs / "client" / "blobs").put(data), len(data))
    choice = Choice("own", {"own": 0.9}, 0.1, 0.01, lost=False, parameters=entry, probe=Probe(0, 1, (0.0,), 1e-4))
    held = store.held()
    assert held is not None
    store.hold(msgspec.structs.replace(held, choice=choice))
    assert same(open_run(data_dirs / "client").task_model(), wanted)

    folder = shutil.copytree(simulated.path, data_dirs / "run")
    checkpoints = Checkpoints(folder / "state")
    last = checkpoints.load()[-1]
    state = decode_own(last.clients["client-1"].blobs, last.clients["client-1"].facts, checkpoints)
    stored = encode_artefacts(ServedModels({"client-1": chosen}).packed("client-1", state), checkpoints)
    checkpoints.save(msgspec.structs.replace(last, clients={**last.clients, "client-1": stored}))
    assert same(open_run(folder).task_model(1), wanted)
    assert same(open_run(folder).task_model(0), simulated.task_model(0))


@pytest.mark.parametrize(
    ("client", "kind", "class_", "complaint"),
    [
        ("cam-3", "task", None, "has no client 'cam-3'; did you mean 'cam-"),
        (None, "task", None, "has several clients, name one of cam-1, cam-2"),
        ("cam-1", "sub-generator", "shirt", "--class: shirt; .* has sub-generators of dress for this client"),
        ("cam-1", "sub-generator", "99", "--class: 99; "),
    ],
)
def test_what_is_not_there_is_said_with_what_is(
    data_dirs: Path, client: str | None, kind: str, class_: str | None, complaint: str
) -> None:
    with pytest.raises(replayfleet.SettingsError, match=complaint):
        stored_model(data_dirs, client, kind, class_)


def test_a_class_whose_name_is_a_number_is_named_before_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {f"sub-generator/{index}": {"drawn": np.full(1, index)} for index in range(3)}
    task = replayfleet.TaskSpec(1, 28, ("1", "2", "eight"))
    run = Run(Path("run"), "simulation", "pfedgrp", {}, task, ("client-0",), 1, None, lambda _: sets)
    monkeypatch.setattr("replayfleet.runs.open_run", lambda _: run)
    drawn = [stored_model(Path("run"), None, "sub-generator", asked).parameters["drawn"] for asked in ("1", "2", "0")]
    assert drawn == [0, 1, 0]


def test_a_folder_without_a_run_and_a_damaged_one_are_refused(data_dirs: Path, tmp_path: Path) -> None:
    with pytest.raises(replayfleet.SettingsError, match="holds no run; expected --out of fleet-sim"):
        open_run(data_dirs / "aggregator" / "blobs")
    with pytest.raises(replayfleet.SettingsError, match=r"fleet\.json is a file, expected the folder of a run"):
        open_run(data_dirs / "aggregator" / "fleet.json")
    for blob in (data_dirs / "aggregator" / "blobs").glob("??/*"):
        blob.write_bytes(b"damaged")
    with pytest.raises(replayfleet.ReplayfleetError, match="is damaged"):
        open_run(data_dirs).task_model("cam-1")
    (data_dirs / "aggregator" / "fleet.json").write_text("{")
    with pytest.raises(replayfleet.SettingsError, match=r"fleet\.json can't be read"):
        open_run(data_dirs)


@pytest.mark.parametrize(
    "text",
    ["[1]", "null", "{}", '{"task": 3}', '{"task": {"image_size": 28}}', "[" * 100_000],
    ids=lambda text: text[:12],
)
def test_a_simulation_that_says_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "run.json").write_text(text)
    with pytest.raises(replayfleet.SettingsError, match=r"is damaged, or of another version|run\.json can't be read"):
        open_run(tmp_path)


@pytest.mark.parametrize("file", ["result.json", "state/run.json", "state/round-0000.json", "state/round-0001.json"])
@pytest.mark.parametrize("gone", [False, True], ids=["half", "gone"])
def test_of_a_half_copied_simulation_the_file_is_named(file: str, gone: bool, simulated: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(simulated.path, tmp_path / "copy")
    data = (copy / file).read_bytes()
    (copy / file).unlink()
    if gone and file == "result.json":
        assert open_run(copy).results is None, "as of a run that isn't finished"
        return
    if not gone:
        (copy / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(replayfleet.SettingsError, match=re.escape(f"{copy / file} ")):
        open_run(copy)


def test_a_result_that_is_nested_without_end_is_refused(simulated: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(simulated.path, tmp_path / "copy")
    (copy / "result.json").write_text('{"run": {"method": ' + "[" * 100_000)
    with pytest.raises(replayfleet.SettingsError, match=re.escape(f"{copy / 'result.json'} is damaged")):
        open_run(copy)


def test_of_results_without_the_state_beside_them_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").touch()
    with pytest.raises(SettingsError, match=re.escape(f"{tmp_path / 'state' / 'run.json'} is missing")):
        open_run(tmp_path)


@pytest.mark.parametrize("role", ["aggregator", "client"])
def test_a_data_dir_without_what_says_whose_it_is_names_that_file(role: str, data_dirs: Path) -> None:
    (data_dirs / role / "fleet.json").unlink()
    with pytest.raises(replayfleet.SettingsError, match=rf"/{role}/fleet\.json is missing, and says what run this is"):
        open_run(data_dirs / role)


@pytest.mark.parametrize("database", [b"", b"no database" * 1000])
def test_an_aggregator_without_its_tables_is_refused(database: bytes, data_dirs: Path) -> None:
    for path in (data_dirs / "aggregator").glob("aggregator.sqlite*"):
        path.unlink()
    (data_dirs / "aggregator" / "aggregator.sqlite").write_bytes(database)
    with pytest.raises(replayfleet.SettingsError, match="is damaged; restore a backup"):
        open_run(data_dirs)


@pytest.mark.parametrize("role", ["aggregator", "client"])
def test_a_data_dir_of_another_format_is_refused(role: str, data_dirs: Path) -> None:
    marker = data_dirs / role / "fleet.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 99}))
    with pytest.raises(replayfleet.SettingsError, match=r"fleet\.json: format 99, this program reads 1"):
        open_run(data_dirs / role)


def test_a_damaged_record_of_a_client_stays_for_the_client_to_find(data_dirs: Path) -> None:
    record = data_dirs / "client" / "state" / "held"
    record.write_bytes(b"damaged")
    with pytest.raises(replayfleet.SettingsError, match=r"client/state/held is damaged \(digest doesn't match\)"):
        open_run(data_dirs / "client")
    assert record.read_bytes() == b"damaged"
    record.unlink()
    record.parent.rmdir()
    with pytest.raises(replayfleet.SettingsError, match="this client has no model yet"):
        open_run(data_dirs / "client")
    assert not record.parent.exists()


def test_model_export_takes_classes_and_shape_from_the_run(simulated: Run, tmp_path: Path) -> None:
    words = ["task", "--from", str(simulated.path), "--client", "0", "--threads", "1", "--split"]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "a")], obj=stored_model)
    assert done.exit_code == 0, done.output
    written = tmp_path / "a" / "task.safetensors"
    again = ["task", "--parameters", str(written), "--threads", "1", "--out", str(tmp_path / "b")]
    done = CliRunner().invoke(main, again)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "b" / "task.onnx").is_file()
    checked = CliRunner().invoke(main, ["check", str(tmp_path / "b" / "task.onnx")])
    assert "ankle-boot" in checked.output
    other = Model("task", TASKS["mnist"], simulated.task_model(0).parameters).save(tmp_path / "other.safetensors")
    refused = CliRunner().invoke(main, ["check", str(tmp_path / "a" / "task.onnx"), "--parameters", str(other)])
    assert refused.exit_code == 2
    assert 'classes is \'["t-shirt"' in refused.stderr


def test_a_run_stays_open_where_the_program_goes_elsewhere(
    simulated: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(simulated.path.parent)
    run = open_run(simulated.path.name)
    monkeypatch.chdir(tmp_path)
    assert same(run.task_model(0), simulated.task_model(0))


def test_a_run_goes_to_another_process(simulated: Run) -> None:
    there = ForkingPickler.loads(ForkingPickler.dumps(simulated))
    assert (there.path, there.clients, there.results) == (simulated.path, simulated.clients, simulated.results)
    assert same(there.task_model(0), simulated.task_model(0))


def test_an_export_that_can_t_be_is_told_by_the_names_of_arguments(simulated: Run, tmp_path: Path) -> None:
    model = simulated.task_model(0)
    with pytest.raises(SettingsError, match=r"^format: unknown format 'onyx'; did you mean 'onnx'\?"):
        replayfleet.export_model(model, tmp_path, format="onyx")
    (tmp_path / "notes").touch()
    with pytest.raises(SettingsError, match=r"^out: .*notes is a file, expected a folder"):
        replayfleet.export_model(model, tmp_path / "notes" / "deeper")


def test_a_run_that_has_gone_on_since_it_was_opened_is_to_be_opened_again(simulated: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(simulated.path, tmp_path / "copy")
    (copy / "result.json").unlink()
    newest = (copy / "state" / "round-0001.json").rename(tmp_path / "newest")
    run = open_run(copy)
    newest.rename(copy / "state" / "round-0001.json")  # the first round's tensors are gone by now
    with pytest.raises(replayfleet.SettingsError, match="has gone on since it was opened"):
        run.task_model("client-0")
    assert open_run(copy).task_model("client-0").parameters


def test_a_run_without_a_complete_round_says_so(simulated: Run, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    shutil.copy(simulated.path / "state" / "run.json", tmp_path / "state")
    with pytest.raises(replayfleet.SettingsError, match="holds no client's model yet"):
        open_run(tmp_path).task_model()


def test_importing_the_package_and_naming_its_parts_loads_nothing_heavy() -> None:
    code = (
        "import sys, replayfleet\n"
        "assert 'simulate' in dir(replayfleet), dir(replayfleet)\n"
        "print(replayfleet.__version__, [name for name in ('torch', 'numpy', 'onnx', 'click') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0.1.0 []\n"


def test_a_path_from_a_folder_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(replayfleet.SettingsError, match="out: runs: the current folder is gone; go to another one"):
        replayfleet.simulate("fedavg", out="runs")


@pytest.mark.parametrize("name", replayfleet.__all__)
def test_every_public_name_is_there_and_explained(name: str) -> None:
    found = getattr(replayfleet, name)
    assert found.__doc__
    assert name in (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = replayfleet.simulat


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"out": ""}, "out: expected a path, not an empty text"),
        ({"out": None}, "out: "),
        ({"data_root": 3}, "data_root: "),
        ({"initial": "nowhere"}, "nowhere: can't be read"),
        ({"compare": "nowhere"}, "^compare nowhere: can't be read"),
        ({"compare": ["nowhere"]}, "^compare nowhere: can't be read"),
        ({"roudns": 1}, "simulate has no argument 'roudns'; did you mean 'rounds'"),
        ({"set": [1]}, "set is a list, expected settings by name"),
        ({"settings": 1}, "^settings is 1, expected a preset's name"),
        ({"on_round": 3}, "^on_round is 3, expected what is called"),
        ({"preset": "tiny"}, "simulate has no argument 'preset'"),
        ({"dataset": "folder", "data_root": None}, "name a folder with data_root or"),
        ({"overrides": ()}, "simulate has no argument 'overrides'"),
        ({"compare": 5}, "compare is a int, expected paths of other runs"),
        ({"set": {"learning_rate": None}}, "^set learning_rate=null: expected"),
    ],
)
def test_what_can_t_be_simulated_is_said_and_nothing_is_written(
    given: dict[str, Any], problem: str, simulated: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"out": "out", "settings": "tiny", "clients": 2, "set": SMALL, "rounds": 1}
    more["data_root"] = simulated.path.parent / "data"
    with pytest.raises(SettingsError, match=problem):
        replayfleet.simulate("pfedgrp", **{**more, **given})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SettingsError, match="path: expected a path"):
        replayfleet.open_run("")


def test_where_a_model_can_t_be_saved_is_said(simulated: Run, tmp_path: Path) -> None:
    model = simulated.task_model(0)
    for place in (tmp_path, tmp_path / "nowhere" / "m.safetensors"):
        with pytest.raises(SettingsError, match="can't be written"):
            model.save(place)
    with pytest.raises(SettingsError, match="threads is 0"):
        replayfleet.export_model(model, tmp_path / "e", threads=0)


def test_a_run_begins_with_what_another_one_learned(simulated: Run, tmp_path: Path) -> None:
    given = simulated.task_model(0)
    path, data = given.save(tmp_path / "m.safetensors"), simulated.path.parent / "data"
    more = {"settings": "tiny", "set": SMALL, "clients": 2, "data_root": data}
    run = replayfleet.simulate("pfedgrp", out=tmp_path / "out", rounds=1, initial=path, **more)
    assert Checkpoints(tmp_path / "out" / "state").first_model() is not None, "it outlives the blobs of rounds"
    random = replayfleet.simulate("pfedgrp", out=tmp_path / "random", rounds=1, **more)
    assert not same(run.task_model(0), random.task_model(0))
    state = tmp_path / "out" / "state"  # as one that was killed just after its beginning left it
    for written in [*state.glob("blobs/*"), *state.glob("round-*.json"), tmp_path / "out" / "result.json"]:
        written.unlink()
    again = replayfleet.simulate("pfedgrp", out=tmp_path / "out", rounds=1, initial=path, resume=True, **more)
    assert same(again.task_model(0), run.task_model(0))
    path.unlink()
    assert same(replayfleet.open_run(tmp_path / "out").task_model(0), run.task_model(0))

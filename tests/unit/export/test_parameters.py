"""Parameter files say what they hold, and are believed only as far as it fits together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save

from replayfleet.export.cli import main
from replayfleet.export.parameters import Model, read_parameter_file, read_parameters
from replayfleet.export.running.artefact import Array
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.protocol.tensors import decode_arrays, digest, encode_arrays
from replayfleet.models.specs import DetectionSpec, TaskSpec

SHOES = TaskSpec(1, 28, ("shirt", "shoe"), generator_width=8)
STREET = DetectionSpec(3, 32, 64, ("car",), ((0.1, 0.2),))
PARAMETERS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
MODELS = [
    Model("task", SHOES, PARAMETERS),
    Model("sub-generator", SHOES, PARAMETERS),
    Model("detector", STREET, PARAMETERS),
]


def header(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    return dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"])


def rewritten(path: Path, **changes: str | None) -> Path:
    """The file again with some of its metadata changed, or taken out."""
    about = header(path) | {f"replayfleet.{key}": value for key, value in changes.items()}
    path.write_bytes(save(PARAMETERS, {key: value for key, value in about.items() if value is not None}))
    return path


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.kind)
def test_a_saved_model_is_read_again(model: Model, tmp_path: Path) -> None:
    found = read_parameter_file(model.save(tmp_path / "m.safetensors")).model
    assert found == model
    assert found != Model(model.kind, model.spec, {"w": -PARAMETERS["w"]})
    assert [one for one in MODELS if one == found] == [model]
    np.testing.assert_array_equal(found.parameters["w"], PARAMETERS["w"])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.kind)
def test_equal_models_are_equal_files(model: Model) -> None:
    """The header's texts stood in another order each time, and each export of a model had a digest of its own."""
    assert len({model.encode() for _ in range(5)}) == 1
    assert int.from_bytes(model.encode()[:8], "little") % 8 == 0


@pytest.mark.parametrize(
    "tensor",
    [PARAMETERS["w"].T, PARAMETERS["w"][::-1], PARAMETERS["w"][:, ::2], np.float32(3) / 2],
    ids=["transposed", "reversed", "every other", "a number"],
)
def test_what_numpy_reckoned_is_saved_as_what_it_is(tensor: Array, tmp_path: Path) -> None:
    path = Model("task", SHOES, {"w": tensor}).save(tmp_path / "m.safetensors")
    found = read_parameters(path)["w"]
    assert found.shape == tensor.shape
    np.testing.assert_array_equal(found, tensor)


def test_only_a_saved_model_is_replaced_unasked(tmp_path: Path) -> None:
    path = MODELS[0].save(tmp_path / "m.safetensors")
    MODELS[1].save(path)
    assert header(path)["replayfleet.kind"] == "sub-generator"
    for content in (b"a letter", save(PARAMETERS)):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match="is no saved model; choose another path, or overwrite=True"):
            MODELS[0].save(path)
        assert path.read_bytes() == content
    MODELS[0].save(path, overwrite=True)
    assert header(path)["replayfleet.kind"] == "task"


def test_the_header_names_architecture_classes_preprocessing_version_and_the_spec_s_digest(tmp_path: Path) -> None:
    about = header(MODELS[0].save(tmp_path / "m.safetensors"))
    assert json.loads(about["replayfleet.classes"]) == ["shirt", "shoe"]
    assert about["replayfleet.kind"] == "task"
    assert about["replayfleet.stem"] == "cifar"
    assert "pixel / 127.5 - 1" in about["replayfleet.preprocessing"]
    assert about["replayfleet.version"] == "0.1.0"
    assert about["replayfleet.spec_sha256"] == hashlib.sha256(about["replayfleet.spec"].encode()).hexdigest()


def test_a_file_of_others_holds_tensors_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(save(PARAMETERS, {"format": "pt"}))
    assert read_parameter_file(path).model is None
    np.testing.assert_array_equal(read_parameters(path)["w"], PARAMETERS["w"])


def test_blobs_of_a_fleet_have_no_header_so_that_equal_parameters_have_one_digest(tmp_path: Path) -> None:
    saved = [model.save(tmp_path / f"{model.kind}.safetensors") for model in MODELS]
    assert len({digest(path.read_bytes()) for path in saved}) == len(MODELS)
    assert len({digest(encode_arrays(read_parameters(path))) for path in saved}) == 1
    np.testing.assert_array_equal(decode_arrays(encode_arrays(PARAMETERS))["w"], PARAMETERS["w"])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spec": '{"image_size": 28}'}, "the digest of its spec is another"),
        ({"classes": '["shoe", "shirt"]'}, r"classes is '\[\"shoe\", \"shirt\"\]', its spec says"),
        ({"preprocessing": "none"}, "preprocessing is 'none'"),
        ({"preprocessing": None}, "preprocessing is 'absent'"),
        ({"kind": "virus"}, "kind is 'virus'"),
        ({"kind": "detector"}, "missing required field"),
        ({"spec": None}, "'spec'"),
        ({"spec": "x" * 600_000}, "its spec has 600000 characters, at most 524288 are read"),
        ({"more": "x" * 1_100_000}, "at most 1048576 are read"),
    ],
)
def test_a_header_that_contradicts_itself_or_has_no_end_is_refused(
    changes: dict[str, str | None], complaint: str, tmp_path: Path
) -> None:
    path = rewritten(MODELS[0].save(tmp_path / "m.safetensors"), **changes)
    with pytest.raises(SettingsError, match=complaint):
        read_parameter_file(path)


def test_a_spec_with_impossible_values_is_refused(tmp_path: Path) -> None:
    spec = json.dumps({"image_channels": 2, "image_size": 28, "class_names": ["a", "b"]})
    path = MODELS[0].save(tmp_path / "m.safetensors")
    rewritten(path, spec=spec, spec_sha256=hashlib.sha256(spec.encode()).hexdigest())
    with pytest.raises(SettingsError, match="image_channels is 2"):
        read_parameter_file(path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--classes", "shoe,shirt"], "--classes: ('shoe', 'shirt') is asked for, {path} says ('shirt', 'shoe')"),
        (["--image-size", "32"], "--image-size: 32 is asked for, {path} says 28"),
        (["--stem", "imagenet"], "--stem: 'imagenet' is asked for, {path} says 'cifar'"),
        (["--client", "cam-1"], "--client: is for --from"),
    ],
)
def test_export_refuses_what_the_file_contradicts(options: list[str], complaint: str, tmp_path: Path) -> None:
    path = MODELS[0].save(tmp_path / "m.safetensors")
    done = CliRunner().invoke(main, ["task", "--parameters", str(path), *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert complaint.format(path=path) in done.stderr
    assert not (tmp_path / "out").exists()


def test_export_refuses_a_model_of_another_kind_and_asks_for_what_nobody_says(tmp_path: Path) -> None:
    path = MODELS[1].save(tmp_path / "m.safetensors")
    plain = tmp_path / "plain.safetensors"
    plain.write_bytes(save(PARAMETERS))

    def complaint(*words: str) -> str:
        return CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out")]).stderr

    assert "holds a sub-generator, not a task; use model-export sub-generator" in complaint(
        "task", "--parameters", str(path)
    )
    assert "--image-channels: is missing, and" in complaint("task", "--parameters", str(plain), "--image-size", "28")
    assert "give --parameters FILE or --from RUN" in complaint("task")
    assert "give --parameters FILE\n" in complaint("sampler", "--image-size", "28", "--image-channels", "1")

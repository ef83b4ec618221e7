import msgspec
import numpy as np
import pytest

from replayfleet.models.specs import DetectionSpec, TaskSpec, plain_task


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b", "\0", "a\u202eb", "\u2066a"])
def test_a_name_is_printed_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="expected what can be printed in a line"):
        TaskSpec(1, 28, ("car", name))
    TaskSpec(1, 28, ("Straßenbahn", "自転車", "\u0645\u06cc\u200c\u062e", "a\u00a0b", "\u3000c", "caf\udce9"))


def test_a_name_is_as_long_as_a_folders_may_be() -> None:
    TaskSpec(1, 28, ("car", "x" * 255))
    with pytest.raises(ValueError, match="a class's name has 256 characters, expected at most 255: 'xxx"):
        TaskSpec(1, 28, ("car", "x" * 256))


def test_names_in_a_list_make_the_same_task():
    assert hash(TaskSpec(1, 28, ["a", "b"])) == hash(TaskSpec(1, 28, ("a", "b")))  # type: ignore[arg-type]


def test_numbers_and_names_of_numpy_make_a_task_that_can_be_written_down() -> None:
    one, many = np.int64(1), np.int64(64)
    names: tuple[str, ...] = tuple(np.unique(["b", "a"]))
    stem, network, boxes = np.array(["imagenet", "resnet18", "pyramid"])
    for made, plain in (
        (TaskSpec(1, 64, names, stem, 16, network), TaskSpec(1, 64, ("a", "b"), "imagenet", 16, "resnet18")),
        (
            DetectionSpec(1, 64, 64, names, ((1, 1),), architecture=boxes),
            DetectionSpec(1, 64, 64, ("a", "b"), ((1, 1),), architecture="pyramid"),
        ),
        (TaskSpec(one, many, names, generator_width=many), TaskSpec(1, 64, ("a", "b"), generator_width=64)),
        (DetectionSpec(one, many, many, names, ((1, 1),)), DetectionSpec(1, 64, 64, ("a", "b"), ((1, 1),))),
    ):
        assert msgspec.json.encode(plain_task(made)) == msgspec.json.encode(plain_task(plain))


def test_what_is_no_whole_number_of_channels_is_told() -> None:
    with pytest.raises(ValueError, match=r"image_channels is 1\.0, expected a whole number"):
        TaskSpec(1.0, 28, ("a", "b"))  # type: ignore[arg-type]

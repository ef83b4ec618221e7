import pytest

from replayfleet.models.specs import MAX_NAMES_BYTES, DetectionSpec, TaskSpec

MANY = tuple(f"class number {index:04d}" for index in range(4000))


def test_names_fit_into_what_a_broker_says_of_who_is_gone() -> None:
    said = f"names of 4000 classes take 8.... bytes, expected at most {MAX_NAMES_BYTES}"
    with pytest.raises(ValueError, match=said):
        TaskSpec(1, 28, MANY)
    with pytest.raises(ValueError, match=said):
        DetectionSpec(3, 64, 64, MANY, anchors=((0.5, 0.5),))
    TaskSpec(1, 28, tuple(str(index) for index in range(4096)))


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b", "\0", "\ud800"])
def test_a_name_is_printed_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="expected what can be printed in a line"):
        TaskSpec(1, 28, ("car", name))
    TaskSpec(1, 28, ("Straßenbahn", "自転車", "\u0645\u06cc\u200c\u062e", "a\u00a0b", "\u3000c"))

import pytest

from replayfleet.models.specs import TaskSpec


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b", "\0"])
def test_a_name_is_printed_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="expected what can be printed in a line"):
        TaskSpec(1, 28, ("car", name))
    TaskSpec(1, 28, ("Straßenbahn", "自転車", "\u0645\u06cc\u200c\u062e", "a\u00a0b", "\u3000c", "caf\udce9"))

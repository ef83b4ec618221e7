from __future__ import annotations

import pytest

from replayfleet.federation.paths import without_machine


@pytest.mark.parametrize(
    ("word", "noted"),
    [
        ("/srv/data", "data"),
        ("/srv/my data/", "my data"),
        ("--data-root=/srv/data", "--data-root=data"),
        ("runs/fedavg", "runs/fedavg"),
        ("--set", "--set"),
        ("replay=1/2", "replay=1/2"),
        ("a=b=/srv/c", "a=b=c"),
        ("/srv/erdfr+shots=25/seed-0", "seed-0"),
        ("--out=/srv/erdfr+shots=25/seed=0", "--out=seed=0"),
    ],
)
def test_of_an_absolute_path_a_noted_command_keeps_the_last_name(word: str, noted: str):
    assert without_machine(["fleet-sim", word]) == ["fleet-sim", noted]

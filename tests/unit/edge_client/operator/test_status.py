from __future__ import annotations

from replayfleet.edge_client.operator.status import lines


def test_what_is_not_known_is_empty_and_what_has_parts_is_one_line() -> None:
    status = {"probation_version": None, "frames": 0, "prediction": {"camera": "front", "class": 3}}
    assert lines(status) == [
        "probation_version",
        "frames             0",
        'prediction         {"camera": "front", "class": 3}',
    ]


def test_people_read_versions_as_the_aggregator_writes_them() -> None:
    status = {"serving_version": 2**32 + 4, "probation_version": -1}
    assert lines(status) == ["serving_version    1/4", "probation_version  -1"]

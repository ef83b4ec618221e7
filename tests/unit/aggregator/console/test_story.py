from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO

from replayfleet.aggregator.console.story import MAX_REPORTS, Story
from replayfleet.aggregator.operator.journal import JOURNAL, Journal, rotated


def note(folder: Path, *events: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_what_was_written_since_is_read_and_nothing_twice(tmp_path: Path) -> None:
    note(tmp_path, {"event": "upload accepted", "client": "a", "round": 0, "bytes": 10, "time": 1.0})
    story = Story(tmp_path)
    assert story.follow()
    assert not story.follow()
    note(tmp_path, {"event": "upload accepted", "client": "a", "round": 1, "bytes": 5, "time": 2.0})
    assert story.follow()
    assert story.clients["a"].bytes_up == 15
    assert story.rounds[1].accepted == {"a": 2.0}


def test_a_full_journal_is_read_piece_by_piece(tmp_path: Path) -> None:
    facts = {"text": "x" * 200_000}
    note(tmp_path, *({"event": "upload accepted", "client": "a", "bytes": 1, "facts": facts} for _ in range(100)))
    story = Story(tmp_path)
    tracemalloc.start()
    try:
        assert story.follow()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (story.num_read, story.clients["a"].bytes_up) == (100, 100)
    assert most_bytes < (tmp_path / JOURNAL).stat().st_size / 2


def test_it_follows_a_journal_that_is_put_aside_meanwhile(tmp_path: Path) -> None:
    with Journal(tmp_path, max_bytes=400) as journal:
        story = Story(tmp_path)
        for index in range(20):
            journal.add("round opened", round=index, expected=3)
            story.follow()
    assert story.num_read == 20
    assert sorted(story.rounds) == list(range(20))


def test_a_journal_that_was_put_aside_twice_since_it_was_read_is_followed(tmp_path: Path) -> None:
    """Nobody looked for weeks: what is there now may have the inode of what was read last."""
    path = tmp_path / JOURNAL
    path.write_text('{"time": 1.0, "event": "a"}\n')
    story = Story(tmp_path)
    assert story.follow()
    rotated(path).write_text('{"time": 2.0, "event": "b"}\n' * 3)
    path.write_text('{"time": 3.0, "event": "c"}\n' * 2)  # the very file
    assert story.follow()
    assert [event["event"] for _, event in story.search()[0]] == ["c", "c", "b", "b", "b", "a"]
    path.replace(rotated(path))
    path.write_text('{"time": 4.0, "event": "d"}\n')
    assert story.follow()
    assert not story.follow()
    assert story.num_read == 7
    path.rename(tmp_path / "taken away")
    path.write_text('{"time": 5.0, "event": "e"}\n')
    assert story.follow()
    assert story.num_read == 8, "what was put aside is known"


def test_a_journal_that_is_put_aside_as_it_is_looked_at_is_read_to_its_end(tmp_path: Path) -> None:
    story = Story(tmp_path)
    note(tmp_path, {"event": "round opened", "round": 0})
    story.follow()
    note(tmp_path, {"event": "round opened", "round": 1})
    goes_on = story._goes_on

    def then_put_aside(file: BinaryIO) -> bool:
        story._goes_on = goes_on  # type: ignore[method-assign]
        said = goes_on(file)
        (tmp_path / "events.jsonl").replace(tmp_path / "events.jsonl.1")
        note(tmp_path, {"event": "round opened", "round": 2})
        return said

    story._goes_on = then_put_aside  # type: ignore[method-assign]
    story.follow()
    story.follow()
    assert (sorted(story.rounds), story.num_read) == ([0, 1, 2], 3)


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    story = Story(tmp_path)
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "round op')
    assert not story.follow()
    with path.open("a") as file:
        file.write('ened", "round": 4}\nnot json\n[1]\n{"event": 3}\n')
    assert story.follow()
    assert list(story.rounds) == [4]


def test_rubbish_in_the_right_places_is_harmless(tmp_path: Path) -> None:
    note(
        tmp_path,
        {"event": "client report", "client": "a", "round": 0, "metrics": {"accuracy": "high", "num_test": 3}},
        {"event": "client report", "client": ["a"], "round": 1, "metrics": None},
        {"event": "client report", "client": "a", "round": 1, "metrics": [1]},
        {"event": "upload accepted", "client": "a", "bytes": "many"},
        {"event": "round committed", "round": 3, "weights": [1, 2]},
    )
    story = Story(tmp_path)
    story.follow()
    assert story.num_read == 5
    assert story.clients["a"].newest("num_test") == 3.0
    assert story.weights == {}


def test_what_an_operator_does_with_a_client_is_no_word_of_that_client(tmp_path: Path) -> None:
    note(
        tmp_path,
        {"event": "client gone", "client": "a", "time": 1.0},
        {"event": "operator", "client": "a", "time": 2.0, "verb": "exclude"},
        {"event": "operator", "client": "b", "time": 2.0, "verb": "enroll"},
    )
    story = Story(tmp_path)
    story.follow()
    assert [story.clients[name].seen_at for name in "ab"] == [1.0, None]


def test_a_report_of_no_round_is_in_no_chart(tmp_path: Path) -> None:
    """One is taken no more; a journal of before may have it."""
    note(tmp_path, {"event": "client report", "client": "a", "round": -1, "metrics": {"accuracy": 0.5}})
    story = Story(tmp_path)
    story.follow()
    assert not story.clients["a"].reports
    assert not story.rounds


def test_a_search_finds_words_in_any_order_whatever_their_case(tmp_path: Path) -> None:
    note(
        tmp_path,
        {"event": "upload rejected", "client": "cam-1", "reason": "not-finite", "detail": "Örtliche Größe"},
        {"event": "upload rejected", "client": "cam-2", "reason": "too-large"},
        {"event": "client gone", "client": "cam-1"},
    )
    story = Story(tmp_path)
    story.follow()
    assert [number for number, _ in story.search("FINITE rejected")[0]] == [0]
    for words in ("größe", "Örtliche", "GRÖẞE örtliche Rejected"):
        assert [number for number, _ in story.search(words)[0]] == [0], words
    assert [number for number, _ in story.search(client="cam-1")[0]] == [2, 0]
    assert [number for number, _ in story.search(client="cam")[0]] == []
    assert [number for number, _ in story.search(kind="upload rejected", limit=1)[0]] == [1]
    assert story.search(limit=1)[1]
    assert [number for number, _ in story.search(before=1)[0]] == [0]


def test_memory_is_bounded(tmp_path: Path) -> None:
    note(tmp_path, *({"event": "client report", "client": "a", "round": i, "metrics": {"x": 1}} for i in range(500)))
    story = Story(tmp_path)
    story.follow()
    assert len(story.clients["a"].reports) == MAX_REPORTS
    assert len(story.rounds) == MAX_REPORTS
    assert max(story.rounds) == 499


def test_clients_are_offline_after_the_aggregator_began_again_until_they_are_heard_of(tmp_path: Path) -> None:
    note(tmp_path, {"event": "client online", "client": "a"}, {"event": "aggregator started"})
    story = Story(tmp_path)
    story.follow()
    assert not story.clients["a"].online

from __future__ import annotations

import re

import matplotlib as mpl
import pytest

from replayfleet.federation.service.pages.charts import Line, line_chart

pytest.importorskip("matplotlib", reason="draws with Matplotlib, which a board lacks")

SIZE = (440, 300)


def titles(chart: str) -> list[str]:
    """What a reader sees when pointing at something."""
    return re.findall(r"<g><title>([^<]*)</title>", chart)


def words(chart: str) -> list[tuple[float, float, str]]:
    """Every text of a chart and where it begins."""
    pattern = r'<text [^>]*x="([\d.-]+)" y="([\d.-]+)"[^>]*>([^<]*)</text>'
    return [(float(x), float(y), text) for x, y, text in re.findall(pattern, chart)]


def changes(chart: str) -> list[tuple[float, float]]:
    """Column and upper end of every dotted line that marks a change."""
    pattern = r'd="M ([\d.]+) [\d.]+\s+L [\d.]+ ([\d.]+)\s+" style="fill: none; stroke-dasharray: 1\.4,5'
    return [(float(x), float(y)) for x, y in re.findall(pattern, chart)]


def test_every_value_can_be_pointed_at_and_close_labels_stand_apart():
    lines = [Line("a <b>", [0.5, 0.61], "own"), Line("c", [None, 0.6], "fedavg"), Line("d", [0.1, 0.2], "client")]
    chart = line_chart(lines, changes=[1, 9], size=SIZE)
    first = ["a &lt;b&gt;", "a &lt;b&gt;, round 0: 50.0 %", "a &lt;b&gt;, round 1: 61.0 %"]
    assert titles(chart) == [*first, "c", "c, round 1: 60.0 %", "d"]
    assert len(changes(chart)) == 1
    ends = [y for _, y, text in words(chart) if text in {"61.0", "60.0", "20.0"}]
    assert len(ends) == 2
    assert abs(ends[0] - ends[1]) >= 16


@pytest.mark.parametrize("num_rounds", [1, 2, 150])
def test_any_number_of_rounds_can_be_drawn(num_rounds: int):
    chart = line_chart([Line("a", [0.5] * num_rounds, "own")], changes=[], size=SIZE)
    assert len(titles(chart)) == 1 + num_rounds
    assert 1 <= len([text for _, _, text in words(chart) if text.isdecimal()]) <= 14


def test_a_client_that_was_measured_once_is_seen():
    once, twice = (line_chart([Line("c", values, "client")], changes=[], size=SIZE) for values in ([0.5], [0.5, 0.6]))
    assert once.count("<use") == twice.count("<use") + 1, "a line of one point has no length"


def test_colours_are_the_pages_and_nothing_is_fetched_or_named_twice():
    styles = ("own", "fedavg")
    charts = [line_chart([Line("a", [0.5, 0.7], one)], changes=[1], size=SIZE, title=one) for one in styles]
    assert all(f"stroke: var(--{style}, #" in chart for style, chart in zip(styles, charts, strict=True))
    assert not re.search(r"<style|<metadata|font-family|http|url\(", "".join(charts))
    ids = re.findall(r' id="([^"]*)"', "".join(charts))
    assert len(set(ids)) == len(ids)
    with mpl.rc_context({"text.usetex": True, "axes.facecolor": "red"}):  # a program's own; there may be no LaTeX
        assert charts[0] == line_chart([Line("a", [0.5, 0.7], "own")], changes=[1], size=SIZE, title="own")


def test_places_that_the_stream_enters_are_named():
    line = Line("a", [0.1, 0.5, 0.9], "own")
    places = {0: "Town01", 2: "Town<2>", 7: "never"}
    chart = line_chart([line], changes=[2], size=SIZE, title="A & B", places=places)
    assert [text for _, _, text in words(chart) if text.startswith("Town")] == ["Town01", "Town&lt;2&gt;"]
    assert "never" not in chart
    assert chart.count("A &amp; B") == 2


def test_no_word_for_a_place_crosses_a_line_or_another_word():
    last = "a very long name of the last town"
    places = {0: "Town01, Town02", 1: "Town03", 2: "Town04", 6: "Town05, Town06", 7: last}
    chart = line_chart([Line("a", [0.99] * 8, "own")], changes=[1, 2, 6, 7], size=SIZE, places=places)
    found = [(x, x + 7.3 * len(text), y) for x, y, text in words(chart) if text.startswith(("Town", "a "))]
    assert (len(changes(chart)), len(found)) == (4, 5)
    highest_dot = min(float(y) for y in re.findall(r'<use [^>]*y="([\d.]+)"', chart))
    for start, end, y in found:
        assert end <= 440 + 7.3
        assert y < highest_dot - 4
        assert not [x for x, top in changes(chart) if start < x < end and top < y]
        assert not [other for other in found if start < other[0] < end and abs(other[2] - y) < 13]
    assert last in titles(chart)  # all of it is shown to whoever points at it


def test_without_places_the_drawing_has_all_the_height():
    chart = line_chart([Line("a", [0.1], "own")], changes=[], size=SIZE)
    (full,) = [y for _, y, text in words(chart) if text == "100 %"]
    assert full == pytest.approx(14 + 5, abs=1)

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest
from support.driven_demo import driven_demo

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.scripts.carla.facts import read_facts, read_marker
from replayfleet.scripts.carla.page import page, storing, summary
from replayfleet.scripts.carla.stills import Still, still, written_share

STILLS = {"crops": [Still("crops-vehicle-1.webm", 7, 10, "data:image/jpeg;base64,AAAA")], "detection": []}


class Closed(HTMLParser):
    """Fails unless every element is closed in order; collects what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def the_page(tmp_path: Path, **changes: bool) -> str:
    text = page(read_facts(driven_demo(tmp_path / "demo", **changes)), STILLS)
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_town_begins_at_the_first_round_whose_report_names_it(tmp_path: Path):
    part = read_facts(driven_demo(tmp_path / "demo")).part("crops")
    assert [vehicle.town_starts for vehicle in part.vehicles] == [
        {0: "Town01", 1: "Town02"},
        {0: "Town02", 1: "Town01"},
    ]
    assert part.vehicles[0].held_out == [0.5, 0.75]
    assert part.vehicles[1].stream == [0.0625, 0.4375]


def test_numbers_are_those_of_the_files(tmp_path: Path):
    facts = read_facts(driven_demo(tmp_path / "demo"))
    assert facts.total("frames") == 2 * (100 + 101)
    assert facts.bytes() == (2 * 2 * 2 * 1_000_000, 2 * 2 * 2 * 500_000 + 4 * 1000)
    assert facts.part("crops").mean("accuracy") == pytest.approx(0.55)
    assert facts.part("detection").mean("boxes_found") == pytest.approx(0.275)
    assert facts.part("detection").mean("accuracy") is None
    first, second, *_ = summary(facts)
    assert "2 recorded towns" in first
    assert "55.0 % of all held-out objects" in first
    assert "402 frames were answered and 12 dropped. 8.0 MB went up and 4.0 MB came down" in second


def test_the_page_is_closed_and_refers_to_nothing_outside(tmp_path: Path):
    text = the_page(tmp_path)
    parser = Closed()
    parser.feed(text)
    assert parser.open == []
    assert parser.sources == ["data:image/jpeg;base64,AAAA"]
    assert "a &lt;folder&gt;" in text
    assert "SYNTHETIC" not in text


def test_charts_have_both_curves_and_name_towns_where_they_begin(tmp_path: Path):
    text = the_page(tmp_path)
    crops = re.search(r'<section id="crops">.*?</section>', text, re.DOTALL)
    assert crops
    assert crops.group().count("<svg") == 2
    for curve in ("objects named rightly", "objects named rightly, what came"):
        assert crops.group().count(f"<g><title>{curve}</title>") == 2
        assert len(re.findall(rf"<g><title>{curve}, round [01]: [0-9.]+ %</title>", crops.group())) == 4
    towns = [town for town in re.findall(r"<text[^>]*>([^<]*)<", crops.group()) if town.startswith("Town")]
    assert sorted(towns) == ["Town01", "Town01", "Town02", "Town02"]
    assert "1 of 2" not in crops.group()


def test_quality_town_by_town_has_map_for_boxes_only(tmp_path: Path):
    text = the_page(tmp_path)
    assert text.count("mAP@0.5 15.0 %") == 3
    assert text.count("of 12 objects") == 6
    assert text.count("of 12 boxes") == 6


def test_the_method_that_stores_real_samples_is_named_plainly(tmp_path: Path):
    facts = read_facts(driven_demo(tmp_path / "demo"))
    assert storing(facts.part("detection")).startswith("DER with FedGP STORES DATA: every vehicle keeps up to 200")
    assert storing(facts.part("crops")).startswith("pFedGRP stores no real sample")


def test_drawn_streets_and_a_road_that_was_too_short_are_said(tmp_path: Path):
    text = the_page(tmp_path, synthetic=True, complete=False)
    assert "SYNTHETIC: these streets are drawn" in text
    assert "2 drawn towns" in text
    assert text.count("The road was over after 2 rounds") == 1


def test_folders_of_anything_else_are_refused(tmp_path: Path):
    with pytest.raises(ReplayfleetError, match="is no folder of a driving demo"):
        read_marker(tmp_path)
    out = driven_demo(tmp_path / "demo")
    (out / "crops" / "quality.json").write_text("[]")
    with pytest.raises(ReplayfleetError, match=r"quality\.json can't be read"):
        read_facts(out)
    (out / "detection" / "aggregator" / "events.jsonl").unlink()
    (out / "crops" / "aggregator" / "events.jsonl").unlink()
    with pytest.raises(ReplayfleetError, match="holds no finished round"):
        read_facts(out)


def test_a_still_is_the_picture_with_most_words_of_its_stretch(tmp_path: Path):
    film = tmp_path / "film.mp4"
    writer = cv2.VideoWriter(str(film), cv2.VideoWriter.fourcc(*"mp4v"), 10.0, (64, 48))
    for index in range(20):
        picture = np.full((48, 64, 3), 120, np.uint8)
        picture[: 2 * (index % 10), :] = 0  # most words in pictures 9 and 19
        writer.write(picture)
    writer.release()
    late, early = still(film, 0.75, 1.0), still(film, 0.0, 0.6)
    assert (late.index, late.num_frames, early.index) == (19, 20, 9)
    assert late.data_uri.startswith("data:image/jpeg;base64,")
    assert still(tmp_path / "none.mp4", 0.0, 1.0) is None
    assert written_share(np.zeros((2, 2, 3), np.uint8)) == 1.0

from __future__ import annotations

import base64
import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
import pytest
from support.demo_journal import baseline_result, journal
from support.finished_demo import finished_demo, tiny_images

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.presets import settings_for
from replayfleet.federation.service.pages import contact_sheet, picture_uri
from replayfleet.federation.simulator.result import Result
from replayfleet.scripts.demo import rivals
from replayfleet.scripts.demo.facts import BlobSizes, Facts, read_facts
from replayfleet.scripts.demo.page import page
from replayfleet.scripts.demo.plan import make_plan
from replayfleet.scripts.demo.report import write_report
from replayfleet.scripts.demo.samples import Picture, generated_pictures, why_nothing_is_drawn
from replayfleet.scripts.demo.sentences import headline, revisit_sentence, summary
from replayfleet.scripts.launch.record import FleetRecord

PICTURES = [Picture(class_id, "data:image/png;base64,AA==", 0.5) for class_id in range(4)]


def facts(sent: tuple[int, ...] = (2, 2, 0)) -> Facts:
    record = FleetRecord(journal(sent=sent))
    return Facts(record, baseline_result(), BlobSizes(task=1_000_000, sub_generator=100_000), {"preset": "tiny"})


class Page(HTMLParser):
    """Text by element id and what the page refers to; every element must be closed in order."""

    VOID = frozenset({"meta", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in {"src", "href", "srcset", "data"}]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def section(text: str, name: str) -> str:
    found = re.search(rf'<section id="{name}">(.*?)</section>', text, re.DOTALL)
    return found[1]


def the_page(sent: tuple[int, ...] = (2, 2, 0)) -> str:
    return page(facts(sent), {"client-0": PICTURES, "client-1": PICTURES[:2]}, PICTURES)


def test_the_first_two_sentences_say_what_happened():
    first, second = headline(facts())
    assert "three rounds" in first
    assert "two personalised models recognise 80.0 %" in first
    assert "40.0 points more" in first
    assert "(40.0 %)" in first
    assert "8 uploads instead of 20" in second
    assert "the return of known classes in round 2 cost no sub-generator at all" in second
    text = the_page().replace("\N{NO-BREAK SPACE}", " ")
    assert f"<h1>{first}</h1>" in text
    assert f'<p class="lead">{second}</p>' in text


def test_a_fleet_that_is_worse_says_so():
    own = facts()
    records = [dataclasses.replace(record, accuracy=0.95) for record in own.baseline.rounds]
    worse = dataclasses.replace(own, baseline=type(own.baseline)(**{**_fields(own.baseline), "rounds": records}))
    assert "15.0 points less" in headline(worse)[0]


def _fields(struct: object) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]


def test_rivals_curves_stand_beside_the_fleets_and_say_that_they_are_simulated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(rivals, "FOLDER", tmp_path)
    ours = facts().baseline
    fits = ours.run | {"method": "fedcil", "settings": {}}
    command = ["fleet-sim", "fedcil", "--seed", "0"]
    told = _fields(ours) | {"run": fits, "command": command, "commit": "c" * 40}
    (tmp_path / "fedcil.json").write_bytes(type(ours)(**told).encode())
    (tmp_path / "fedavg-replay.json").write_bytes(type(ours)(**told | {"run": fits | {"run_seed": 9}}).encode())
    (tmp_path / "pfedgrp.json").write_bytes(type(ours)(**told).encode())
    text = the_page()
    assert list(facts().rivals) == ["fedcil"], "another seed, or no rival"
    assert '<span class="key rival-0">FedCIL, simulated</span>' in text
    assert "FedCIL: not run here. This comes with the project, from its simulator" in text
    assert f"(commit {'c' * 12}, " in text
    assert "fleet-sim fedcil --seed 0" in text
    assert text.count("FedCIL, simulated, mean of the clients") == 2
    monkeypatch.setattr(rivals, "FOLDER", tmp_path / "none")
    assert "not run here" not in the_page()


def test_what_a_client_chose_to_serve_stands_in_its_round():
    events = journal()
    for event in events:
        if event["event"] == "client report" and event["client"] == "client-0":
            event["metrics"] |= {"served/own": 1.0, "evidence/own": 0.9}
    chosen = dataclasses.replace(facts(), record=FleetRecord(events))
    assert section(page(chosen, {}, []), "rounds").count("serves: own") == 3
    assert "serves: " not in the_page()


@pytest.mark.parametrize("name", sorted(path.stem for path in rivals.FOLDER.glob("*.json")))
def test_committed_rivals_ran_as_the_demo_would_run_them_now(name: str):
    plan = make_plan(Path("runs/demo"), "demo", 0, clients=None, rounds=None, data_root=None)
    words = plan.fleet().beside["fedavg"]
    committed = msgspec.json.decode((rivals.FOLDER / f"{name}.json").read_bytes(), type=Result)
    assert committed.command[:2] == ["fleet-sim", name]
    assert committed.command[2 : committed.command.index("--out")] == words[2 : words.index("--out")]
    run = committed.run
    known = [field.name for field in dataclasses.fields(METHODS[name])]
    now = {key: value for key, value in settings_for(name, "demo", known=known).items() if key in run["settings"]}
    assert now == {key: run["settings"][key] for key in now}
    assert len(committed.rounds) == plan.rounds


def test_wide_tables_say_how_many_columns_there_are():
    rounds = section(the_page(), "rounds")
    assert rounds.count("<th>") == 7
    assert '<p class="more">7 columns: scroll sideways for the rest' in rounds
    assert '<div class="scroll" tabindex="0" role="group"' in rounds, "keys scroll it too"


def test_bytes_are_compared_with_sending_everything():
    found = facts()
    up, down = found.up(found.rounds[1]), found.down(found.rounds[1])
    assert (up.sent, up.everything) == (2_400_000, 2_400_000 + 2 * 2 * 100_000)
    assert (down.sent, down.everything) == (4_000_000, 2 * (2 * 1_000_000 + 4 * 100_000))
    total = found.traffic()
    assert total.saved_share == pytest.approx(1 - total.sent / total.everything)
    assert found.sub_generators() == (8, 20)
    assert found.num_frames == 600
    assert found.slowest("swap_s") == pytest.approx(0.05)


def test_a_revisit_that_uploads_nothing_is_marked():
    rounds = section(the_page(), "rounds")
    assert rounds.count("revisit: nothing sent") == 2
    assert "no drift, so no sub-generator is uploaded" in rounds
    assert rounds.count("2 of 4 sent") == 2


def test_a_revisit_with_drift_is_not_called_quiet():
    rounds = section(the_page(sent=(2, 2, 1)), "rounds")
    assert "nothing sent" not in rounds
    assert rounds.count("revisit, drifted: 1 sent") == 2
    assert "zero of two upload no sub-generator" in revisit_sentence(facts((2, 2, 1)), 2)
    assert "cost no sub-generator" not in headline(facts((2, 2, 1)))[1]


def test_without_a_gate_nothing_is_said_to_have_drifted():
    found = facts((2, 2, 1))
    found.record.spec = {**found.record.spec, "settings": {"gate": False}}
    assert "learn from every round" in revisit_sentence(found, 2)
    quiet = facts((2, 2, 0))
    quiet.record.spec = found.record.spec
    assert "is little, so no sub-generator" in revisit_sentence(quiet, 2)
    rounds = section(page(found, {"client-0": PICTURES, "client-1": PICTURES}, PICTURES), "rounds")
    assert "drift gate" not in rounds
    assert rounds.count("revisit: 1 sent") == 2


def test_the_page_needs_nothing_else_and_is_well_formed():
    text = the_page()
    parsed = Page(text)
    assert parsed.references
    assert all(reference.startswith("data:") for reference in parsed.references)
    assert not {"script", "link", "iframe", "object"} & set(parsed.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 40rem" in text


def test_names_and_hardware_are_escaped():
    text = the_page()
    assert "coat &amp; hat" in text
    assert "A &lt;fast&gt; one" in text
    assert "<fast>" not in text


def test_weights_stand_in_the_heat_map():
    weights = section(the_page(), "weights")
    assert weights.count("<figure>") == 3
    for share in ("0.75", "0.25", "0.12", "0.88"):
        assert f">{share}</td>" in weights
    assert "FedAvg would be 0.50 everywhere" in weights


def test_every_class_and_client_has_its_picture():
    samples = section(the_page(), "samples")
    assert samples.count("<img") == 4 + 4 + 2
    assert "client-1" in samples
    assert "50 %" in samples


def test_settings_seeds_versions_and_commands_are_told():
    settings = section(the_page(), "settings")
    for word in (
        "seed",
        "2.15.0",
        "0123456789ab",
        "gate",
        "circulating, 20 images",
        "fleet-sim fedavg",
        "1:02 minutes",
    ):
        assert word in settings


def test_troubles_of_the_run_are_not_hidden():
    found = facts()
    found.record.troubles.append("round 1, client-0: upload rejected (NaN)")
    assert "upload rejected (NaN)" in section(page(found, {}, []), "settings")


def test_a_client_that_missed_a_round_is_shown_as_missing():
    events = [
        event
        for event in journal()
        if not (event["event"] == "upload accepted" and event["round"] == 1 and event["client"] == "client-1")
    ]
    found = dataclasses.replace(facts(), record=FleetRecord(events))
    assert section(page(found, {}, []), "rounds").count("missed") == 2


def test_the_summary_for_terminals_has_the_same_numbers():
    lines = summary(facts())
    assert lines[:2] == list(headline(facts()))
    assert "8 of 20" in lines[2]


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_survive_their_encoding(channels: int):
    images = np.linspace(-1, 1, 5 * channels * 4 * 4, dtype=np.float32).reshape(5, channels, 4, 4)
    sheet = contact_sheet(images, 2, 3)
    assert sheet.shape == (12, 8, channels)
    assert (sheet[0, 0] == np.rint((images[0, :, 0, 0] + 1) * 127.5)).all()
    assert (sheet[4, 0] == np.rint((images[2, :, 0, 0] + 1) * 127.5)).all()
    assert (sheet[8:, 4:] == 0).all()
    encoded = np.frombuffer(base64.b64decode(picture_uri(sheet).partition(",")[2]), np.uint8)
    decoded = cv2.imdecode(encoded, cv2.IMREAD_UNCHANGED).reshape(12, 8, channels)
    assert (decoded[..., ::-1] == sheet).all()


def test_a_report_is_written_from_what_a_demo_leaves(tmp_path: Path):
    written = write_report(finished_demo(tmp_path / "demo"), tiny_images())
    text = written.path.read_text(encoding="utf-8")
    assert written.path.name == "report.html"
    assert section(text, "samples").count("<img") == 4 + 2 * 4
    Page(text)
    found = read_facts(tmp_path / "demo")
    assert 1_000_000 < found.sizes.task < 2_850_000
    assert 100_000 < found.sizes.sub_generator < 800_000
    assert found.traffic().everything > found.traffic().sent


def test_one_generator_of_all_classes_gives_one_picture_per_client(tmp_path: Path):
    written = write_report(finished_demo(tmp_path / "demo", generators="single"), tiny_images())
    samples = section(written.path.read_text(encoding="utf-8"), "samples")
    assert samples.count("<img") == 4 + 2
    assert samples.count("<span>all classes</span></figcaption>") == 2
    assert "A client has one generator for all classes" in samples
    assert "of 64 samples" not in samples


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"settings": {"sub_generator": "ddpm"}}, "Nothing is drawn: a diffusion model takes minutes"),
        ({"method": "fedavg-replay"}, "Nothing is drawn: with fedavg-replay the aggregator holds no sub-generators."),
    ],
)
def test_what_cannot_be_drawn_is_said_instead(tmp_path: Path, spec: dict[str, Any], reason: str):
    found = facts()
    found.record.spec = {**found.record.spec, **spec}
    assert generated_pictures(tmp_path, found.record.spec) == {}
    assert reason in section(page(found, {}, PICTURES), "samples")


def test_an_unfinished_demo_makes_no_report(tmp_path: Path):
    with pytest.raises(ReplayfleetError, match="no finished round"):
        read_facts(tmp_path)
    out = finished_demo(tmp_path / "demo")
    (out / "fedavg" / "result.json").unlink()
    with pytest.raises(ReplayfleetError, match="no finished demo"):
        read_facts(out)


def test_every_kind_of_pfedgrp_draws_what_its_aggregator_holds():
    mixture = {"method": "pfedgrp-plus", "settings": {"sub_generator": "pca-mixture"}}
    assert why_nothing_is_drawn(mixture) == why_nothing_is_drawn({"method": "pfedgrp", "settings": {}}) == ""

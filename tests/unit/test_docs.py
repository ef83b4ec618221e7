"""Documentation that the code relies on, and what must never be in it."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import pytest

from replayfleet.edge_client.frames.views import fitted
from replayfleet.federation.errors import Reason
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.data_dir import FORMAT_VERSION
from replayfleet.federation.service.waits import Why
from replayfleet.federation.streams.files.picture_files import read_picture
from replayfleet.federation.wire.protocol.messages import PROTOCOL_VERSION
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.models.specs import TaskSpec

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def _headings(page: Path) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE))


def _anchors(page: Path) -> set[str]:
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _headings(page)}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_heading_in_the_list_of_errors(reason: Reason) -> None:
    assert reason.value in _headings(ROOT / "docs/errors.md")


def test_the_numbers_that_an_update_may_change_are_those_of_the_code() -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    assert f"`format` in `fleet.json`: {FORMAT_VERSION} |" in text
    version = topic_of("fleet", "round").split("/")[1]
    assert f"`{version}` in their topics, and a byte of every frame: {PROTOCOL_VERSION} |" in text


@pytest.mark.parametrize("why", Why)
def test_every_wait_has_a_row_in_the_list_of_errors(why: Why) -> None:
    table = (ROOT / "docs/errors.md").read_text(encoding="utf-8").split("## Why it waits", 1)[1].split("\n## ", 1)[0]
    assert f"| `{why.value}` |" in table


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page_and_a_row_in_reproducibility_if_the_page_refers_to_it(name: str) -> None:
    page = (ROOT / f"docs/methods/{name}.md").read_text(encoding="utf-8")
    if "REPRODUCIBILITY.md" in page:
        assert f"[{name}](docs/methods/{name}.md)" in (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_page_maps_symbols_to_names_that_the_code_has(name: str) -> None:
    page = (ROOT / f"docs/methods/{name}.md").read_text(encoding="utf-8")
    table = page.split("## Symbols", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| [^|]* \| `(\w+)` \|", table, re.MULTILINE))
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "federation/methods").rglob("*.py"))
    assert named
    assert named <= set(re.findall(r"\w+", code))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_s_differences_from_its_paper_have_one_home_its_page(name: str) -> None:
    assert "## Differences from the paper" in (ROOT / f"docs/methods/{name}.md").read_text(encoding="utf-8")
    doc = sys.modules[METHODS[name].__module__].__doc__ or ""
    assert re.findall(r"^Differences from the papers?: (.*)$", doc, re.MULTILINE) == [f"``docs/methods/{name}.md``."]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in _anchors(linked), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_code_spans_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(
        r"`((?:aggregator|benchmarks|devices|docs|edge_client|export|federation|models|scripts|tests)/[\w./-]*\w)`",
        text,
    )
    missing = [span for span in spans if not (ROOT / span).exists()]
    assert not missing


def _walks() -> dict[str, str]:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## Four walks", 1)[1]
    _, *walks = page.split("\n## ", 1)[0].split("\n### ")
    return {walk.split("\n", 1)[0]: walk for walk in walks}


def _defined(path: Path) -> set[str]:
    """Functions, classes and methods of a file, as ``Class.method``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("walk", ["A picture", "A labelled sample", "An upload", "A manifest"])
def test_a_walk_names_functions_that_exist_and_returns_to_no_room(walk: str) -> None:
    text = _walks()[walk]
    for file, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", text):
        assert name in _defined(ROOT / file), f"{file} has no {name}"
    for house in text.split("Over the broker"):
        files = re.findall(r"^\d+\. `([\w/]+)\.py:", house, re.MULTILINE)
        rooms = [room for room, _ in itertools.groupby("/".join(file.split("/")[:2]) for file in files)]
        assert len(rooms) == len(set(rooms)), rooms


def test_a_picture_made_ready_by_hand_is_what_a_device_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/export.md").read_text(encoding="utf-8").split("## A picture, answered by hand", 1)[1]
    logits, given = np.array([1.0, 2.0, 4.0], np.float32), {}

    class Session:
        def __init__(self, path: str) -> None:
            assert path == "a.onnx"

        def run(self, _: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
            given.update(inputs)
            return [logits[None]]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.chdir(tmp_path)
    for shape in ((60, 400, 3), (480, 640, 3), (20, 30, 3)):
        cv2.imwrite("street.jpg", np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
        found: dict[str, np.ndarray] = {}
        exec(page.split("```\n", 2)[1], found)
        expected = fitted(read_picture(Path("street.jpg")), TaskSpec(3, 64, ("a", "b", "c")))
        assert np.array_equal(given["images"], expected.reshape(1, 3, 64, 64))
        assert np.allclose(found["confidences"], np.exp(logits) / np.exp(logits).sum())

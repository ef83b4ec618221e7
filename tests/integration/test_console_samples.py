"""What sub-generators draw, on a client's page."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.demo_journal import CLIENTS
from support.finished_demo import finished_demo

from replayfleet.aggregator.console import drawing
from replayfleet.aggregator.console.samples import Held, Picture, Samples, held
from replayfleet.aggregator.store import AggregatorStore, StoredArtefacts
from replayfleet.federation.wire.protocol.messages import Manifest
from tests.support.consoles import console

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = finished_demo(tmp_path_factory.mktemp("demo") / "demo") / "aggregator"
    store = AggregatorStore(made)
    for client in CLIENTS:
        store.put_download(Manifest("down", "demo", client, 1, 0, ()))
    store.close()
    return made


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with console(folder) as found:
        yield found


def test_a_clients_page_shows_what_each_of_its_sub_generators_draws(folder: Path, address: str) -> None:
    client = CLIENTS[0]

    def asked_for() -> tuple[str, list[tuple[str, str]]]:
        page = urlopen(f"{address}/clients/{client}").read().decode()
        return page, re.findall(r'<img src="([^"]+)" alt="Ten samples of ([^"]+)"', page)

    known = held(folder)
    page, places = asked_for()
    assert len(places) == 1, "each takes one of a browser's connections for as long as all are drawn"
    assert page.count("Not drawn yet.") == len(known.digests[client]) - 1
    assert urlopen(address + places[0][0]).read().startswith(PNG)
    page, places = asked_for()
    assert [html.unescape(name) for _, name in places] == [
        known.name(class_id) for class_id in sorted(known.digests[client])
    ]
    pictures = [urlopen(address + place).read() for place, _ in places]
    assert all(picture.startswith(PNG) for picture in pictures)
    assert len(set(pictures)) == len(pictures)
    assert page.count(" recognised</small>") == len(places), "once drawn, the page says how many are recognised"
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urlopen(f"{address}/samples/{client}/{'1' * 5000}.png")
    refused.value.close()
    assert "digest" not in json.loads(urlopen(f"{address}/api/fleet").read())


def test_only_one_clients_models_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    real = drawing._of

    def watched(state: StoredArtefacts, client: str) -> StoredArtefacts:
        found = real(state, client)
        loaded.extend(entry.name for entry in found.blobs)
        return found

    monkeypatch.setattr(drawing, "_of", watched)
    assert set(drawing.drawn(folder, CLIENTS[1])) == {str(class_id) for class_id in held(folder).digests[CLIENTS[1]]}
    assert {name.split("/")[1] for name in loaded if name.startswith("clients/")} == {CLIENTS[1]}


def test_a_diffusion_model_or_a_method_without_sub_generators_draws_nothing(tmp_path: Path) -> None:
    slow = finished_demo(tmp_path / "slow", sub_generator="ddpm") / "aggregator"
    assert held(slow) == Held()


def test_what_could_not_be_drawn_is_drawn_when_somebody_asks_again(folder: Path, tmp_path: Path) -> None:
    told: list[bool] = []

    async def twice() -> list[Mapping[int, Picture]]:
        samples = Samples(tmp_path / "fleet", lambda: told.append(True))
        first = await samples.of(CLIENTS[0], held(folder))
        shutil.copytree(folder, tmp_path / "fleet")
        return [first, await samples.of(CLIENTS[0], held(folder))]

    first, second = asyncio.run(twice())
    assert first == {}
    assert sorted(second) == sorted(held(folder).digests[CLIENTS[0]])
    assert told == [True]

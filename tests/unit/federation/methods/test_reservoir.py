from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replayfleet.federation.methods.kit.records import Artefacts, RoundData
from replayfleet.federation.methods.steps.data_free import from_bytes
from replayfleet.federation.methods.steps.kept_samples import Reservoir, StoredRounds, as_met, fingerprint_of
from tests.support.rng import rng


def images(*numbers: int) -> Tensor:
    """Images that show their number."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None, None, None].expand(-1, 1, 2, 2)


def offered(capacity: int, num_samples: int, batch_size: int, draws: torch.Generator) -> Reservoir:
    reservoir = Reservoir(capacity)
    for numbers in torch.arange(num_samples).split(batch_size):
        reservoir = reservoir.with_batch(images(*numbers.tolist()), numbers, draws)
    return reservoir


def test_it_keeps_everything_in_order_until_it_is_full_and_then_stays_full() -> None:
    assert offered(5, 3, 2, rng()).samples["labels"].tolist() == [0, 1, 2]
    assert offered(5, 5, 2, rng()).samples["labels"].tolist() == [0, 1, 2, 3, 4]
    full = offered(5, 400, 7, rng())
    kept = full.samples["labels"].tolist()
    assert (len(full), len(set(kept)), full.num_seen) == (5, 5, 400)
    assert full.samples["images"][:, 0, 0, 0].tolist() == kept  # images and labels move together
    assert not len(Reservoir())


def test_everything_ever_met_is_equally_likely_to_be_in_it() -> None:
    draws, runs = rng(), 2000
    counts = torch.zeros(6)
    for _ in range(runs):
        counts[offered(2, 6, 4, draws).samples["labels"]] += 1
    deviation = (runs * (1 / 3) * (2 / 3)) ** 0.5
    assert ((counts - runs / 3).abs() < 4.5 * deviation).all()  # counting from 1 moves the last one by 6


def test_how_the_stream_is_cut_into_batches_changes_no_bits() -> None:
    whole = offered(8, 100, 100, rng(3)).samples["labels"]
    assert whole.tolist() != list(range(8))
    for batch_size in (1, 7, 32):
        assert offered(8, 100, batch_size, rng(3)).samples["labels"].equal(whole)


def test_an_update_leaves_the_earlier_value_and_the_batch_untouched() -> None:
    before = offered(4, 4, 4, rng())
    labels = torch.arange(100, 140)
    after = before.with_batch(images(*labels.tolist()), labels, rng())
    assert before.samples["labels"].tolist() == [0, 1, 2, 3]
    assert before.num_seen == 4
    assert after.samples["labels"].tolist() != [0, 1, 2, 3]
    assert labels.tolist() == list(range(100, 140))
    after.samples["labels"].zero_()
    assert labels.min() == 100


def test_labels_and_logits_may_have_any_shape() -> None:
    boxes, raw = torch.rand(6, 3, 5), torch.rand(6, 2, 4, 4, 9)
    reservoir = Reservoir(4).with_batch(images(*range(6)), boxes, rng(), logits=raw)
    for image, label, logits in zip(*(reservoir.samples[key] for key in ("images", "labels", "logits")), strict=True):
        number = int(image.max())
        assert label.equal(boxes[number])
        assert logits.equal(raw[number])


def test_pictures_are_kept_as_bytes_and_drawn_as_they_were_met() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    met = from_bytes(pixels)
    kept = Reservoir(4).with_batch(met, torch.arange(4), rng())
    assert kept.samples["images"].equal(pixels)
    assert as_met(kept.samples["images"]).equal(met)
    drawn = kept.drawn(4, rng(1))
    assert drawn["images"].equal(met[drawn["labels"]])
    resized = met + 1e-4  # no longer a pixel's value
    mixed = Reservoir(8).with_batch(met, torch.arange(4), rng()).with_batch(resized, torch.arange(4), rng())
    assert as_met(mixed.samples["images"]).equal(torch.cat([met, resized]))
    assert mixed.with_batch(met[:1], torch.arange(1), rng()).samples["images"].dtype == torch.float32


def test_all_rounds_are_stored_as_bytes_and_come_back_as_they_were_met() -> None:
    met = RoundData(from_bytes(torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)), torch.arange(4))
    other = RoundData(met.images + 1e-4, met.labels)
    stored = StoredRounds().with_round(met).with_round(met).with_round(other)
    assert [each["images"].dtype for each in stored.rounds] == [torch.uint8, torch.float32]
    assert stored.all_of("images").equal(torch.cat([met.images, other.images]))
    assert StoredRounds.unpack(stored.pack()).all_of("labels").tolist() == [0, 1, 2, 3] * 2


def test_samples_are_drawn_without_replacement_and_no_more_than_there_are() -> None:
    reservoir = offered(10, 10, 10, rng())
    drawn = reservoir.drawn(4, rng(1))
    assert len(set(drawn["labels"].tolist())) == 4
    assert drawn["images"][:, 0, 0, 0].tolist() == drawn["labels"].tolist()
    assert sorted(reservoir.drawn(99, rng(1))["labels"].tolist()) == list(range(10))
    assert not Reservoir().drawn(4, rng())


def test_it_comes_back_from_its_artefacts_to_the_bit() -> None:
    boxes = torch.rand(6, 3, 5)
    reservoir = Reservoir(4).with_batch(images(*range(6)), boxes, rng(), logits=torch.rand(6, 7))
    again = Reservoir.unpack(reservoir.pack())
    assert (again.capacity, again.num_seen) == (4, 6)
    assert all(again.samples[name].equal(tensor) for name, tensor in reservoir.samples.items())
    assert Reservoir.unpack(Reservoir(7).pack()) == Reservoir(7)
    assert list(reservoir.pack().parameter_sets) == ["buffer"]


def test_a_batch_unlike_what_it_holds_is_refused() -> None:
    reservoir = offered(4, 4, 4, rng())
    with pytest.raises(ValueError, match="as many of each"):
        reservoir.with_batch(images(1, 2), torch.tensor([1]), rng())
    with pytest.raises(ValueError, match=r"labels of a batch are \(B, 3, 5\) torch.float32, the reservoir holds"):
        reservoir.with_batch(images(1), torch.rand(1, 3, 5), rng())
    with pytest.raises(ValueError, match="images of a batch"):
        reservoir.with_batch(torch.zeros(1, 1, 3, 3), torch.tensor([1]), rng())
    with pytest.raises(ValueError, match="logits"):
        reservoir.with_batch(images(1), torch.tensor([1]), rng(), logits=torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("artefacts", "complaint"),
    [
        (Artefacts({}, {"capacity": 4, "num_seen": 2}), r"holds \[\], expected images, labels"),
        (Artefacts({}, {"capacity": 0, "num_seen": 0}), "capacity 0"),
        (Artefacts({}, {"capacity": 4, "num_seen": -1}), "num_seen is -1"),
        (Artefacts({"buffer": {"images": images(1)}}, {"capacity": 4, "num_seen": 1}), "expected images, labels"),
        (
            Artefacts({"buffer": {"images": images(1), "labels": torch.ones(1)}}, {"capacity": 4, "num_seen": 3}),
            "1 images, expected 3",
        ),
    ],
)
def test_a_damaged_state_is_refused(artefacts: Artefacts, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Reservoir.unpack(artefacts)


def test_a_round_is_known_again_in_whatever_order() -> None:
    once = fingerprint_of(images(1, 2, 3))
    assert fingerprint_of(images(3, 1, 2)) == once
    assert len({once, 0, fingerprint_of(images(1, 2)), fingerprint_of(images(1, 2, 4))}) == 4
    assert Reservoir.unpack(Reservoir(latest=once).pack()).latest == once
    packed = Reservoir(latest=once).pack()
    older = Artefacts(packed.parameter_sets, {key: fact for key, fact in packed.facts.items() if key != "latest"})
    assert Reservoir.unpack(older).latest == 0  # a device's, of before rounds were known again

"""What a client serves where the fleet lets it choose: of several models the one that proves best on its own evidence.

Evidence is labelled samples of the round that nothing was trained on, and replay, with the fine detail of these, of the
classes that the round didn't bring. Simulator and devices call ``choose`` with equal arguments, as they do a method's
halves.
Axes: N samples of evidence, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from replayfleet.federation.methods.kit.packing import Fact, declares, model_fields, served_name
from replayfleet.federation.methods.kit.records import Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.memory import Memory, drawable
from replayfleet.federation.methods.steps.replay import counts_for_distribution, draw_replay
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.models.specs import TaskSpec

DOWNLOADED, BEST = "downloaded", "best"
"""What a client serves: what the aggregator made for it, as in the paper, or what proves best on its own evidence."""

SERVED, OWN = "served", "own"
"""Candidates beside a download's: the model that is served, and the one that the client trained itself."""

NUM_REPLAYED = 500
"""Samples of evidence that are drawn, for all classes that the round didn't bring."""

MAX_CANDIDATES, MAX_NAME = 8, 32
"""More than any method has, and longer names: somebody lies."""

CLEAR = 1.0
"""Standard errors that a gain must exceed before a model is swapped."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a client can judge models on.

    Attributes:
        images: (N, C, H, W), real ones that nothing was trained on and replayed ones.
        labels: (N,) int64, on the CPU.
        seen: class id -> samples met so far: what a class counts for.
    """

    images: Tensor
    labels: Tensor
    seen: Mapping[int, int]

    def weights(self) -> Tensor:
        """Return what each sample counts for, (N,) float64 that sum to 1; a class without evidence has no part."""
        counts = torch.bincount(self.labels, minlength=max(self.seen) + 1)
        shares = torch.zeros(len(counts), dtype=torch.float64)
        for class_id, count in self.seen.items():
            shares[class_id] = count if counts[class_id] else 0
        shares = shares / shares.sum()
        return (shares / counts.clamp(min=1))[self.labels]


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, and why: all that a client tells of its choice.

    Attributes:
        name: of the candidate.
        scores: candidate -> share of the evidence that it answers rightly, classes weighted by what was seen of them.
        gain: score of the best less that of the one served before.
        error: standard error of that gain.
        lost: the client's own model is clearly better than what it downloaded to serve.
    """

    name: str
    scores: Mapping[str, float]
    gain: float
    error: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice, and the models that there were to choose from: candidate -> parameters."""

    served: Served
    candidates: Mapping[str, Parameters]

    @property
    def parameters(self) -> Parameters:
        """What is served."""
        return self.candidates[self.served.name]


def chooses(method: object) -> bool:
    """Whether clients of a fleet with this method serve what proves best; else they serve what they download."""
    return getattr(method, "serve", DOWNLOADED) == BEST


@dataclass(frozen=True, slots=True)
class Standing:
    """What a client has when a download arrives.

    Attributes:
        state: its memory, after the round that the download ends.
        own: what it trained in that round, as it was uploaded; None if it missed the round.
        served: what it serves, if that came after an earlier round; None before.
        held_out: labelled samples of that round, which nothing was trained on; None if there are none.
    """

    state: Memory
    own: Parameters | None = None
    served: Parameters | None = None
    held_out: RoundData | None = None


def choose(method: Any, client: Standing, download: Any, rng: torch.Generator, *, sampler: Sampler) -> Chosen | None:
    """Choose what a client serves once it has a download; None without evidence: what it downloaded.

    Args:
        method: of the fleet.
        client: what it has.
        download: of which each task model is a candidate, under the name of its set.
        rng: source of latents.
        sampler: runs sub-generators.
    """
    evidence = _gathered(method.task, client, rng, sampler)
    if evidence is None:
        return None
    judged = client.held_out is not None and len(client.held_out.labels) > 0
    own = client.own if judged else None  # replay alone can't tell what a model that learned from it forgot
    sets = download.pack().parameter_sets
    loaded = {name: sets.get(name) for name in model_fields(type(download)).values()}
    there = {name: one for name, one in {SERVED: client.served, **loaded, OWN: own}.items() if one}
    downloaded = served_name(type(download)) or ""
    before = SERVED if SERVED in there else downloaded
    return Chosen(best_served(method.task, there, before, evidence, downloaded), there)


def with_choice(upload: Any, served: Served | None) -> Any:
    """Return an upload that tells what was chosen of the download before it, if its record has a place for that."""
    return replace(upload, served=served) if declares(type(upload), CHOICE) else upload


def seed_of_evidence(run_seed: int, round_index: int, client_id: str) -> torch.Generator:
    """Return what replay is drawn with as evidence after a round."""
    return seeded_generator(run_seed, round_index, f"{client_id}/evidence")


def _gathered(spec: TaskSpec, client: Standing, rng: torch.Generator, sampler: Sampler) -> Evidence | None:
    """Return real samples of the classes that some were held out of, and replay of the others; None of nothing."""
    images, labels, seen = [], [], client.state.seen
    if client.held_out is not None and len(client.held_out.labels):
        images, labels = [client.held_out.images], [client.held_out.labels.cpu()]
    there = set(torch.cat(labels).tolist()) if labels else set()
    generators = {class_id: own.generator for class_id, own in client.state.sub_generators.items()}
    earlier = drawable(generators, {c: count for c, count in seen.items() if c not in there})
    if earlier:
        counts = counts_for_distribution(earlier, NUM_REPLAYED)
        replay = draw_replay(generators, counts, sampler, None, rng, spec=spec)
        images.append(_textured(replay.images, images[0], rng) if images else replay.images)
        labels.append(replay.labels.cpu())
    if not any(seen.get(class_id) for class_id in {*there, *earlier}):
        return None
    return Evidence(torch.cat(images), torch.cat(labels), seen)


def _textured(replay: Tensor, real: Tensor, rng: torch.Generator) -> Tensor:
    """Return replay (N, C, H, W) with the fine detail of real images, one drawn for each: what a 3 x 3 mean takes away.

    A model that saw real images of the round's classes alone learns that whatever looks real is one of these. Its
    answers to smooth replay don't show that; to real images of earlier classes, which nobody has, they would.
    """
    drawn = real[torch.randint(len(real), (len(replay),), generator=rng).to(real.device)]
    smooth = functional.avg_pool2d(functional.pad(drawn, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return (replay.to(real.device) + drawn - smooth).clamp(-1, 1)


def best_served(
    spec: TaskSpec, candidates: Mapping[str, Parameters], before: str, evidence: Evidence, downloaded: str = ""
) -> Served:
    """Return ``before``, which is served, unless the best is clearly better; then ``downloaded``, likewise.

    Args:
        spec: of the task.
        candidates: name -> parameters.
        before: which of them is served.
        evidence: to judge them by.
        downloaded: which of them was downloaded to be served; a name of none leaves ``Served.lost`` False.

    Raises:
        ValueError: There is no evidence, or ``before`` is no candidate.
    """
    if not len(evidence.labels) or before not in candidates:
        raise ValueError(f"{before!r} of {sorted(candidates)} on {len(evidence.labels)} samples, expected some of both")
    weights = evidence.weights()
    right = {
        name: (judge_with(spec, parameters)(evidence.images).argmax(dim=1).cpu() == evidence.labels).to(torch.float64)
        for name, parameters in candidates.items()
    }
    scores = {name: float((weights * own).sum()) for name, own in right.items()}
    best = max(candidates, key=lambda name: (scores[name], name == before))  # of equally good ones the first
    ahead = {name: _ahead(weights, right[best] - own) for name, own in right.items()}
    lasting = (name for name in (before, downloaded) if name in right and not _is_clear(*ahead[name]))
    lost = OWN in right and downloaded in right and _is_clear(*_ahead(weights, right[OWN] - right[downloaded]))
    return Served(next(lasting, best), scores, *ahead[before], lost)


def _is_clear(gain: float, error: float) -> bool:
    return gain > CLEAR * error


def _ahead(weights: Tensor, apart: Tensor) -> tuple[float, float]:
    """Return by how much one model's answers are better than another's, and the standard error of that.

    ``weights``: (N,), of samples; ``apart``: (N,), 1 where only the one is right, -1 where only the other is.
    """
    gain = float((weights * apart).sum())
    return gain, math.sqrt(float((weights.square() * (apart - apart.mean()).square()).sum()))


def _decoded(raw: Any, name: str) -> Served | None:
    """Return a choice that a client told, which may be hostile."""
    if raw is None:
        return None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("scores"), Mapping):
        raise ValueError(f"fact {name!r} is {str(raw)[:40]!r}, expected a choice of a model")
    scores = {str(candidate): _number(share, 0.0, name) for candidate, share in raw["scores"].items()}
    chosen, lost = raw.get("name"), raw.get("lost")
    if not isinstance(chosen, str) or chosen not in scores or len(scores) > MAX_CANDIDATES:
        raise ValueError(f"fact {name!r} names {str(chosen)[:40]!r}, expected one of at most {MAX_CANDIDATES}")
    if not isinstance(lost, bool) or any(len(candidate) > MAX_NAME for candidate in scores):
        raise ValueError(f"fact {name!r} doesn't say if it lost, or has a name of more than {MAX_NAME} characters")
    gain, error = _number(raw.get("gain"), -1.0, name), _number(raw.get("error"), 0.0, name)
    return Served(chosen, scores, gain, error, lost)


def _number(raw: Any, least: float, name: str) -> float:
    most = 1.0 + 1e-9  # sums of weights are off by rounding
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not least - 1e-9 <= raw <= most:
        raise ValueError(f"fact {name!r} holds {str(raw)[:40]}, expected a number from {least:g} to 1")
    return float(raw)


def _encoded(served: Served | None) -> Any:
    if served is None:
        return None
    return {
        "name": served.name,
        "scores": dict(served.scores),
        "gain": served.gain,
        "error": served.error,
        "lost": served.lost,
    }


CHOICE = Fact("served", _decoded, _encoded, optional=True)
"""A ``Served``, or None where nothing was chosen."""

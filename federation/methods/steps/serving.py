"""What a client serves where the fleet lets it choose: of several models the one that proves best on its own evidence.

There are two pieces of evidence: labelled samples of the round that nothing was trained on, beside replay, with the
fine detail of these, of the classes that the round didn't bring; and replay of all classes as it is drawn. What is
downloaded is served unless another model is clearly better on both. Simulator and devices call ``choose`` with equal
arguments, as they do a method's halves.
Axes: N samples of evidence, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.packing import Fact, declares, model_fields, served_name
from replayfleet.federation.methods.kit.records import Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.steps.looks import detailed
from replayfleet.federation.methods.steps.memory import Memory, drawable
from replayfleet.federation.methods.steps.replay import counts_for_distribution, draw_replay
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.models.specs import TaskSpec

DOWNLOADED, BEST = "downloaded", "best"
"""What a client serves: what the aggregator made for it, as in the paper, or what proves best on its own evidence."""

SERVED, OWN = "served", "own"
"""Candidates beside a download's: the model that is served, and the one that the client trained itself."""

NUM_REPLAYED = 500
"""Samples that are drawn for a piece of evidence, of all its classes together."""

MAX_CANDIDATES, MAX_NAME = 8, 32
"""More than any method has, and longer names: somebody lies."""

CLEAR = 1.5
"""Standard errors that a gain over the downloaded model must exceed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A piece of what a client can judge models on.

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
        scores: candidate -> share of the evidence that it answers rightly, classes weighted by what was seen of them;
            the mean over pieces of evidence.
        gain: score of this one less that of the one served before; 0 if that is none.
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
    if not evidence:
        return None
    judged = client.held_out is not None and len(client.held_out.labels) > 0
    own = client.own if judged else None  # replay alone can't tell what a model that learned from it forgot
    sets = download.pack().parameter_sets
    loaded = {name: sets.get(name) for name in model_fields(type(download)).values()}
    there = {name: one for name, one in {SERVED: client.served, **loaded, OWN: own}.items() if one}
    return Chosen(best_served(method.task, there, served_name(type(download)) or "", evidence), there)


def with_choice(upload: Any, served: Served | None) -> Any:
    """Return an upload that tells what was chosen of the download before it, if its record has a place for that."""
    return replace(upload, served=served) if declares(type(upload), CHOICE) else upload


def seed_of_evidence(run_seed: int, round_index: int, client_id: str) -> torch.Generator:
    """Return what replay is drawn with as evidence after a round."""
    return seeded_generator(run_seed, round_index, f"{client_id}/evidence")


def _gathered(spec: TaskSpec, client: Standing, rng: torch.Generator, sampler: Sampler) -> list[Evidence]:
    """Return pieces of evidence: none, replay alone, or real samples with replay of other classes, and replay."""
    seen, generators = client.state.seen, {c: own.generator for c, own in client.state.sub_generators.items()}
    real = client.held_out if client.held_out is not None and len(client.held_out.labels) else None
    there = set(real.labels.tolist()) if real is not None else set()

    def replay(classes: Mapping[int, int]) -> RoundData:
        counts = counts_for_distribution(drawable(generators, classes), NUM_REPLAYED)
        drawn = draw_replay(generators, counts, sampler, None, rng, spec=spec)
        return RoundData(drawn.images, drawn.labels)

    found = [] if real is None else [real]
    earlier = {class_id: count for class_id, count in seen.items() if class_id not in there}
    if real is not None and drawable(generators, earlier):
        drawn = replay(earlier)  # answers to smooth replay don't show what those to real images of these classes would
        found.append(RoundData(detailed(drawn.images, real.images, rng), drawn.labels))
    pieces = [found] if found else []
    if drawable(generators, seen):
        pieces.append([replay(seen)])
    return [
        Evidence(torch.cat([part.images for part in piece]), torch.cat([part.labels.cpu() for part in piece]), seen)
        for piece in pieces
        if any(seen.get(class_id) for part in piece for class_id in part.labels.tolist())
    ]


def best_served(
    spec: TaskSpec, candidates: Mapping[str, Parameters], downloaded: str, evidence: Sequence[Evidence]
) -> Served:
    """Return ``downloaded``, unless another is clearly better on each piece of evidence; of several, the best.

    That what is served stays without a clear gain was the other rule. It cost accuracy, for that model knows none of
    the classes that the round brought, which evidence didn't always show (docs/serving.md).

    Args:
        spec: of the task.
        candidates: name -> parameters; that of ``SERVED`` is the one that was served before.
        downloaded: which of them was downloaded to be served.
        evidence: pieces to judge them by.

    Raises:
        ValueError: There is no evidence, or ``downloaded`` is no candidate.
    """
    if not evidence or not all(len(piece.labels) for piece in evidence) or downloaded not in candidates:
        sizes = [len(piece.labels) for piece in evidence]
        raise ValueError(f"{downloaded!r} of {sorted(candidates)} on {sizes} samples, expected some of both")
    right = {
        name: [
            (judge_with(spec, parameters)(piece.images).argmax(dim=1).cpu() == piece.labels).to(torch.float64)
            for piece in evidence
        ]
        for name, parameters in candidates.items()
    }
    weights = [piece.weights() for piece in evidence]

    def is_clear(name: str) -> bool:
        pairs = zip(weights, right[name], right[downloaded], strict=True)
        return all(_is_clear(*_ahead(each, own - other)) for each, own, other in pairs)

    whole, answers = torch.cat(weights) / len(weights), {name: torch.cat(own) for name, own in right.items()}
    scores = {name: float((whole * own).sum()) for name, own in answers.items()}
    better = [name for name in candidates if is_clear(name)]
    chosen = max(better, key=scores.__getitem__, default=downloaded)  # of equally good ones the first
    gained = _ahead(whole, answers[chosen] - answers[SERVED]) if SERVED in answers else (0.0, 0.0)
    return Served(chosen, scores, *gained, lost=OWN in better)


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

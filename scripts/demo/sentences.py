"""What happened, in words: every number in them comes from the facts."""

from __future__ import annotations

from collections.abc import Sequence

from replayfleet.federation.service.words import megabytes, percent
from replayfleet.scripts.demo.facts import Facts
from replayfleet.scripts.launch.record import ClientRound

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def headline(facts: Facts) -> tuple[str, str]:
    """Return two sentences: what personalised models reach beside FedAvg's, and what didn't have to travel."""
    return _accuracy_sentence(facts), _traffic_sentence(facts)


def summary(facts: Facts) -> list[str]:
    """Return the run in a few lines, for a terminal."""
    sent, held = facts.sub_generators()
    traffic = facts.traffic()
    lines = [
        *headline(facts),
        f"sub-generators sent: {sent} of {held}; bytes: {megabytes(traffic.sent)} of {megabytes(traffic.everything)}",
    ]
    return [*lines, *(revisit_sentence(facts, index) for index in facts.revisits())]


def revisit_sentence(facts: Facts, index: int) -> str:
    """Say what the clients sent in a round that brought only classes that they knew."""
    clients = facts.revisits()[index]
    begin = f"Round {index} brings back classes that every client has met before"
    if len(clients) < len(facts.record.clients):
        begin = f"Round {index} brings back known classes to {spelt(len(clients))} of the clients"
    quiet = sum(client.sent == 0 for client in clients)
    if quiet == len(clients):
        why = "no drift" if facts.gated else "what they add to what the aggregator holds is little"
        return f"{begin}: {why}, so no sub-generator is uploaded."
    if not facts.gated:
        return f"{begin}: sub-generators of this method learn from every round, and travel again when they tell more."
    return f"{begin}: {spelt(quiet)} of {spelt(len(clients))} upload no sub-generator, the others found theirs drifted."


def is_quiet(clients: Sequence[ClientRound]) -> bool:
    """Whether none of these clients uploaded a sub-generator."""
    return all(client.sent == 0 for client in clients)


def spelt(number: int) -> str:
    """Return a small number as a word."""
    return _NUMBERS[number] if 0 <= number < len(_NUMBERS) else str(number)


def _counted(number: int, noun: str) -> str:
    return f"{spelt(number)} {noun}{'' if number == 1 else 's'}"


def _accuracy_sentence(facts: Facts) -> str:
    own, fedavg = facts.final
    points = 100 * (own - fedavg)
    rounds, clients = len(facts.rounds), len(facts.record.clients)
    verdict = "no more"
    if abs(points) >= 0.05:
        verdict = f"{abs(points):.1f} points {'more' if points > 0 else 'less'}"
    return (
        f"After {_counted(rounds, 'round')} the {_counted(clients, 'personalised model')} recognise {percent(own)} of "
        f"everything that their clients have met so far, {verdict} than the one model that FedAvg learns from the same "
        f"stream ({percent(fedavg)})."
    )


def _traffic_sentence(facts: Facts) -> str:
    traffic = facts.traffic()
    sent, held = facts.sub_generators()
    sentence = (
        f"Only changed sub-generators travelled, {sent} uploads instead of {held}, so the fleet exchanged "
        f"{megabytes(traffic.sent)} instead of {megabytes(traffic.everything)} "
        f"({100 * traffic.saved_share:.0f} % less)"
    )
    quiet = [i for i, clients in facts.revisits().items() if is_quiet(clients)]
    if quiet:
        sentence += f", and the return of known classes in round {quiet[0]} cost no sub-generator at all"
    return f"{sentence}."

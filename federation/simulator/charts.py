"""Accuracy and training loss over rounds as pictures.

Matplotlib is imported when the first chart is drawn, without its global state.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replayfleet.federation.service.pages.charts import percent_axes, round_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart with every kind of colour vision."""

_LINES = ("-", "--", ":")
"""Taken in turn when the colours begin again."""

_MARKERS_UP_TO = 40
"""Rounds; more of them, and dots would cover the line."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run.

    Attributes:
        label: what the legend says, usually the method's name.
        accuracy: Acc^t in [0, 1], one per round from round 0.
        clients: client id (or seed) -> a_i^t; drawn as a band between the worst and the best.
    """

    label: str
    accuracy: Sequence[float]
    clients: Mapping[str, Sequence[float]] = field(default_factory=dict)


@contextlib.contextmanager
def _as_it_comes() -> Iterator[None]:
    """Draw as Matplotlib comes: what a program or its user chose for it may need a LaTeX that isn't there."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        yield


@_as_it_comes()
def accuracy_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    changes: Sequence[int] = (),
    change_name: str = "",
    band: str = "client",
    measure: str = "accuracy",
) -> bytes:
    """Return a PNG: every run's accuracy on the clients' cumulative test sets, after each round's aggregation.

    Args:
        curves: at least one; the first is drawn on top.
        title: one line.
        changes: rounds at which the streams change, marked by dotted lines just before them.
        change_name: what the legend calls those.
        band: what the keys of ``Curve.clients`` are.
        measure: what the curves show.

    Raises:
        ValueError: There is no curve.
    """
    if not curves:
        raise ValueError("a chart needs at least one curve")
    figure = _figure(len(curves))
    axes = percent_axes(figure, max(len(curve.accuracy) for curve in curves), changes, change_name)
    for place, curve in enumerate(curves):
        _draw(axes, curve, place, zorder=3 + len(curves) - place)
    axes.set_ylabel(f"{measure} on all classes met so far [%]")
    if any(curve.clients for curve in curves):
        axes.set_xlabel(f"round   (bands: from the worst {band} to the best)")
    return _png(figure, axes, title)


@_as_it_comes()
def loss_chart(
    losses: Sequence[tuple[str, Sequence[Sequence[float]]]],
    *,
    title: str,
    changes: Sequence[int] = (),
    change_name: str = "",
) -> bytes | None:
    """Return a PNG: how runs' training losses fall within each round, and whether they still do at its end.

    Args:
        losses: runs, each with what it's called and each round's losses, as ``records.losses``; None if all are empty.
        title: one line.
        changes: rounds at which the streams change.
        change_name: what the legend calls those.
    """
    losses = [(label, rounds) for label, rounds in losses if any(rounds)]
    if not losses:
        return None
    figure = _figure(len(losses))
    axes = round_axes(figure, max(len(rounds) for _, rounds in losses), changes, change_name)
    for place, (label, rounds) in enumerate(losses):
        at: list[float] = []
        values: list[float] = []
        ends = [epochs[-1] for epochs in rounds if epochs]
        for index, epochs in enumerate(rounds):  # a line for each round, within its width
            last = len(epochs) - 1
            at += [index - 0.4 + 0.8 * epoch / last if last else index for epoch in range(len(epochs))] + [math.nan]
            values += [*epochs, math.nan]
        said = f"{label}   (last epochs: mean {sum(ends) / len(ends):.3g}, last {ends[-1]:.3g})"
        colour, style = _COLOURS[place % len(_COLOURS)], _LINES[place // len(_COLOURS) % len(_LINES)]
        marker = "." if any(len(epochs) == 1 for epochs in rounds) else None  # a line of one point can't be seen
        axes.plot(at, values, color=colour, linestyle=style, marker=marker, linewidth=1.3, label=said)
    if min(value for _, rounds in losses for epochs in rounds for value in epochs) > 0:
        axes.set_yscale("log")
    axes.set_ylabel("training loss, mean of an epoch")
    axes.set_xlabel("round   (within it: from its first epoch to its last)")
    return _png(figure, axes, title)


def _figure(num_curves: int) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(9, 4.8 + 0.12 * max(0, num_curves - 4)), dpi=130, layout="constrained")


def _png(figure: Figure, axes: Axes, title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    axes.set_title(title, loc="left", fontsize=11, wrap=True)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=9, handlelength=4
    )
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(picture, format="png")
    return picture.getvalue()


def _draw(axes: Axes, curve: Curve, place: int, *, zorder: float) -> None:
    colour, style = _COLOURS[place % len(_COLOURS)], _LINES[place // len(_COLOURS) % len(_LINES)]
    rounds = range(len(curve.accuracy))
    percent = [100 * value for value in curve.accuracy]
    marker = "o" if len(percent) <= _MARKERS_UP_TO else None
    mean = sum(percent) / len(percent)
    label = f"{curve.label}   (mean {mean:.1f} %, last {percent[-1]:.1f} %)"
    (line,) = axes.plot(rounds, percent, color=colour, marker=marker, markersize=4.5, linewidth=2, label=label)
    line.set(zorder=zorder, clip_on=False, linestyle=style)  # a dot at 100 % stays whole
    if len(curve.clients) > 1:
        by_round = list(zip(*curve.clients.values(), strict=True))
        low, high = [100 * min(values) for values in by_round], [100 * max(values) for values in by_round]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.13, linewidth=0, zorder=2)

"""Help in groups: what every program's command line looks like, whether its options are settings or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

HELP = {"help_option_names": ["-h", "--help"]}

CONNECTION = "Connection"
ADVANCED = "Advanced"
_OTHER = "Other"


class GroupedCommand(click.Command):
    """A command whose help shows its settings in groups, the connection first and what few people need last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, parameters in grouped(self.get_params(ctx)).items():
            rows = [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(group or "Options"):
                    formatter.write_dl(rows)


class Program(click.Group):
    """A group of commands whose help shows settings in groups."""

    command_class = GroupedCommand


class OptionOfGroup(click.Option):
    """An option that stands under a heading of the help.

    Args:
        words: click's.
        group: the heading.
    """

    def __init__(self, *words: Any, group: str, **more: Any) -> None:
        super().__init__(*words, **more)
        self.group = group


def grouped(parameters: list[click.Parameter]) -> dict[str, list[click.Parameter]]:
    """Return group -> options: the connection first, then in the order of the fields, then ``ADVANCED`` and others.

    Where no option has a group there is one, and its name is empty.
    """
    found: dict[str, list[click.Parameter]] = {}
    other = _OTHER if any(isinstance(parameter, OptionOfGroup) for parameter in parameters) else ""
    for parameter in parameters:
        if isinstance(parameter, click.Option):
            found.setdefault(getattr(parameter, "group", other), []).append(parameter)
    order = {CONNECTION: 0, ADVANCED: 2, _OTHER: 3}
    return {
        group: sorted(found[group], key=_is_optional) for group in sorted(found, key=lambda group: order.get(group, 1))
    }


def _is_optional(parameter: click.Parameter) -> bool:
    return not getattr(parameter, "must_be_given", False)


def joined(words: Sequence[str]) -> str:
    """Return ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))

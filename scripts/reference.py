"""``make reference``: docs/reference/<program>.md, made from its options, and docs/methods/index.md, from the methods.

Options that are settings stand in tables by group; a test holds that the pages are those that the code makes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from replayfleet.federation.help_groups import grouped
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.command import SettingOption, facts

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
METHODS_INDEX = FOLDER.parent / "methods" / "index.md"

PROGRAMS = {
    "edge-client": {"": "replayfleet.edge_client.cli:cli"},
    "aggregator": {"": "replayfleet.aggregator.cli:cli"},
    "fleet-sim": {
        "METHOD": "replayfleet.federation.simulator.cli:fleet_sim",
        "table": "replayfleet.federation.simulator.tables.command:table",
    },
    "model-export": {"": "replayfleet.export.cli:main"},
    "replayfleet": {"demo": "replayfleet.scripts.demo.__main__:demo", "": "replayfleet.cli:cli"},
}
"""Program -> first word -> its command; a word that stands here isn't looked for below another one."""

_WHERE = """\
Where a command takes `--config`, each option can stand in three places; the first that says something counts:

1. on the command line, `--health-port 9101`;
2. in the environment, `REPLAYFLEET_HEALTH_PORT=9101`; where an option can be given several times, its values are
   separated by spaces;
3. in the file, `health_port = 9101`.

Other commands are told on the command line only. A value that can't be used is an error that says where it was written.
"""


def page(program: str) -> str:
    """Return a program's page."""
    parts = [f"# {program}\n", "Made from the code by `make reference`.\n"]
    commands = [found for word, place in PROGRAMS[program].items() for found in _commands(_at(place), program, word)]
    if any(isinstance(parameter, SettingOption) for _, command in commands for parameter in command.params):
        parts.append(_WHERE)
    for words, command in commands:
        parts.append(f"## {words}\n")
        if command.help:
            parts.append(_as_markdown(command.help))
        parts += _tables(words, command)
    return "\n".join(parts)


def methods_index() -> str:
    """Return the page that says of each method what it is, whether clients keep samples, and where it runs."""
    lines = ["# Methods\n", "Made from the code by `make reference`. `--set` and variants: each method's page.\n"]
    lines += ["| method | what it is | clients keep samples | deploys, not only simulated |", "|---|---|---|---|"]
    for name, kind in sorted(METHODS.items()):
        title = (inspect.getdoc(inspect.getmodule(kind)) or "").partition("\n")[0]
        marks = ("yes" if fact else "" for fact in (kind.stores_data, kind.deployable))
        lines.append(f"| [`{name}`]({name}.md) | {title} | {' | '.join(marks)} |")
    return "\n".join([*lines, "", "```{toctree}\n:hidden:\n:maxdepth: 1\n:glob:\n\n*\n```\n"])


def _at(place: str) -> click.Command:
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, click.Command)
    return found


def _commands(command: click.Command, program: str, word: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield " ".join(filter(None, (program, word))), command
        return
    for name in (one for one in command.list_commands(click.Context(command)) if one not in PROGRAMS.get(program, {})):
        found = command.get_command(click.Context(command), name)
        assert found is not None
        yield from _commands(found, f"{program} {name}", "")


def _as_markdown(text: str) -> str:
    """Return a command's help; what click leaves as it is written becomes code."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if paragraph.startswith("\b\n"):
            paragraphs.append(f"```text\n{paragraph[2:]}\n```\n")
        else:
            paragraphs.append(" ".join(paragraph.split()) + "\n")
    return "\n".join(paragraphs)


def _tables(words: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=words)
    for group, parameters in grouped(command.get_params(context)).items():
        rows = [row for parameter in parameters if (row := _row(parameter, context)) is not None]
        if rows:
            heading = f"**{group}**\n\n" if group else ""
            yield heading + "| option | what it does | values |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _row(parameter: click.Parameter, context: click.Context) -> str | None:
    record = parameter.get_help_record(context)
    if record is None or "--help" in parameter.opts:
        return None
    names, text = record
    # What stands in brackets at the end is default and range.
    text, _, values = text.partition("  [")
    values = values.removesuffix("]").replace("]  [", "; ")
    if isinstance(parameter, SettingOption):
        assert parameter.setting.option is not None
        text, values = parameter.setting.option.help, facts(parameter.setting)
    cells = (f"`{names}`", text, values)
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def main() -> None:
    """Read the command line, which has no options but --help, and write all pages."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for program in PROGRAMS:
        (FOLDER / f"{program}.md").write_text(page(program), encoding="utf-8")
    METHODS_INDEX.write_text(methods_index(), encoding="utf-8")


if __name__ == "__main__":
    main()

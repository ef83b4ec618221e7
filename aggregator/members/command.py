"""``aggregator enroll``, ``renew`` and ``revoke``; what they need is imported when they run."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replayfleet.federation.help_groups import GroupedCommand
from replayfleet.federation.paths import ANY_PATH, FOLDER
from replayfleet.federation.service.command import ASKS, agreed
from replayfleet.federation.service.words import visible

if TYPE_CHECKING:
    from replayfleet.aggregator.members.enrolment import Done

_DATA_DIR = click.option("--data-dir", type=FOLDER, required=True, help="The data dir of `aggregator serve`.")
_TERMS = (
    click.option("--request", type=ANY_PATH, help="Sign this certificate request (CSR): the key stays on the device."),
    click.option("--signing-key", type=ANY_PATH, help="Public Ed25519 key, PEM, that the device made for signing."),
    click.option("--out", type=FOLDER, help="Identity folder to write.  [default: one in the data dir]", metavar="DIR"),
    click.option("--days", type=click.IntRange(1, 3650), default=825, show_default=True, help="How long it is valid."),
)


def _with_terms(command: Any) -> Any:
    for option in reversed(_TERMS):
        command = option(command)
    return command


@click.command(cls=GroupedCommand)
@click.argument("client")
@_DATA_DIR
@click.option("--fleet", help="The fleet's name, if no aggregator has run on the data dir yet.  [default: fleet]")
@click.option("--host", "hosts", multiple=True, help="Name or address by which devices reach the broker; repeatable.")
@click.option(
    "--broker-dir",
    type=ANY_PATH,
    metavar="DIR",
    help="Where the broker's folder lies on its machine.  [default: /etc/mosquitto/replayfleet]",
)
@_with_terms
def enroll(
    client: str, data_dir: Path, fleet: str | None, hosts: tuple[str, ...], broker_dir: Path | None, **terms: Any
) -> None:
    """Take CLIENT into the fleet: its keys, or a certificate for its request, and the broker's rules.

    The first time the fleet's authority is made, with certificates for aggregator and broker. A CLIENT called operator
    labels by hand.
    """
    from replayfleet.aggregator.members.enrolment import check_broker, check_fleet, opened, read_terms

    wanted = read_terms(client, **terms, enrols=True)
    with opened(data_dir, check_fleet(fleet), check_broker(hosts, broker_dir), new=True) as registry:
        if registry.is_new:
            click.echo(
                f"a new fleet begins in {data_dir}, with an authority and keys of its own; if {registry.fleet} exists "
                "already, this is the wrong --data-dir: copy nothing from it"
            )
        _tell(registry.enrol(client, wanted), f"{client} is a member of fleet {registry.fleet}")


@click.command(cls=GroupedCommand)
@click.argument("client")
@_DATA_DIR
@click.option(
    "--overlap-days", type=click.IntRange(0, 365), default=14, show_default=True, help="How long the former one counts."
)
@_with_terms
def renew(client: str, data_dir: Path, overlap_days: int, **terms: Any) -> None:
    """Give CLIENT a new certificate; the former one counts for a while longer."""
    from replayfleet.aggregator.members.enrolment import opened, read_terms

    wanted = read_terms(client, **terms)
    with opened(data_dir) as registry:
        _tell(registry.renew(client, wanted, overlap_days), f"{client} has a new certificate")


@click.command(cls=GroupedCommand)
@click.argument("client")
@_DATA_DIR
@ASKS[0]
@ASKS[1]
def revoke(client: str, data_dir: Path, *, yes: bool, dry_run: bool) -> None:
    """Shut CLIENT out: its certificates and its signature count no more."""
    from replayfleet.aggregator.members.broker_files import AGGREGATOR
    from replayfleet.aggregator.members.enrolment import ROLES, check_client, opened

    check_client(client)
    with opened(data_dir) as registry:
        registry.member(client)
    upload = "" if client in ROLES else ", and its upload of the open round is taken out"
    until = "; no round goes on until then" if client == AGGREGATOR else ""
    plan = (
        f"{client} is shut out: its certificates and its signature count no more{upload}; `aggregator enroll {client}` "
        f"takes it in again, with other keys{until}"
    )
    if not agreed(plan, yes=yes, dry_run=dry_run):  # nobody waits for the lock while somebody thinks
        return
    with opened(data_dir) as registry:
        _tell(registry.revoke(client), f"{client} is revoked")


def _tell(done: Done, what: str) -> None:
    """Say exactly what to copy where."""
    from replayfleet.aggregator.members.broker_files import AGGREGATOR, CONFIG, CONFIG_2_1, OPERATOR
    from replayfleet.aggregator.members.enrolment import LOCAL

    newest = done.member.certificates[0]
    lines = [what if done.folder is None else f"{what}; its certificate is valid until {day(newest.expires_at)}"]
    if done.excluded:
        lines.append(f"it is still excluded; `aggregator readmit {done.member.client}` lets it take part")
    former = [each for each in done.member.certificates[1:] if each.ends_at > newest.issued_at]
    if former:
        until = day(max(each.ends_at for each in former))
        lines.append(f"the former one counts until {until}; `aggregator clients` after that day ends it at the broker")
    if done.own_identity is not None:
        lines.append(f"aggregator: start `aggregator serve` with --identity {done.own_identity}")
    if done.folder is not None and done.member.client != AGGREGATOR:
        keys = "remove them here, and keep" if done.has_keys else "beside the keys that were made there, which stay at"
        whose, starts = ("operator:", "studio") if done.member.client == OPERATOR else ("device:", "start")
        lines.append(f"{whose.ljust(12)}copy {done.folder}/* into its identity folder; {keys} mode 600")
        lines.append(f"            start `edge-client {starts}` with --identity and that folder")
    copy = what_to_copy(done.broker)
    if done.returns:
        lines.append(f"broker:     {copy}; then RESTART it (systemctl restart mosquitto); don't reload it:")
        lines.append(f"            a connection made with a revoked certificate would be {done.member.client}'s again")
    else:
        lines.append(f"broker:     {copy}; then reload it")
        lines.append("            (systemctl reload mosquitto, or kill -HUP), which ends no connection; restart it")
        lines.append("            where `enroll` asked for that and it hasn't been done yet")
    if done.lost_hosts:
        lost, names = ", ".join(done.lost_hosts), ", ".join(done.hosts)
        lines.append(f"            its certificate is no longer for {lost}, by which no device trusts it then, but for")
        lines.append(f"            {names} alone; name all by which devices reach it, each with --host")
    if done.hosts == LOCAL:
        lines.append("            its certificate is for this machine alone; enroll with --host NAME makes another")
    lines.append(f"            the first time: {CONFIG} (for mosquitto 2.1: {CONFIG_2_1}) into conf.d, and a restart")
    if done.strangers:
        lines.append(f"not enrolled, and no longer counted: {', '.join(map(visible, done.strangers))}")
    click.echo("\n".join(lines))


def what_to_copy(broker: Path) -> str:
    """Return what is to be done with the folder that the broker gets, before it is reloaded."""
    from replayfleet.aggregator.members.broker_files import CONFIG, place_in

    place = place_in(broker / CONFIG)
    here = place == str(broker.absolute())
    return "its files are in place" if here else f"copy {broker}/* to {place}/ there, the key for its user alone"


def day(at: float) -> str:
    """Return the day of a Unix time, in UTC."""
    return datetime.fromtimestamp(at, tz=timezone.utc).strftime("%Y-%m-%d")

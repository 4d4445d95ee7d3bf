"""``farandole run``: create a run, show one, invite to one, its rounds; ``farandole lora``: adapters of a base."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from farandole.protocol.wire.errors import FarandoleError, ManifestError
from farandole.training.base.errors import how_to_add

from ...base.errors import Exit
from ...base.figures import count, duration, size
from ...base.settings import NodeSettings
from .options import AsJson, Home, takes_settings
from .output import call_node, print_answer, read_manifest, say_chosen, say_warnings, split_source, write_manifest

Who = Annotated[
    list[str], typer.Argument(metavar="PEER_ID|INVITE...", help="Members by their peer ids, or whole invites.")
]

run_app = typer.Typer(help="Create a run, inspect it, invite others.", no_args_is_help=True)
lora_app = typer.Typer(
    help="Fine-tune a model together: adapters (LoRA) of a base model that each member has.", no_args_is_help=True
)


@run_app.command("create")
@takes_settings("allow_model")
def create_run(
    settings: NodeSettings,
    run_file: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.TOML",
            help="The run's settings. Two lines are enough: name = 'my run', model = '3M'. See examples/run.toml.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write the manifest.", show_default="beside RUN.TOML")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an existing manifest; this makes a different run.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Sign a run file with this node's key: the manifest, which never changes again.

    What the file leaves open is chosen by measurements, for lines of 20 Mbit/s; the choices and reasons are printed.

    Example: [cyan]farandole run create run.toml[/cyan], then [cyan]farandole join run.manifest[/cyan]
    """
    path = out or run_file.with_suffix(".manifest")
    if path.exists() and not force:
        raise ManifestError(f"{path} is there already; --force replaces it (by another run), --out writes elsewhere")
    sign_run_file(settings, run_file, path, as_json=as_json)


def sign_run_file(
    settings: NodeSettings, run_file: Path, path: Path, *, as_json: bool = False, is_started: bool = False
) -> None:
    """Write the signed manifest of a run file to ``path``, and print it and what was chosen."""
    from farandole.protocol.planning.planning import complete, given_by
    from farandole.protocol.run.manifest import sign_manifest

    from ...base.config.toml_file import read_toml
    from ...base.identity import load_or_create_key
    from ...base.requirements import check_times
    from ...store.run_file import manifest_of_file

    file = read_toml(run_file)
    written = manifest_of_file(file, time.time(), settings.allow_model)
    given = given_by(file.values)
    manifest = complete(written, given)
    check_times(manifest)
    signed = sign_manifest(manifest, load_or_create_key(settings.key))
    say_chosen(written, manifest, given)
    write_manifest(path, signed, settings.home, as_json, is_started=is_started)


@run_app.command("show")
def show_run(
    source: Annotated[str, typer.Argument(metavar="MANIFEST|INVITE", help="A manifest file, or an invite.")],
    as_json: AsJson = False,
) -> None:
    """Verify a manifest or an invite, and print its contents.

    Example: [cyan]farandole run show run.manifest[/cyan]
    """
    import msgspec

    from farandole.protocol.run.invite import decode_invite
    from farandole.protocol.wire.identity import peer_id_of

    invite, path = split_source(source)
    if invite is not None:
        decoded = decode_invite(invite)
        run_id, admission = decoded.run_id.hex(), decoded.admission.hex()
        lines = [f"invite to run {run_id}", *(f"  dials {address}" for address in decoded.addresses)]
        if admission:
            lines.append("  with an admission")
        told = {"run_id": run_id, "addresses": list(decoded.addresses), "admission": admission}
        print_answer(as_json, told, "\n".join(lines))
    elif path is not None:
        manifest, signed = read_manifest(path)
        settings: dict[str, Any] = msgspec.to_builtins(manifest)
        if manifest.model.external:
            for each_members_own in ("tokenizer", "data", "inner", "pipeline", "audits"):
                del settings[each_members_own]
        run_id, creator = signed.run_id.hex(), peer_id_of(signed.creator)
        lines = [f"run {run_id}", f"by  {creator}"]
        # As in a run file: plain values first, then the sections.
        for name, value in sorted(settings.items(), key=lambda item: isinstance(item[1], dict)):
            if isinstance(value, dict):
                lines += [f"[{name}]", *(f"  {key} = {json.dumps(entry)}" for key, entry in value.items())]
            else:
                lines.append(f"{name} = {json.dumps(value)}")
        print_answer(as_json, {"run_id": run_id, "creator": creator, "manifest": settings}, "\n".join(lines))


@run_app.command("invite")
def make_invite(
    home: Home,
    address: Annotated[
        list[str] | None,
        typer.Option(
            "--address", metavar="MULTIADDR", help="Address that newcomers dial first (ends in /p2p/...); repeatable."
        ),
    ] = None,
    uses: Annotated[
        int, typer.Option("--uses", min=1, help="In a run of invited members: how many may join with it.")
    ] = 1,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="In such a run: for how long, such as 12h or 7d.")
    ] = "7d",
    quota: Annotated[
        int, typer.Option("--quota", min=0, help="In such a run: how many others each of them may invite.")
    ] = 0,
) -> None:
    """Print an invite: one line, all that others need to join.

    Examples: [cyan]farandole run invite[/cyan] (where a node of the run is running);
    [cyan]farandole run invite --uses 5 --expires 2d[/cyan] (in a run of invited members)
    """
    from farandole.protocol.run.invite import decode_invite

    from ...join.invites import own_invite, warnings_about

    invite = own_invite(home, address, uses=uses, seconds=parse_duration(expires), quota=quota)
    if not decode_invite(invite).admission and (uses, expires, quota) != (1, "7d", 0):
        typer.echo(
            "warning: this run is open to all, so its invites do not expire, and any number may join with one: "
            '--uses, --expires and --quota need admission = "invited" in the run file',
            err=True,
        )
    typer.echo(invite)
    doubted = call_node(home, "status", max_members=0).get("doubted_addresses", ())
    say_warnings(warnings_about(decode_invite(invite).addresses, doubted))


@run_app.command("members")
def show_members(home: Home, as_json: AsJson = False) -> None:
    """List the members of the running node's run, and who invited each.

    Example: [cyan]farandole run members[/cyan]
    """
    rows: list[dict[str, Any]] = call_node(home, "roster")
    lines = []
    for row in rows:
        role = "creator" if row["is_creator"] else f"invited by {row['invited_by']}" if row["invited_by"] else ""
        name = f' "{row["name"]}"' if row["name"] else ""
        lines.append(f"{row['peer_id']}{name}  {'live' if row['is_live'] else 'away'}  {role}".rstrip())
    print_answer(as_json, rows, "\n".join(lines) or "no member is known yet")


@run_app.command("revoke")
def revoke(
    home: Home,
    who: Who,
    keep_invite: Annotated[
        bool, typer.Option("--keep-invite", help="The invite that a removed member came by still admits others.")
    ] = False,
) -> None:
    """Remove members from a run of invited members, and those whom they invited; or make an invite useless.

    It needs the creator's node. Others that came by a member's invite stay; an invite that is named ends them too.

    Example: [cyan]farandole run revoke 12D3KooW...[/cyan]
    """
    for row in _tell_admission(home, who, is_admitted=False, keeps_invites=keep_invite):
        until = time.strftime("%Y-%m-%d", time.localtime(row["expires_at"]))
        others = f"; {row['others']} that came by it stay" if row["others"] else ""
        typer.echo(
            f"{row['peer_id']} came by an invite of {row['invited_by']}, valid until {until}, which "
            f"{'stays valid' if keep_invite else 'admits nobody any more'}{others}"
        )
    typer.echo("revoked; `farandole run admit` with the same words takes it back")


@run_app.command("admit")
def admit(home: Home, who: Who) -> None:
    """Undo [cyan]farandole run revoke[/cyan], or decide for a member where others refuse it as its seat is taken.

    Example: [cyan]farandole run admit 12D3KooW...[/cyan]
    """
    _tell_admission(home, who, is_admitted=True)
    typer.echo("admitted again")


@run_app.command("audit")
@takes_settings("invite", "listen", "data", "data_field", "tokenizer")
def audit(settings: NodeSettings, as_json: AsJson = False) -> None:
    """Replay a recent round of each member, without joining the run, and check that it is as its author says.

    The run must have audits, and this machine the run's text and a processor like the members'. Exit code 8 if a round
    is not what its author has committed to. Without an invite it is the run of the node that runs here.

    Example: [cyan]farandole run audit farandole1... --data ~/texts[/cyan]
    """
    from functools import partial

    import msgspec

    from ...base.nurseries import run_to_end
    from ...inspect.audit import audit_run
    from ...join.invites import own_invite

    settings = replace(settings, invite=settings.invite or own_invite(settings.home, uses=0))
    rows = run_to_end(partial(audit_run, settings, partial(typer.echo, err=True)))
    lines = [f"{row.peer_id}  round {row.round}  {row.verdict}  {row.detail}".rstrip() for row in rows]
    print_answer(as_json, msgspec.to_builtins(rows), "\n".join(lines) or "no member has committed to a round")
    if any(row.verdict in ("wrong", "broken") for row in rows):
        raise typer.Exit(Exit.VERDICT_FAILED)


@run_app.command("notice")
def notify(
    home: Home,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="For all members, in ASCII.")] = "",
    pause: Annotated[bool, typer.Option("--pause", help="All members stop training until --resume.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="They train again.")] = False,
    stop: Annotated[
        bool,
        typer.Option("--stop", help="They save their weights and end training, but stay online to give them."),
    ] = False,
) -> None:
    """Tell all members of the run something, or have them pause, resume or stop training.

    It needs the creator's node. A pause ends by itself a week after that node was last on. A member's owner may train
    on with [cyan]farandole join --ignore-notices[/cyan].

    Examples: [cyan]farandole run notice "a new release is out"[/cyan];
    [cyan]farandole run notice --pause "back at noon"[/cyan]
    """
    deeds = [name for name, is_wanted in (("pause", pause), ("resume", resume), ("stop", stop)) if is_wanted]
    if len(deeds) > 1 or not (deeds or message):
        raise typer.BadParameter("a message, or one of --pause, --resume and --stop, or both")
    call_node(home, "notice", action=deeds[0] if deeds else "say", text=message)
    typer.echo("published: connected members hear of it within seconds")


def _tell_admission(
    home: Path, who: list[str], *, is_admitted: bool, keeps_invites: bool = False
) -> list[dict[str, Any]]:
    from farandole.protocol.run.invitations import decode_secret
    from farandole.protocol.run.invite import decode_invite, is_invite
    from farandole.protocol.wire.identity import public_key_of

    keys = []
    for each in who:
        if not is_invite(each):
            keys.append(public_key_of(each).hex())
        elif secret := decode_invite(each).admission:
            keys += [bearer.hex() for bearer in decode_secret(secret).bearers]
        else:
            raise ManifestError("this invite is to a run for anybody: there is nothing to revoke")
    rows: list[dict[str, Any]] = call_node(
        home, "admit", keys=keys, is_admitted=is_admitted, keeps_invites=keeps_invites
    )
    return rows


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 30m, 12h or 7d; raise `ManifestError` if it is none."""
    match = re.fullmatch(r"(\d{1,6})([mhd])", text.strip())
    if match is None:
        raise ManifestError(f"{text!r} is no time: write 30m, 12h or 7d, for minutes, hours or days")
    return int(match[1]) * {"m": 60.0, "h": 3_600.0, "d": 86_400.0}[match[2]]


@run_app.command("metrics")
def show_metrics(
    home: Home,
    last: Annotated[
        int | None,
        typer.Option("--last", "-n", min=1, metavar="N", show_default="20, or all as CSV", help="Number of rounds."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all columns as CSV, for other programs.")] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write them there for TensorBoard (extra tensorboard).")
    ] = None,
) -> None:
    """Print this node's rounds: when, with whom, loss, bytes, seconds. Works while the node is stopped, too.

    Examples: [cyan]farandole run metrics[/cyan]; [cyan]farandole run metrics --csv > rounds.csv[/cyan];
    [cyan]farandole run metrics --tensorboard runs/mine[/cyan], then [cyan]tensorboard --logdir runs[/cyan]
    """
    from ...status.round_log import read_rounds, write_csv, write_events

    path = NodeSettings(home=home).rounds
    records = list(read_rounds(path))
    if not records:
        raise FarandoleError(f"no round is over yet: {path} has none; name another folder with --home")
    newest = records[-last:] if last else records
    if tensorboard is not None:
        tokens_before = sum(record.tokens for record in records[: -len(newest)])
        try:
            written = write_events(newest, tokens_before, tensorboard)
        except ImportError as error:
            command = how_to_add("tensorboard")
            raise FarandoleError(f"a file for TensorBoard needs the Python package tensorboardX: {command}") from error
        except OSError as error:
            raise FarandoleError(f"cannot write into {tensorboard}: {error.strerror}") from error
        typer.echo(f"{written} is written; look at it with: tensorboard --logdir {tensorboard}")
        return
    if as_csv:
        write_csv(newest, sys.stdout)
        return
    from rich.console import Console
    from rich.table import Column, Table

    figures = (Column(name, no_wrap=True) for name in ("at", "round", "loss", "held out", "tokens", "seconds"))
    outer_step = Column("outer step with", no_wrap=True, overflow="ellipsis")
    table = Table(*figures, outer_step, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for record in newest if last else records[-20:]:
        partner = f"{record.partner[-8:]}, {size(record.contribution_bytes)}, {duration(record.exchange_seconds)}"
        table.add_row(
            f"{datetime.fromtimestamp(record.at):%m-%d %H:%M}",
            str(record.round),
            "" if record.loss is None else f"{record.loss:.3f}",
            "" if record.validation is None else f"{record.validation:.3f}",
            count(record.tokens),
            f"{record.seconds:.1f}",
            partner if record.verdict == "committed" else record.verdict,
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"from {path}; --csv prints all columns", soft_wrap=True)


@lora_app.command("create")
@takes_settings("base", "data")
def create_lora(
    settings: NodeSettings,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters, r.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Write a run file for adapters, lora.toml, and sign it, lora.manifest. Everybody brings text of their own.

    Only the adapters travel: the base stays where it is, and the text never leaves its member.

    Example: [cyan]farandole lora create --base Qwen3-8B --rank 16 --data my-texts[/cyan], then what it prints; others
    use [cyan]farandole join INVITE --base Qwen3-8B --data their-texts[/cyan]
    """
    if settings.base is None:
        raise ManifestError("which model? name your copy of the base, a Hugging Face folder, with --base FOLDER")
    run_file, path = Path("lora.toml"), Path("lora.manifest")
    if run_file.exists() or path.exists():
        raise ManifestError(f"{run_file} or {path} is there already: make the new run in another folder")
    base = settings.base.resolve()
    place = json.dumps(str(base), ensure_ascii=False)  # TOML has no surrogates
    text = f'name = "lora"\nmodel = {{lora = {place}, rank = {rank}}}\ndata = {{source = "text"}}\n'
    run_file.write_text(text, encoding="utf-8")
    try:
        sign_run_file(settings, run_file, path, as_json=as_json, is_started=bool(settings.data))
    except BaseException:  # Ctrl-C too: the next try finds no half of a run
        run_file.unlink()
        raise
    if settings.data and not as_json:
        places = [f"--base {shlex.quote(str(base))}", *(f"--data {shlex.quote(str(each))}" for each in settings.data)]
        typer.echo(f"start its first node with: farandole join {path} {' '.join(places)}")

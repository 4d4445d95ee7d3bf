"""The command line. Thin: each command reads its options, calls one thing, and prints.

Starting is fast because nothing heavy is imported before a command needs it: neither torch nor libp2p for help,
``id``, ``run ...``, ``status``, ``peers`` and ``leave``.
"""

from __future__ import annotations

import enum
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from farandole.protocol.errors import FarandoleError, ManifestError

from .exits import Exit
from .interrupts import interruptible
from .settings import DEFAULT_LISTEN, HOME_VARIABLE, MIN_CAP_MBIT, NodeSettings, default_home

if TYPE_CHECKING:
    from threading import Event

    from farandole.protocol.invite import Invite
    from farandole.protocol.manifest import Manifest, SignedManifest

    from .measuring import MeasuredCut
    from .status import NodeStatus

WATCH_INTERVAL: Final = 1.0
# `leave` waits this long for the daemon to be gone: it finishes its round, saves and says farewell first.
LEAVE_TIMEOUT: Final = 30.0

app = typer.Typer(
    name="farandole",
    epilog="A node's settings are options, or environment variables named in each option's help.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
run_app = typer.Typer(help="Start a run, look at one, invite to one.", no_args_is_help=True)
app.add_typer(run_app, name="run")


def _print_version(is_asked_for: bool) -> None:
    if is_asked_for:
        from importlib.metadata import version

        typer.echo(version("farandole"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model together with others, peer to peer: no coordinator, no account."""


Home = Annotated[
    Path,
    typer.Option(
        "--home",
        default_factory=default_home,
        envvar=HOME_VARIABLE,
        help="The node's folder.",
        show_default="~/.farandole",
        file_okay=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Listen = Annotated[
    list[str],
    typer.Option(
        default_factory=lambda: [DEFAULT_LISTEN],
        help="Multiaddr to listen on; repeatable.",
        envvar="FARANDOLE_LISTEN",
        show_default=DEFAULT_LISTEN,
    ),
]
Bootstrap = Annotated[
    list[str] | None,
    typer.Option(help="Multiaddr to dial beside the invite's; repeatable.", envvar="FARANDOLE_BOOTSTRAP"),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.", envvar="FARANDOLE_DEVICE")]


class LogLevel(enum.StrEnum):
    """What goes into the log file."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code (`Exit`)."""
    run_app_and_exit(app, arguments)


def run_app_and_exit(application: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Turn the errors that farandole raises on purpose into one line and an exit code; others are defects."""
    try:
        application(args=arguments)
    except FarandoleError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        sys.exit(exit_code_of(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(Exit.INTERRUPTED)
    sys.exit(Exit.OK)


def exit_code_of(error: FarandoleError) -> Exit:
    """The code that stands for an error which ended a command."""
    from .control import ControlError, NoNodeError

    match error:
        case NoNodeError():
            return Exit.NO_NODE
        case ControlError():
            return Exit.NO_NODE if error.code in ("timeout", "internal") else Exit.BAD_INPUT
        case _:
            return Exit.BAD_INPUT


def print_json(value: object) -> None:
    """Readable JSON on standard output."""
    typer.echo(json.dumps(value, indent=2))


# --- identity ---------------------------------------------------------------------------------------------------


@app.command("id")
def show_id(home: Home, as_json: AsJson = False) -> None:
    """Print this node's peer id; its key is made on first use.

    Example: [cyan]farandole id[/cyan]
    """
    from farandole.protocol.identity import peer_id_of, public_bytes

    from .identity import load_or_create_key

    public_key = public_bytes(load_or_create_key(home / "key"))
    if as_json:
        print_json({"peer_id": peer_id_of(public_key), "public_key": public_key.hex(), "home": str(home)})
    else:
        typer.echo(peer_id_of(public_key))


# --- runs -------------------------------------------------------------------------------------------------------


@run_app.command("create")
def create_run(
    home: Home,
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The settings: see examples/run.toml.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write the manifest.", show_default="beside RUN.TOML")
    ] = None,
    invite_address: Annotated[
        list[str] | None,
        typer.Option("--invite-address", help="Print an invite with this multiaddr (ends in /p2p/...); repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a manifest that is there: another run.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Cut the model into its stages by the time that its parts take here, on the GPU if any."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Sign a run file with this node's key: the manifest, which never changes again.

    Example: [cyan]farandole run create run.toml[/cyan], then [cyan]farandole join run.manifest[/cyan];
    [cyan]farandole run create run.toml --measure[/cyan] (of a model that is cut into stages)
    """
    from farandole.protocol.invite import Invite, encode_invite
    from farandole.protocol.manifest import sign_manifest

    from .identity import load_or_create_key
    from .run_file import load_run_file

    manifest = load_run_file(run_file, time.time())
    path = out or run_file.with_suffix(".manifest")
    if path.exists() and not force:
        raise ManifestError(f"{path} is there already; --force replaces it (by another run), --out writes elsewhere")
    measured = None
    if measure:
        from .measuring import cut_by_measuring

        manifest, measured = cut_by_measuring(manifest)
    signed = sign_manifest(manifest, load_or_create_key(home / "key"))
    invite = encode_invite(Invite(signed.run_id, tuple(invite_address))) if invite_address else None
    try:
        path.write_bytes(signed.encode())
    except OSError as error:
        raise ManifestError(f"cannot write {path}: {error.strerror}") from error
    if as_json:
        import msgspec

        figures = {} if measured is None else {"measured": msgspec.to_builtins(measured)}
        print_json({"run_id": signed.run_id.hex(), "manifest": str(path), "invite": invite, **figures})
        return
    if measured is not None:
        _show_measured(measured)
    typer.echo(f"run {signed.run_id.hex()}")
    typer.echo(f"manifest in {path}; start its first node with: farandole join {path}")
    if invite:
        typer.echo(f"others join with: farandole join {invite}")


def _show_measured(measured: MeasuredCut) -> None:
    from rich.console import Console

    from .measuring import cuts_table

    typer.echo(
        f"for one microbatch, there and back, a layer takes {measured.layer_seconds:.3g} s and both ends "
        f"{measured.ends_seconds:.3g} s on {measured.device}"
    )
    Console().print(cuts_table(measured))


@run_app.command("show")
def show_run(
    source: Annotated[str, typer.Argument(metavar="MANIFEST|INVITE", help="A manifest file, or an invite.")],
    as_json: AsJson = False,
) -> None:
    """Print what a manifest or an invite says, after checking it.

    Example: [cyan]farandole run show run.manifest[/cyan]
    """
    from farandole.protocol.invite import decode_invite, is_invite

    if is_invite(source) and not os.path.exists(source):
        invite = decode_invite(source)
        _show_invite(invite, as_json)
    else:
        manifest, signed = _read_manifest(Path(source))
        _show_manifest(manifest, signed, as_json)


@run_app.command("invite")
def make_invite(
    home: Home,
    manifest: Annotated[
        Path | None, typer.Option("--manifest", help="Of this manifest's run, instead of the running node's.")
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option("--address", help="A multiaddr to dial first (ends in /p2p/...); repeatable."),
    ] = None,
) -> None:
    """Print an invite: one line, all that others need to join.

    Example: [cyan]farandole run invite[/cyan] on a machine where a node of the run is on
    """
    from farandole.protocol.invite import Invite, encode_invite

    from .addresses import choose_bootstrap_addresses

    if manifest is not None:
        if not address:
            raise ManifestError("an invite from a manifest needs at least one --address that others can dial")
        run_id, addresses = _read_manifest(manifest)[1].run_id, list(address)
    else:
        status = _status(home)
        if not status.run.run_id:
            raise ManifestError("the node has not found its run yet; `farandole status` says what it waits for")
        run_id = bytes.fromhex(status.run.run_id)
        addresses = list(address or choose_bootstrap_addresses(status))
    typer.echo(encode_invite(Invite(run_id, tuple(addresses))))


def _read_manifest(path: Path) -> tuple[Manifest, SignedManifest]:
    from farandole.protocol.manifest import decode_manifest

    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path} is no invite, and no manifest that can be read: {error.strerror}") from error
    return decode_manifest(raw)


def _show_invite(invite: Invite, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "run_id": invite.run_id.hex(),
                "addresses": list(invite.addresses),
                "admission": invite.admission.hex(),
            }
        )
        return
    typer.echo(f"invite to run {invite.run_id.hex()}")
    for address in invite.addresses:
        typer.echo(f"  dials {address}")
    if invite.admission:
        typer.echo("  with an admission")


def _show_manifest(manifest: Manifest, signed: SignedManifest, as_json: bool) -> None:
    import msgspec

    from farandole.protocol.identity import peer_id_of

    settings: dict[str, Any] = msgspec.to_builtins(manifest)
    if as_json:
        print_json({"run_id": signed.run_id.hex(), "creator": peer_id_of(signed.creator), "manifest": settings})
        return
    typer.echo(f"run {signed.run_id.hex()}")
    typer.echo(f"by  {peer_id_of(signed.creator)}")
    for line in _setting_lines(settings):
        typer.echo(line)


def _setting_lines(settings: dict[str, Any]) -> Iterator[str]:
    """As in a run file: plain values first, then the sections."""
    for name, value in settings.items():
        if not isinstance(value, dict):
            yield f"{name} = {json.dumps(value)}"
    for name, value in settings.items():
        if isinstance(value, dict):
            yield f"[{name}]"
            yield from (f"  {key} = {json.dumps(entry)}" for key, entry in value.items())


# --- the node ---------------------------------------------------------------------------------------------------


def _check_cap(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter("must be finite; 0 is no cap")
    if 0 < value < MIN_CAP_MBIT:
        raise typer.BadParameter(f"must be at least {MIN_CAP_MBIT:g} Mbit/s, or 0 for no cap")
    return value


UploadMbit = Annotated[
    float,
    typer.Option(
        help=f"Send no faster than so many Mbit/s in all, at least {MIN_CAP_MBIT:g}; 0: no cap.",
        envvar="FARANDOLE_UPLOAD_MBIT",
        min=0.0,
        callback=_check_cap,
        metavar="MBIT",
    ),
]
DownloadMbit = Annotated[
    float,
    typer.Option(
        help=f"Receive no faster than so many Mbit/s in all, at least {MIN_CAP_MBIT:g}; 0: no cap.",
        envvar="FARANDOLE_DOWNLOAD_MBIT",
        min=0.0,
        callback=_check_cap,
        metavar="MBIT",
    ),
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option(
        help="What goes into the log file: debug, info, warning, error.",
        envvar="FARANDOLE_LOG_LEVEL",
        metavar="LEVEL",
    ),
]
UseMdns = Annotated[
    bool,
    typer.Option(
        "--mdns/--no-mdns", help="Find others of the run in the local network, by multicast.", envvar="FARANDOLE_MDNS"
    ),
]
JsonLog = Annotated[bool, typer.Option("--json-log", help="Log lines as JSON.", envvar="FARANDOLE_JSON_LOG")]


@app.command()
def join(
    home: Home,
    listen: Listen,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE|MANIFEST",
            envvar="FARANDOLE_INVITE",
            help="An invite; or a manifest file, for a run's first node; nothing: the run that this folder knows.",
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    device: Device = "auto",
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="File or folder of text, for runs that ask for it; repeatable.", envvar="FARANDOLE_DATA", exists=True
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="The run's Hugging Face tokenizer file.", envvar="FARANDOLE_TOKENIZER", exists=True, dir_okay=False
        ),
    ] = None,
    max_rounds: Annotated[
        int | None,
        typer.Option(
            help="Stop training after this round, stay online.", envvar="FARANDOLE_MAX_ROUNDS", min=1, metavar="N"
        ),
    ] = None,
    slow: Annotated[
        float,
        typer.Option(
            help="Rest between inner steps: 2 trains half the time, 1 always.",
            envvar="FARANDOLE_SLOW",
            min=1.0,
            metavar="FACTOR",
        ),
    ] = 1.0,
    threads: Annotated[
        int, typer.Option(help="Threads of the trainer.", envvar="FARANDOLE_THREADS", min=1, metavar="N")
    ] = 1,
    validate_every: Annotated[
        int,
        typer.Option(
            help="Rounds between measurements on held-out text; 0: never.",
            envvar="FARANDOLE_VALIDATE_EVERY",
            min=0,
            metavar="N",
        ),
    ] = 10,
    upload_mbit: UploadMbit = 0.0,
    download_mbit: DownloadMbit = 0.0,
    stage: Annotated[
        int | None,
        typer.Option(
            help="Hold this stage of a model that is cut into several, for good: --stage 0 draws the data.",
            envvar="FARANDOLE_STAGE",
            min=0,
            metavar="N",
            show_default="the one that the run needs most",
        ),
    ] = None,
    checkpoint_seconds: Annotated[
        float,
        typer.Option(help="Between checkpoints.", envvar="FARANDOLE_CHECKPOINT_SECONDS", min=0.1, metavar="SECS"),
    ] = 60.0,
    backup_seconds: Annotated[
        float | None,
        typer.Option(
            help="Between copies of the next stage's weights, kept for others; of cut models.",
            envvar="FARANDOLE_BACKUP_SECONDS",
            min=0.1,
            metavar="SECS",
            show_default="twice --checkpoint-seconds",
        ),
    ] = None,
    heartbeat_seconds: Annotated[
        float,
        typer.Option(help="Between heartbeats.", envvar="FARANDOLE_HEARTBEAT_SECONDS", min=0.1, metavar="SECS"),
    ] = 10.0,
    relay: Annotated[
        bool,
        typer.Option(
            "--relay/--no-relay",
            help="Pass on to each other peers behind NAT, if this node is publicly reachable, within limits.",
            envvar="FARANDOLE_RELAY",
        ),
    ] = True,
    log_level: LogLevelOption = LogLevel.INFO,
    mdns: UseMdns = True,
    json_log: JsonLog = False,
) -> None:
    """Join a run and train until Ctrl-C (or `farandole leave`), saying what happens.

    Examples: [cyan]farandole join farandole1...[/cyan]; [cyan]farandole join run.manifest[/cyan] (a run's first node);
    [cyan]farandole join[/cyan] (comes back to the run of this folder);
    [cyan]farandole join farandole1... --stage 2[/cyan] (holds that stage, where the node would else choose one)
    """
    invite, manifest = _split_source(source)
    settings = NodeSettings(
        home=home,
        invite=invite,
        manifest=manifest,
        listen=listen,
        bootstrap=bootstrap or [],
        device=device,
        data=data or [],
        tokenizer=tokenizer,
        max_rounds=max_rounds,
        slow=slow,
        stage=stage,
        checkpoint_seconds=checkpoint_seconds,
        backup_seconds=backup_seconds,
        heartbeat_seconds=heartbeat_seconds,
        threads=threads,
        validate_every=validate_every,
        upload_mbit=upload_mbit,
        download_mbit=download_mbit,
        relay=relay,
        log_level=log_level.value,
        mdns=mdns,
        json_log=json_log,
    )
    import trio

    from .daemon import run_node
    from .logs import logging_to_file

    with logging_to_file(settings):
        code = trio.run(run_node, settings)
    raise typer.Exit(code)


@app.command()
def relay(
    home: Home,
    listen: Listen,
    invites: Annotated[
        list[str] | None,
        typer.Argument(metavar="INVITE...", help="An invite to each run; none: the runs that this folder knows."),
    ] = None,
    bootstrap: Bootstrap = None,
    upload_mbit: UploadMbit = 0.0,
    download_mbit: DownloadMbit = 0.0,
    log_level: LogLevelOption = LogLevel.INFO,
    mdns: UseMdns = True,
    json_log: JsonLog = False,
) -> None:
    """Help runs without training: introduce newcomers, and pass on to each other peers behind NAT.

    For a machine that others can dial, with a port that stays the same; it needs neither GPU nor memory.

    Example: [cyan]farandole relay farandole1... --listen /ip4/0.0.0.0/tcp/4001[/cyan]
    """
    from farandole.protocol.invite import decode_invite

    for invite in invites or []:
        decode_invite(invite)  # a slip is told at once
    settings = NodeSettings(
        home=home,
        listen=listen,
        bootstrap=bootstrap or [],
        upload_mbit=upload_mbit,
        download_mbit=download_mbit,
        log_level=log_level.value,
        mdns=mdns,
        json_log=json_log,
    )
    import trio

    from .logs import logging_to_file
    from .relay_node import run_relay

    with logging_to_file(settings):
        code = trio.run(run_relay, settings, invites or [])
    raise typer.Exit(code)


def _split_source(source: str | None) -> tuple[str | None, Path | None]:
    """What was given to ``join``: an invite, checked here so that a slip is told at once, or a manifest file."""
    from farandole.protocol.invite import decode_invite, is_invite

    if source is None:
        return None, None
    if is_invite(source) and not os.path.exists(source):
        decode_invite(source)
        return source, None
    path = Path(source)
    _read_manifest(path)
    return None, path


@app.command()
def status(
    home: Home,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what the node that runs here is doing: in or not, with whom it exchanged, whether the loss falls.

    Examples: [cyan]farandole status --watch[/cyan]; [cyan]farandole status --json | jq .loss[/cyan]
    """
    if not watch:
        _print_status(home, as_json)
        return
    with interruptible() as is_interrupted:
        if as_json:
            _watch_json(home, is_interrupted)
        else:
            _watch_screen(home, is_interrupted)


@app.command()
def peers(home: Home, as_json: AsJson = False) -> None:
    """List the members of the run as this node sees them, and how it reaches each.

    Example: [cyan]farandole peers[/cyan]
    """
    from rich.console import Console

    from .control import call
    from .status_view import members_table

    if as_json:
        print_json(call(home, "peers"))
    else:
        status = _status(home)
        Console().print(members_table(status.members, status.run.providers))


@app.command()
def doctor(
    home: Home,
    listen: Listen,
    invite: Annotated[
        str | None, typer.Argument(metavar="INVITE", envvar="FARANDOLE_INVITE", help="The invite that does not work.")
    ] = None,
    bootstrap: Bootstrap = None,
    device: Device = "auto",
    data: Annotated[
        list[Path] | None, typer.Option(help="File or folder of text; repeatable.", envvar="FARANDOLE_DATA")
    ] = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure the line to a peer too: a few megabytes each way.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find out what keeps this machine from joining or from being reached; exit code 1 if something must be mended.

    Examples: [cyan]farandole doctor farandole1...[/cyan]; [cyan]farandole doctor --json | jq .findings[/cyan]
    """
    import msgspec
    import trio
    from rich.console import Console

    from .doctor.examination import Examination
    from .doctor.view import diagnosis_screen

    settings = NodeSettings(
        home=home, invite=invite, listen=listen, bootstrap=bootstrap or [], device=device, data=data or []
    )
    diagnosis = trio.run(Examination(settings, is_speed_wanted=bandwidth).run)
    if as_json:
        print_json(msgspec.to_builtins(diagnosis))
    else:
        Console().print(diagnosis_screen(diagnosis))
    raise typer.Exit(Exit.OK if diagnosis.is_well else Exit.NOT_WELL)


@app.command()
def leave(home: Home) -> None:
    """Tell the node that runs here to leave the run in good order, and wait until it is gone.

    Example: [cyan]farandole leave[/cyan]
    """
    from .control import NoNodeError, call

    call(home, "leave")
    typer.echo("leaving: the node saves and says farewell")
    deadline = time.monotonic() + LEAVE_TIMEOUT
    while time.monotonic() < deadline:
        try:
            call(home, "status", timeout=5.0)
        except NoNodeError:
            typer.echo("left")
            return
        time.sleep(0.2)
    raise FarandoleError(f"the node still runs after {LEAVE_TIMEOUT:g} s; its log is {home / 'log'}")


def _status(home: Path) -> NodeStatus:
    import msgspec

    from .control import call
    from .status import NodeStatus

    return msgspec.convert(call(home, "status"), NodeStatus)


def _print_status(home: Path, as_json: bool) -> None:
    from rich.console import Console

    from .control import call
    from .status_view import status_screen

    if as_json:
        print_json(call(home, "status"))
    else:
        Console().print(status_screen(_status(home), time.time()))


def _watch_json(home: Path, is_interrupted: Event) -> None:
    """One line a second: a stream for scripts."""
    from .control import call

    while True:
        typer.echo(json.dumps(call(home, "status")))
        if is_interrupted.wait(WATCH_INTERVAL):
            return


def _watch_screen(home: Path, is_interrupted: Event) -> None:
    from rich.live import Live

    from .status_view import status_screen

    with Live(status_screen(_status(home), time.time()), auto_refresh=False) as live:
        while not is_interrupted.wait(WATCH_INTERVAL):
            live.update(status_screen(_status(home), time.time()), refresh=True)

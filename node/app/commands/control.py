"""A node that runs here: ``join``, ``start`` and ``relay`` begin one; ``dial``, ``limit`` and ``leave`` steer it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from farandole.protocol.wire.errors import FarandoleError

from ...base.settings import NodeSettings
from ...base.system.tuning import importing_for_good
from .options import AsJson, Home, takes_settings
from .output import call_node, print_answer, split_source, unquoted
from .runs import sign_run_file

# `leave` waits this long for the daemon to be gone: it finishes its round, saves and says farewell first
# (`farandole.node.member.run_member.MAX_LEAVE_TIMEOUT`).
LEAVE_TIMEOUT: Final = 250.0
Cap = Annotated[float | None, typer.Option(help="Mbit/s, 0.5 or more; 0: no cap.", show_default=False)]


def show_id(home: Home, as_json: AsJson = False) -> None:
    """Print this node's peer id; its key is made on first use.

    Example: [cyan]farandole id[/cyan]
    """
    from farandole.protocol.wire.identity import peer_id_of, public_bytes

    from ...base.identity import load_or_create_key

    public_key = public_bytes(load_or_create_key(home / "key"))
    peer_id = peer_id_of(public_key)
    print_answer(as_json, {"peer_id": peer_id, "public_key": public_key.hex(), "home": str(home)}, peer_id)


def dial(
    home: Home,
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Address that ends in /p2p/..., as a relay prints it.")
    ],
) -> None:
    """Connect the node that runs here to a peer at this address, and remember the peer.

    For a node that others cannot dial: once it is connected to a relay, the invites that it makes lead there.

    Example: [cyan]farandole dial /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...[/cyan]
    """
    from farandole.protocol.run.invite import split_address

    split_address(address)  # reports a mistyped one at once
    typer.echo(call_node(home, "dial", address=address))


def limit(
    home: Home,
    upload_mbit: Cap = None,
    download_mbit: Cap = None,
    quiet_hours: Annotated[
        list[str] | None,
        typer.Option(help='22:00-07:30, or "Sat-Sun 09:00-18:00"; none: no quiet hours. Repeatable.'),
    ] = None,
) -> None:
    """Change the limits of the running node, now and for its later starts; `farandole config show` shows them.

    A flag or an environment variable of `farandole join` goes before a kept limit, and that before the settings file.

    Examples: [cyan]farandole limit --upload-mbit 2[/cyan];
    [cyan]farandole limit --upload-mbit 0 --download-mbit 0[/cyan];
    [cyan]farandole limit --quiet-hours 22:00-07:30[/cyan]
    """
    caps = {"upload_mbit": upload_mbit, "download_mbit": download_mbit}
    given = {name: cap for name, cap in caps.items() if cap is not None}
    if not given and not quiet_hours:
        raise typer.BadParameter("say which to set: --upload-mbit, --download-mbit or --quiet-hours")
    if quiet_hours:
        typer.echo(call_node(home, "quiet", hours="" if quiet_hours == ["none"] else ", ".join(quiet_hours)))
    if given:
        typer.echo(call_node(home, "limit", **given))


def pause(home: Home) -> None:
    """Stop training on this machine until `farandole resume`, also after a restart: its memory and GPU are free then.

    The node stays in the run, and goes on helping others to reach each other. It saves first if that takes at most
    three seconds; otherwise what it has learnt since its last checkpoint is lost.

    Example: [cyan]farandole pause[/cyan]
    """
    typer.echo(call_node(home, "pause"))


def resume(home: Home) -> None:
    """Train again after `farandole pause`.

    Example: [cyan]farandole resume[/cyan]
    """
    typer.echo(call_node(home, "resume"))


def leave(home: Home) -> None:
    """Tell the node that runs here to leave the run cleanly, and wait until it is gone.

    Example: [cyan]farandole leave[/cyan]
    """
    from ...base.identity import is_locked

    call_node(home, "leave")
    typer.echo("leaving: the node saves and says farewell")
    deadline = time.monotonic() + LEAVE_TIMEOUT
    while time.monotonic() < deadline:
        if not is_locked(NodeSettings(home=home).lock):  # the next one that runs here may have it now
            typer.echo("left")
            return
        time.sleep(0.2)  # the daemon cannot say that it is gone, and a lock that is waited for has no deadline
    raise FarandoleError(f"the node still runs after {LEAVE_TIMEOUT:g} s; its log is {home / 'log'}")


@takes_settings()
def join(settings: NodeSettings) -> None:
    """Join a run and train until Ctrl-C (or `farandole leave`), and print each step.

    Examples: [cyan]farandole join farandole1...[/cyan]; [cyan]farandole join run.manifest[/cyan] (a run's first node);
    [cyan]farandole join[/cyan] (comes back to the run of this folder);
    [cyan]farandole join farandole1... --stage 2[/cyan] (holds stage 2; otherwise the node chooses)
    """
    invite, manifest = split_source(settings.invite)
    settings = replace(settings, invite=invite, manifest=manifest)
    with importing_for_good():
        from ...daemon import be_node

    _run(settings, be_node)


@takes_settings(of_run_file=True)
def start(settings: NodeSettings) -> None:
    """Start a run: `farandole run create`, `farandole join` as its first node, and `farandole run invite`, in one.

    Prints an invite once others can join with it. If the manifest is there already, the node comes back to its run.

    Example: [cyan]farandole start run.toml[/cyan]
    """
    run_file = Path(settings.invite or "run.toml")
    path = run_file.with_suffix(".manifest")
    if path.exists():
        typer.echo(f"{path} is there already: this node comes back to its run")
    else:
        sign_run_file(settings, run_file, path, is_started=True)
    settings = replace(settings, invite=None, manifest=split_source(str(path))[1])
    with importing_for_good():
        from ...daemon import be_first_node

    _run(settings, be_first_node)


@takes_settings(
    *("invite", "port", "listen", "announce", "bootstrap", "upload_mbit", "download_mbit", "monthly_traffic"),
    *("mdns", "upnp", "dashboard", "dashboard_port", "log_level"),
)
def relay(
    settings: NodeSettings,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write a public page of the run into this folder, twice a minute: loss, members, tokens of each. A "
            "web server, or a host of static pages, can serve it.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Help a run without training: introduce newcomers, and relay traffic between peers behind NAT.

    For a machine that others can dial, with a port that stays the same; it needs neither GPU nor memory.

    Examples: [cyan]farandole relay farandole1... --port 4001[/cyan];
    [cyan]farandole relay farandole1... --port 4001 --page /var/www/run[/cyan]
    """
    from farandole.protocol.run.invite import decode_invite

    if invite := unquoted(settings.invite or ""):  # compose.yaml passes an empty one
        decode_invite(invite)  # reports a mistyped invite at once
    with importing_for_good():
        from ...relay_node import be_relay

    _run(replace(settings, invite=invite), partial(be_relay, page))


def _run(settings: NodeSettings, run: Callable[..., Awaitable[None]]) -> NoReturn:
    """Run a daemon, until ``run`` ends, and exit with its code (`farandole.node.daemon.run_daemon`)."""
    import trio

    from ...base.identity import keep_private
    from ...base.logs import logging_to_file
    from ...base.system.tuning import give_memory_back
    from ...daemon import run_daemon

    give_memory_back()
    keep_private(settings.home)
    with logging_to_file(settings):
        code = trio.run(run_daemon, settings, run)
    raise typer.Exit(code)

"""``farandole join`` and ``farandole relay``: a daemon in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..settings import NodeSettings
from .options import (
    Bootstrap,
    Device,
    DownloadMbit,
    Home,
    JsonLog,
    Listen,
    LogLevel,
    LogLevelOption,
    UploadMbit,
    UseMdns,
    UsePortMapping,
)
from .output import read_manifest


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
    microbatch: Annotated[
        int,
        typer.Option(
            help="Take a batch so many sequences at a time, for less memory: the steps stay the same.",
            envvar="FARANDOLE_MICROBATCH",
            min=0,
            metavar="N",
            show_default="as many as fit",
        ),
    ] = 0,
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
    upnp: UsePortMapping = True,
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
        microbatch=microbatch,
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
        port_mapping=upnp,
        json_log=json_log,
    )
    import trio

    from ..daemon import run_node
    from ..logs import logging_to_file

    with logging_to_file(settings):
        code = trio.run(run_node, settings)
    raise typer.Exit(code)


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
    upnp: UsePortMapping = True,
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
        port_mapping=upnp,
        json_log=json_log,
    )
    import trio

    from ..logs import logging_to_file
    from ..relay_node import run_relay

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
    read_manifest(path)
    return None, path

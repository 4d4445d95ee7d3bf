"""Options that several commands take, declared once."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Annotated

import typer

from ..settings import DEFAULT_LISTEN, HOME_VARIABLE, MIN_CAP_MBIT, default_home

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
UsePortMapping = Annotated[
    bool,
    typer.Option(
        "--upnp/--no-upnp",
        help="Ask the home's router to send on this node's port, by NAT-PMP or UPnP.",
        envvar="FARANDOLE_UPNP",
    ),
]
JsonLog = Annotated[bool, typer.Option("--json-log", help="Log lines as JSON.", envvar="FARANDOLE_JSON_LOG")]

"""``farandole dial``."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Home


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

    from ...base.control import call

    split_address(address)  # reports a mistyped one at once
    typer.echo(call(home, "dial", address=address))

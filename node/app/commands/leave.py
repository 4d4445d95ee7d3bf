"""``farandole leave``."""

from __future__ import annotations

import time
from typing import Final

import typer

from farandole.protocol.wire.errors import FarandoleError

from .options import Home

# `leave` waits this long for the daemon to be gone: it finishes its round, saves and says farewell first
# (`farandole.node.member.run_member.MAX_LEAVE_TIMEOUT`).
LEAVE_TIMEOUT: Final = 250.0


def leave(home: Home) -> None:
    """Tell the node that runs here to leave the run cleanly, and wait until it is gone.

    Example: [cyan]farandole leave[/cyan]
    """
    from ...base.control import call
    from ...base.identity import IdentityInUseError, locked
    from ...base.settings import NodeSettings

    call(home, "leave")
    typer.echo("leaving: the node saves and says farewell")
    deadline = time.monotonic() + LEAVE_TIMEOUT
    while time.monotonic() < deadline:
        try:
            with locked(NodeSettings(home=home).lock):  # the next one that runs here may have it now
                typer.echo("left")
                return
        except IdentityInUseError:
            time.sleep(0.2)  # the daemon cannot say that it is gone, and a lock that is waited for has no deadline
    raise FarandoleError(f"the node still runs after {LEAVE_TIMEOUT:g} s; its log is {home / 'log'}")

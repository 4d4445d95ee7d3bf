"""What the home's router offers."""

from __future__ import annotations

import contextlib
from typing import Final

from farandole.protocol.reachability import is_global

from ..upnp import UpnpError, find_gateway
from .causes import found
from .finding import Finding

# The port is closed again at once; should that fail, the router forgets it after so many seconds.
TRIAL_SECONDS: Final = 60


async def check_upnp(port: int) -> Finding:
    """Whether it opens a port that is asked for, by trying."""
    try:
        gateway = await find_gateway()
    except UpnpError as error:
        return found("upnp-none", why=error)
    try:
        external = await gateway.external_ip()
        await gateway.open_port(port, TRIAL_SECONDS)
    except UpnpError as error:
        return found("upnp-refused", ip=gateway.ip, why=error)
    with contextlib.suppress(UpnpError):
        await gateway.close_port(port)
    return found("upnp-fine" if is_global(external) else "upnp-double-nat", ip=gateway.ip, external=external)

"""Check of the home's router."""

from __future__ import annotations

import contextlib
from typing import Final

from farandole.protocol.mesh.reachability import is_global

from ...mesh.mapping.port_mapper import find_router
from ...mesh.mapping.router import MappingError
from .causes import found
from .finding import Finding

# The port is closed again at once; if that fails, the router forgets it after this number of seconds.
TRIAL_SECONDS: Final = 60


async def check_upnp(port: int) -> Finding:
    """Check whether the router opens a port, by trying."""
    try:
        router = await find_router()
    except MappingError as error:
        return found("upnp-none", why=error)
    try:
        opened = await router.open_port(port, TRIAL_SECONDS)
    except MappingError as error:
        return found("upnp-refused", ip=router.ip, why=error)
    with contextlib.suppress(MappingError):
        await router.close_port(opened)
    external = opened.outer[0]
    return found("upnp-fine" if is_global(external) else "upnp-double-nat", ip=router.ip, external=external)

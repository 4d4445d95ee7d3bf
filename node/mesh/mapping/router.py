"""The port that a home's router opens, by whichever of the two protocols it speaks (natpmp.py, upnp.py)."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.protocol.mesh.reachability import Address
from farandole.protocol.wire.errors import FarandoleError


class MappingError(FarandoleError):
    """The router does not do what it was asked for, or there is none; the message says why."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A port of the router that leads to one of this machine's."""

    port: int
    """This machine's port."""
    outer: Address
    """The outer address that the router reports; behind a second router it is not a public one."""
    seconds: float
    """The lease, unless it is renewed; infinite if the router knows no leases."""

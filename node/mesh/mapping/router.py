"""What a home's router gives, by whichever of the two protocols it speaks (natpmp.py, upnp.py)."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.protocol.errors import FarandoleError
from farandole.protocol.reachability import Address


class MappingError(FarandoleError):
    """The router does not do what it was asked for, or there is none; the message says why."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A port of the router's that leads to one of this machine's."""

    port: int
    """This machine's."""
    outer: Address
    """The router's own word for where it is: behind a second router it is none of the internet's."""
    seconds: float
    """For so long, unless it is asked again; infinite where the router knows no leases."""

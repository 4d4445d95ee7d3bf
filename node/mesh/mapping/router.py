"""What is asked of a home's router, by whichever of the two protocols it speaks (natpmp.py, upnp.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


class Router(Protocol):
    """One that opens ports. Every call ends within some seconds, and raises `MappingError`."""

    @property
    def ip(self) -> str:
        """Its own, inside."""

    async def external_ip(self) -> str:
        """Its outer address."""

    async def open_port(self, port: int, seconds: int) -> Opened:
        """Send on to this machine's TCP port what comes to one of the router's, the same if it is free; or go on."""

    async def close_port(self, opened: Opened) -> None:
        """Undo `open_port`."""

    async def has_forgotten(self, opened: Opened) -> bool:
        """Whether it does so no more, as after a restart, or has another outer address."""

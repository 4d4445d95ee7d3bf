"""Opens connections to addresses that this node knows only from other peers (`protocol.mesh.dial_caution`)."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable

import trio

from farandole.protocol.mesh.dial_caution import DialBudget, may_dial

from ..base.errors import PeerUnreachableError


class CautiousDials:
    """``in_use`` returns the IP addresses that this node already uses."""

    def __init__(self, in_use: Callable[[], Iterable[str]]) -> None:
        self._in_use = in_use
        self._budget = DialBudget()

    def allows(self, host: str, port: int) -> bool:
        """Return whether an address from a peer may be dialled; False for a name, which may resolve elsewhere later."""
        return may_dial(host, port, self._in_use())

    def may_try(self, host: str, port: int) -> bool:
        """Return whether an address from a peer may be dialled now, and count this as a failure until `succeed`."""
        return self.allows(host, port) and self._budget.take(host, port, trio.current_time())

    async def open(self, target: tuple[str, int]) -> tuple[trio.SocketStream, tuple[str, int]]:
        """Return a TCP connection, and the IP address and port that it leads to.

        A name is resolved, and its IP address is checked. Call `succeed` when the peer has authenticated itself. Raises
        `PeerUnreachableError` if caution forbids the dial now, `OSError` if the dial fails.
        """
        host, port = await self._look_up(*target)
        if not self.allows(host, port):
            raise PeerUnreachableError(f"{host} port {port} is not dialled on a peer's word")
        if not self._budget.take(host, port, trio.current_time()):
            raise PeerUnreachableError(f"nobody has answered at {host} port {port}: it is too early to try again")
        return await trio.open_tcp_stream(host, port), (host, port)

    def succeed(self, host: str, port: int) -> None:
        """Note that a peer has authenticated itself there, the expected one or another."""
        self._budget.succeed(host, port)

    async def _look_up(self, host: str, port: int) -> tuple[str, int]:
        try:
            return str(ipaddress.ip_address(host)), port
        except ValueError:
            found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        allowed = (str(ip) for *_, (ip, *_) in found if self.allows(str(ip), port))
        return next(allowed, str(found[0][4][0])), port

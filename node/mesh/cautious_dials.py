"""Opens connections to addresses that this node knows from others alone (`farandole.protocol.dial_caution`)."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable

import trio

from farandole.protocol.dial_caution import DialBudget, may_dial

from ..base.errors import PeerUnreachableError


class CautiousDials:
    """``in_use`` gives the IP addresses where this node has business already."""

    def __init__(self, in_use: Callable[[], Iterable[str]]) -> None:
        self._in_use = in_use
        self._budget = DialBudget()

    def allows(self, host: str, port: int) -> bool:
        """Whether an address may be dialled on a peer's word; False for a name, which may be anybody's tomorrow."""
        return may_dial(host, port, self._in_use())

    async def open(self, target: tuple[str, int]) -> tuple[trio.SocketStream, tuple[str, int]]:
        """A TCP connection, and the IP address and port where it leads.

        A name is looked up, and what it stands for is judged. Call `succeed` when the peer has proved itself. Raises
        `PeerUnreachableError` where caution forbids it now, `OSError` if it comes to none.
        """
        host, port = await self._look_up(*target)
        if not self.allows(host, port):
            raise PeerUnreachableError(f"{host} port {port} is not dialled on a peer's word")
        if not self._budget.take(host, port, trio.current_time()):
            raise PeerUnreachableError(f"nobody has answered at {host} port {port}: it is too early to try again")
        return await trio.open_tcp_stream(host, port), (host, port)

    def succeed(self, host: str, port: int) -> None:
        """Some peer has proved itself there, be it the right one."""
        self._budget.succeed(host, port)

    async def _look_up(self, host: str, port: int) -> tuple[str, int]:
        try:
            return str(ipaddress.ip_address(host)), port
        except ValueError:
            found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        allowed = (str(ip) for *_, (ip, *_) in found if self.allows(str(ip), port))
        return next(allowed, str(found[0][4][0])), port

"""Plain sockets in homes of the lab: what can be reached from where, without libp2p, compared with theory.

A socket belongs to the network namespace in which it was made, so those of all homes are in this process. A path counts
once both ends have read from it the token that both were given, however it was opened: an accepted connection, an
outgoing one, and a simultaneous open (RFC 9293, section 3.5) look alike.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio

from farandole.testnet.natlab import kinds
from farandole.testnet.natlab.kinds import HTTPS_PORT, HomeKind
from farandole.testnet.natlab.namespace import Location, Namespace

TOKEN_BYTES: Final = 16
# A path opens within milliseconds, or after one repetition of TCP's first packet, which takes a second. The trial waits
# no longer than that if theory predicts no path, and otherwise as long as a busy machine may need.
PATHLESS_SECONDS: Final = 1.5
PATIENCE: Final = 20.0
# Between two attempts: a home's router may have dropped the earlier one, if it came before the other side's.
_REPEAT_INTERVAL: Final = 0.1
# Each trial uses fresh ports, so that no NAT remembers them.
_FIRST_PORT: Final = 20_000
_BACKLOG: Final = 16

Address = tuple[str, int]
Name = TypeVar("Name", bound=Hashable)


@contextmanager
def entered(namespace: Namespace) -> Iterator[None]:
    """Enter a namespace in this thread: a socket that is made inside belongs to it for good."""
    setns = ctypes.CDLL(None, use_errno=True).setns  # `os.setns` comes with Python 3.12
    with Path("/proc/thread-self/ns/net").open() as own, Path(f"/proc/{namespace.holder}/ns/net").open() as its:
        assert setns(its.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert setns(own.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def socket_in(place: Location, port: int = 0) -> trio.socket.SocketType:
    """Return a TCP socket in the place's namespace, bound to a port that several sockets may share."""
    assert place.namespace is not None
    with entered(place.namespace):
        made = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    made.bind(("0.0.0.0", port))
    return trio.socket.from_stdlib_socket(made)


@dataclass
class Probe:
    """A host. Its sockets stay open until the ``nursery`` ends, as an application's do, so that ports stay in use."""

    place: Location
    nursery: trio.Nursery
    _next_port: int = _FIRST_PORT
    _open: list[trio.socket.SocketType] = field(default_factory=list)
    _arrivals: dict[int, trio.MemoryReceiveChannel[trio.socket.SocketType]] = field(default_factory=dict)
    """Local port -> the connections that arrived at it."""

    def take_port(self) -> int:
        """Return an unused local port."""
        self._next_port += 1
        return self._next_port

    def serve(self, port: int = HTTPS_PORT) -> None:
        """Tell each caller which address it has outside."""

        async def tell(caller: trio.socket.SocketType) -> None:
            with suppress(OSError), caller:
                while await caller.recv(1):
                    ip, port = caller.getpeername()
                    await caller.send(f"{ip}:{port}".encode())

        self._accept(port, lambda caller: self.nursery.start_soon(tell, caller))

    def _accept(self, port: int, take: Callable[[trio.socket.SocketType], None]) -> None:
        listener = socket_in(self.place, port)
        listener.listen(_BACKLOG)

        async def accept() -> None:
            with listener:
                while True:
                    arrived, _ = await listener.accept()
                    self._open.append(arrived)
                    take(arrived)

        self.nursery.start_soon(accept)

    async def observe(self, third: str, port: int, seconds: float = PATIENCE) -> Address | None:
        """Return the local port's address as the third host sees it; None if that host cannot be reached."""
        arrive, self._arrivals[port] = trio.open_memory_channel[trio.socket.SocketType](_BACKLOG)
        self._accept(port, arrive.send_nowait)
        self._open.append(calling := socket_in(self.place, port))
        with trio.move_on_after(seconds), suppress(OSError):
            await calling.connect((third, HTTPS_PORT))
            await calling.send(b"?")
            if answer := await calling.recv(64):
                ip, _, seen = answer.decode().rpartition(":")
                return ip, int(seen)
        return None

    async def reach(self, port: int, token: bytes, seconds: float, target: Address | None = None) -> bool:
        """Return whether a path opens at the local port to a host with the same token.

        The port takes calls if it was observed; with a ``target``, it also calls that address again and again.
        """
        is_open = trio.Event()

        async def check(sock: trio.socket.SocketType) -> None:
            if await _is_peer(sock, token):
                is_open.set()

        async def call(target: Address) -> None:
            while not is_open.is_set():  # later packets would renew a NAT's mapping
                with socket_in(self.place, port) as calling, suppress(OSError):
                    await calling.connect(target)
                    await check(calling)
                await trio.sleep(_REPEAT_INTERVAL)

        async def answer() -> None:
            async for arrived in self._arrivals[port]:
                nursery.start_soon(check, arrived)

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                if target is not None:
                    nursery.start_soon(call, target)
                if port in self._arrivals:
                    nursery.start_soon(answer)
                await is_open.wait()
                nursery.cancel_scope.cancel()
        return is_open.is_set()

    def close(self) -> None:
        """Close the sockets that trials have left open."""
        for sock in self._open:
            sock.close()


async def _is_peer(sock: trio.socket.SocketType, token: bytes) -> bool:
    """Return whether the token comes back over the connection."""
    received = b""
    with suppress(OSError):
        await sock.send(token)
        while len(received) < TOKEN_BYTES and (data := await sock.recv(TOKEN_BYTES - len(received))):
            received += data
    return received == token


@asynccontextmanager
async def open_probes(places: Mapping[Name, Location]) -> AsyncIterator[dict[Name, Probe]]:
    """Open a probe in each place."""
    async with trio.open_nursery() as nursery:
        probes = {name: Probe(place, nursery) for name, place in places.items()}
        try:
            yield probes
        finally:
            nursery.cancel_scope.cancel()
            for probe in probes.values():
                probe.close()


# Trials, and what theory predicts

Reach = tuple[bool, bool, bool]
"""Whether two homes reach each other: the first calls the second, the reverse, and both call at once."""


def expected(near: HomeKind, far: HomeKind) -> Reach:
    """Return what theory predicts."""
    return kinds.can_connect(near, far), kinds.can_connect(far, near), kinds.can_punch_tcp(near, far)


async def try_pair(near: Probe, far: Probe, third: str, theory: Reach) -> Reach:
    """Try all ways at once; the third host serves at port 443 of that address."""

    async def find(caller: Probe, called: Probe, is_path: bool, *, is_mutual: bool = False) -> bool:
        """Return whether a path opens to the address that the third host has observed of the called one."""
        seconds = PATIENCE if is_path else PATHLESS_SECONDS
        port, other_port = caller.take_port(), called.take_port()
        back = await caller.observe(third, port, seconds) if is_mutual else None
        target = await called.observe(third, other_port, seconds)
        if target is None or (is_mutual and back is None):
            return False
        return await meet(caller, port, called, other_port, seconds, target, back)

    there, back, both = theory
    found = await gather(
        partial(find, near, far, there), partial(find, far, near, back), partial(find, near, far, both, is_mutual=True)
    )
    return found[0], found[1], found[2]


async def meet(
    near: Probe, near_port: int, far: Probe, far_port: int, seconds: float, target: Address, back: Address | None = None
) -> bool:
    """Return whether both find a path between these ports: ``near`` calls ``target``, and ``far`` calls ``back``."""
    token = secrets.token_bytes(TOKEN_BYTES)
    return all(
        await gather(
            partial(near.reach, near_port, token, seconds, target), partial(far.reach, far_port, token, seconds, back)
        )
    )


async def gather(*trials: Callable[[], Awaitable[bool]]) -> list[bool]:
    """Make the trials at once; return their results in order."""
    results = [False] * len(trials)

    async def note(index: int, trial: Callable[[], Awaitable[bool]]) -> None:
        results[index] = await trial()

    async with trio.open_nursery() as nursery:
        for index, trial in enumerate(trials):
            nursery.start_soon(note, index, trial)
    return results

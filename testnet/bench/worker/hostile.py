"""The processes of the benchmark of a hostile internet: the attacked node, the attackers, and honest dialers."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh.host import open_host
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.wire.identity import public_key_of

from .exchange import LOOPBACK, PROTOCOL, memory_mb
from .hostile_attacks import attack

# Attackers at once: both ends of their connections, and of the honest ones, must fit into the limit of descriptors.
MAX_AT_ONCE: Final = 1_500
# An honest dial that takes longer has failed.
_CONNECT_TIMEOUT: Final = 10.0
# Limits of every attack, whatever is requested.
MAX_FLOOD_SECONDS: Final = 900.0
MAX_ATTACKS: Final = 100_000


def raise_limit() -> None:
    """Raise this process's limit of descriptors to the maximum."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class AttackedNode:
    """The attacked node: a host with one protocol."""

    def __init__(self, stack: AsyncExitStack) -> None:
        raise_limit()
        self._stack = stack

    async def address(self) -> dict[str, Any]:
        """Listen, and return the address."""
        host = await self._stack.enter_async_context(open_host(Ed25519PrivateKey.generate(), [LOOPBACK]))
        host.set_handler(PROTOCOL, echo)
        return {"address": host.addresses[0]}

    def figures(self) -> dict[str, Any]:
        """Return the node's present use of resources."""
        return {
            "rss_mb": memory_mb("VmRSS"),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
        }


async def echo(stream: Libp2pStream) -> None:
    """Send back all data."""
    with trio.fail_after(_CONNECT_TIMEOUT):
        while data := await stream.receive_some():
            await stream.send_all(data)


async def flood(
    port: int, peer: str, kinds: Sequence[str], number: int, per_second: float, sources: int, patience: float
) -> None:
    """Attack with ``number`` connections of these kinds in turn, from ``sources`` addresses of 127.0.0.0/8.

    A connection starts when it is due at ``per_second``, but not while `MAX_AT_ONCE` are open, so the rate may be
    lower.
    """
    raise_limit()
    target, rng = public_key_of(peer), random.Random(0)
    limit = trio.CapacityLimiter(MAX_AT_ONCE)
    started_at = trio.current_time()

    async def one(index: int) -> None:
        # The honest dialer's address for one source, else one of many, in networks of 250.
        place = index % sources
        source = f"127.7.{place // 250}.{1 + place % 250}" if sources > 1 else "127.0.0.1"
        try:
            await attack(kinds[index % len(kinds)], port, target, source, rng, patience)
        finally:
            limit.release_on_behalf_of(index)

    with trio.move_on_after(MAX_FLOOD_SECONDS):
        async with trio.open_nursery() as nursery:
            for index in range(min(number, MAX_ATTACKS)):
                await trio.sleep_until(started_at + index / per_second)
                await limit.acquire_on_behalf_of(index)
                nursery.start_soon(one, index)


async def dial(address: str, seconds: float, interval: float) -> dict[str, Any]:
    """Dial as newcomers for ``seconds``, each with a key of its own; return each one's seconds until the answer."""
    raise_limit()
    peer = public_key_of(address.rpartition("/")[2])
    times: list[float] = []
    failures: list[str] = []
    ends_at = trio.current_time() + min(seconds, MAX_FLOOD_SECONDS)
    while trio.current_time() < ends_at:
        async with open_host(Ed25519PrivateKey.generate(), []) as host:
            started_at = trio.current_time()
            try:
                host.dialler.add_addresses(peer, [address])
                stream = await host.open_stream(peer, PROTOCOL, _CONNECT_TIMEOUT)
                with trio.fail_after(_CONNECT_TIMEOUT):
                    await stream.send_all(b"?")
                    if not await stream.receive_some():
                        raise trio.BrokenResourceError("no answer")
                times.append(trio.current_time() - started_at)
            except (PeerUnreachableError, trio.BrokenResourceError, trio.TooSlowError) as error:
                failures.append(f"{trio.current_time() - started_at:.2f} s: {error!r}")
        await trio.sleep(interval)
    return {"times": times, "failures": failures}

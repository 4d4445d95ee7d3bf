"""A process of the benchmark of a hostile internet: ``python -m farandole.testnet.bench.hostile_node KIND SOCKET``.

Requests come over the socket (`farandole.testnet.bench.process`). A kind is ``node`` (what is attacked), ``attackers``,
or ``dialler`` (who dials honestly meanwhile).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.libp2p_stream import Stream
from farandole.protocol.identity import public_key_of

from .hostile_attacks import AttackTarget, attack
from .meter import resident_mb
from .requests import handle_request, read_requests, send_answer

LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
PROTOCOL: Final = "/farandole/bench/1"
# Attackers at once: both ends of their connections, and of the honest ones, must fit into the descriptors allowed.
MAX_AT_ONCE: Final = 1_500
# An honest dial that takes longer has failed.
DIAL_TIMEOUT: Final = 10.0
# Whatever is asked, nothing is attacked for longer, nor by more connections.
MAX_FLOOD_SECONDS: Final = 900.0
MAX_ATTACKS: Final = 100_000


class LineCounter(logging.Handler):
    """Counts what a daemon would write to its log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """One more."""
        self.lines[f"{record.name}: {record.msg}"] += 1


class AttackedNode:
    """What is attacked: a host with one protocol, whose log is at the daemon's level."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._log = LineCounter()
        logging.getLogger().addHandler(self._log)
        logging.getLogger("farandole").setLevel(logging.INFO)
        host.set_handler(PROTOCOL, echo)

    async def address(self) -> dict[str, Any]:
        """Where it listens."""
        return {"address": self._host.addresses[0]}

    async def figures(self) -> dict[str, Any]:
        """What it holds now."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "rss_mb": resident_mb(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "objects": len(gc.get_objects()),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "log_lines": self._log.lines.total(),
            "log": dict(self._log.lines.most_common(5)),
            "at": time.monotonic(),
        }


async def echo(stream: Stream) -> None:
    """Send back what comes."""
    with trio.fail_after(DIAL_TIMEOUT):
        while data := await stream.receive_some():
            await stream.send_all(data)


class Attackers:
    """Many strangers in one process."""

    async def flood(
        self, port: int, peer: str, names: Sequence[str], number: int, per_second: float, sources: int, patience: float
    ) -> dict[str, Any]:
        """So many connections, of these kinds in turn, from so many addresses of 127.0.0.0/8, at a steady rate.

        A connection starts when it is due; not while `MAX_AT_ONCE` are open, so the rate is at most that asked for.
        """
        target = AttackTarget(port, public_key_of(peer))
        rng = random.Random(0)
        limit = trio.CapacityLimiter(MAX_AT_ONCE)
        started_at = trio.current_time()
        num_begun = 0

        async def one(index: int) -> None:
            try:
                await attack(names[index % len(names)], target, _source(index, sources), rng, patience)
            finally:
                limit.release_on_behalf_of(index)

        with trio.move_on_after(MAX_FLOOD_SECONDS):
            async with trio.open_nursery() as nursery:
                for index in range(min(number, MAX_ATTACKS)):
                    await trio.sleep_until(started_at + index / per_second)
                    await limit.acquire_on_behalf_of(index)
                    nursery.start_soon(one, index)
                    num_begun += 1
                flooded = trio.current_time() - started_at
        return {"number": num_begun, "seconds": flooded, "seconds_in_all": trio.current_time() - started_at}


def _source(index: int, sources: int) -> str:
    """One address is the honest dialler's; else one of many, in networks of 250."""
    if sources <= 1:
        return "127.0.0.1"
    index %= sources
    return f"127.7.{index // 250}.{1 + index % 250}"


class HonestDialler:
    """An honest peer."""

    async def dial(self, address: str, seconds: float, interval: float) -> dict[str, Any]:
        """Dial as newcomers for so long, each with a key of its own: the seconds of each until it was answered."""
        peer = public_key_of(address.rpartition("/")[2])
        times: list[float] = []
        failures: list[str] = []
        ends_at = trio.current_time() + min(seconds, MAX_FLOOD_SECONDS)
        while trio.current_time() < ends_at:
            async with open_host(Ed25519PrivateKey.generate(), []) as host:
                started_at = trio.current_time()
                try:
                    host.add_addresses(peer, [address])
                    stream = await host.open_stream(peer, PROTOCOL, DIAL_TIMEOUT)
                    with trio.fail_after(DIAL_TIMEOUT):
                        await stream.send_all(b"?")
                        if not await stream.receive_some():
                            raise trio.BrokenResourceError("no answer")
                    times.append(trio.current_time() - started_at)
                except (PeerUnreachableError, trio.BrokenResourceError, trio.TooSlowError) as error:
                    failures.append(f"{trio.current_time() - started_at:.2f} s: {error!r}")
            await trio.sleep(interval)
        return {"times": times, "failures": failures}

    async def cycle(self, address: str, number: int) -> dict[str, Any]:
        """Connect and disconnect so often, by turns closing politely and breaking off."""
        peer = public_key_of(address.rpartition("/")[2])
        started_at = trio.current_time()
        async with open_host(Ed25519PrivateKey.generate(), []) as host:
            for _ in range(number):
                await host.connect(peer, [address])
                await host.disconnect(peer)
        return {"seconds": trio.current_time() - started_at}


@contextlib.asynccontextmanager
async def open_kind(kind: str) -> AsyncIterator[object]:
    """What answers the requests."""
    if kind == "node":
        async with open_host(Ed25519PrivateKey.generate(), [LOOPBACK]) as host:
            yield AttackedNode(host)
    else:
        yield {"attackers": Attackers, "dialler": HonestDialler}[kind]()


async def serve(kind: str, control: trio.SocketStream) -> None:
    """Answer requests until the other end closes."""
    async with open_kind(kind) as served:
        async for request in read_requests(control):
            await send_answer(control, await handle_request(served, request))


def main() -> None:
    """Run one process, with as many descriptors as it may have."""
    kind, descriptor = sys.argv[1:]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    plain = socket.socket(fileno=int(descriptor))
    with contextlib.suppress(BrokenPipeError):
        trio.run(serve, kind, trio.SocketStream(trio.socket.from_stdlib_socket(plain)))


if __name__ == "__main__":
    main()

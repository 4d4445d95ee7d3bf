"""A process of the benchmark of joining: a member that gives a checkpoint and takes part in exchanges, or a newcomer.

    python -m farandole.testnet.bench.join_node SOCKET

Requests come over the socket (`farandole.testnet.bench.requests`). The trainer is left out: its inner steps are a
pause, and the checkpoint lies on the disk already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.bulk.contributions import Outgoing
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.negotiation import BulkService, open_bulk
from farandole.node.mesh.host import Host, open_host
from farandole.node.store.fetch import FetchProgress, fetch_checkpoint
from farandole.node.store.folder import index_of
from farandole.node.store.holdings import Holding
from farandole.node.store.provider import Conditions
from farandole.node.store.serve import BlockService
from farandole.protocol.block_transfer import Question
from farandole.protocol.blocks import Index, SignedIndex, decode_signed_index
from farandole.protocol.exchange_messages import Offer
from farandole.protocol.identity import public_key_of
from farandole.protocol.outer_rules import NoLoCoConfig
from farandole.protocol.pairing_events import StartExchange
from farandole.protocol.vectors import is_required

from .node import Lenient
from .requests import handle_request, read_requests, send_answer

RUN_ID: Final = b"bench-join".ljust(32, b"\0")
# For an exchange over a line that a newcomer fills.
EXCHANGE_SECONDS: Final = 60.0


class JoinNode:
    """What answers the requests."""

    def __init__(self, host: Host, channels: BulkService, shaping: Shaping) -> None:
        self._host = host
        self._channels = channels
        self._shaping = shaping
        self._holding: Holding | None = None
        self._exchanges = ExchangeService(host, channels, shaping)
        self._blocks = BlockService(RUN_ID, self._find, shaping, self._exchanges)
        self._blocks.channels = channels
        self._blocks.register(host)

    async def _find(self, question: Question) -> Holding | None:
        await trio.lowlevel.checkpoint()
        return None if self._holding is None else self._holding.hold()

    async def meet(self, addresses: list[str]) -> dict[str, Any]:
        """Know where others are."""
        for address in addresses:
            self._host.add_addresses(public_key_of(address.rpartition("/")[2]), [address])
        return {}

    async def hold(self, path: str) -> dict[str, Any]:
        """Give this checkpoint, whose index lies beside it, from now on."""
        self._holding = Holding.open(Path(path), *_read_index(Path(path)))
        return {}

    async def fetch(
        self, path: str, target: str, donors: list[str], cap_mbit: float = 0.0, kill: int = 0
    ) -> dict[str, Any]:
        """Fetch slow weights and momentum from donors with which there is no connection yet.

        ``path``: only its index is read. ``kill``: this process is killed when half is here.
        """
        names = [public_key_of(address.rpartition("/")[2]) for address in donors]
        for name in names:
            await self._host.disconnect(name)
        self._channels.close()
        shaping = Shaping.of_mbit(0, cap_mbit) if cap_mbit else self._shaping
        channels = None if cap_mbit else self._channels
        killed = False

        def show(progress: FetchProgress) -> None:
            nonlocal killed
            if kill and not killed and progress.num_bytes > progress.total / 2 > 2**20:
                killed = True
                os.kill(kill, signal.SIGKILL)

        started_at = time.monotonic()
        fetched = await fetch_checkpoint(
            Conditions(self._host, RUN_ID, shaping, channels),
            *_read_index(Path(path)),
            lambda: names,
            partial(is_required, NoLoCoConfig()),
            Path(target),
            show,
        )
        return {
            "started_at": started_at,
            "ended_at": time.monotonic(),
            "extra_bytes": fetched.num_bytes - fetched.total,
            "donors": len(fetched.num_by_donor),
            "killed": killed,
        }

    async def take_rounds(self, partner: str, first: int, count: int, size: int, pause: float) -> dict[str, Any]:
        """So many rounds, each a pause and an exchange with the partner, who takes the same ones."""
        peer = public_key_of(partner.rpartition("/")[2])
        seconds = []
        for round_index in range(first, first + count):
            began_at = time.monotonic()
            await trio.sleep(pause)
            await self._exchange(peer, round_index, size)
            seconds.append(time.monotonic() - began_at)
        return {"seconds": seconds}

    async def _exchange(self, peer: bytes, round_index: int, size: int) -> None:
        memory = memoryview(bytes(size))
        session = round_index.to_bytes(16, "big")
        start = StartExchange(
            session, peer, round_index, self._host.author < peer, trio.current_time() + EXCHANGE_SECONDS
        )
        offer = Offer(
            run_id=RUN_ID,
            session=session,
            stage=0,
            layout=bytes(32),
            codec="fp32",
            size=size,
            round=round_index,
            tokens=1,
        )
        outgoing = Outgoing.whole(memory, blake3(memory).digest())
        result = await self._exchanges.run(start, offer, outgoing, memoryview(bytearray(size)), Lenient())
        if not result.committed:
            raise ConnectionError(f"an exchange was not committed: {result.reason}")


def _read_index(path: Path) -> tuple[SignedIndex, Index]:
    return decode_signed_index(index_of(path).read_bytes(), RUN_ID, path.stat().st_size)


@contextlib.asynccontextmanager
async def open_join_node(ip: str) -> AsyncIterator[tuple[JoinNode, str]]:
    """A node, and where it can be dialled."""
    shaping = Shaping()
    async with (
        open_host(Ed25519PrivateKey.generate(), [f"/ip4/{ip}/tcp/0"], shaping=shaping) as host,
        open_bulk(host, shaping) as channels,
    ):
        yield JoinNode(host, channels, shaping), host.addresses[0]


def main() -> None:
    """Run one; the first request says on which address it listens."""

    async def run() -> None:
        control = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=int(sys.argv[1]))))
        requests = read_requests(control)
        first = await anext(requests)
        async with open_join_node(first["ip"]) as (node, address):
            await send_answer(control, {"address": address, "pid": os.getpid()})
            async for request in requests:
                await send_answer(control, await handle_request(node, request))

    with contextlib.suppress(BrokenPipeError):
        trio.run(run)


if __name__ == "__main__":
    main()

"""A process of the benchmark of joining: a member that gives a checkpoint and takes part in exchanges, or a newcomer.

There is no trainer: its inner steps are a pause, and the checkpoint is on the disk already.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.bulk.pipe import Outgoing
from farandole.node.mesh.host import open_host
from farandole.node.store.folder import index_of
from farandole.node.transfers.giver import BlockService, Holding
from farandole.node.transfers.receiver import Conditions, fetch_checkpoint
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import Index, SignedIndex, decode_signed_index
from farandole.protocol.run.rules import NoLoCoConfig, is_required
from farandole.protocol.wire.identity import public_key_of

from .exchange import check_committed, exchange_with

RUN_ID: Final = b"bench-join".ljust(32, b"\0")


class JoiningNode:
    """Answers the requests."""

    _holding: Holding | None = None

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def open(self, ip: str, up_mbit: float = 0.0, down_mbit: float = 0.0) -> dict[str, Any]:
        """Listen on an address; 0: no cap."""
        key, self._shaping = Ed25519PrivateKey.generate(), Shaping.of_mbit(up_mbit, down_mbit)
        host = open_host(key, [f"/ip4/{ip}/tcp/0"], shaping=self._shaping)
        self._host = await self._stack.enter_async_context(host)
        self._channels = await self._stack.enter_async_context(open_bulk(self._host, RUN_ID, self._shaping))
        self._exchanges = ExchangeService(self._host, self._channels, self._shaping)
        conditions = Conditions(self._host, RUN_ID, self._shaping, self._channels)
        BlockService(conditions, self._find, self._exchanges)
        return {"address": self._host.addresses[0]}

    async def _find(self, question: BlockQuestion) -> Holding | None:
        await trio.lowlevel.checkpoint()
        return self._holding

    async def meet(self, addresses: list[str]) -> None:
        """Add the others' addresses."""
        for address in addresses:
            self._host.dialler.add_addresses(public_key_of(address.rpartition("/")[2]), [address])

    async def hold(self, path: str) -> None:
        """Offer this checkpoint, whose index is next to it, from now on."""
        self._holding = Holding(Path(path), *_read_index(Path(path)))

    async def fetch(self, path: str, target: str, donors: list[str]) -> dict[str, Any]:
        """Fetch slow weights and momentum from donors with which there is no connection yet.

        ``path``: only its index is read.
        """
        names = [public_key_of(address.rpartition("/")[2]) for address in donors]
        for name in names:
            await self._host.connections.disconnect(name)
        self._channels.close_kept()
        started_at = time.monotonic()
        await fetch_checkpoint(
            Conditions(self._host, RUN_ID, self._shaping, self._channels),
            *_read_index(Path(path)),
            lambda: names,
            partial(is_required, NoLoCoConfig()),
            Path(target),
        )
        return {"started_at": started_at, "ended_at": time.monotonic()}

    async def take_rounds(self, partner: str, first: int, count: int, size: int, pause: float) -> dict[str, Any]:
        """Run ``count`` rounds, each a pause and an exchange with the partner, which runs the same ones."""
        peer = public_key_of(partner.rpartition("/")[2])
        seconds, is_initiator = [], self._host.author < peer
        own, theirs = memoryview(bytes(size)), memoryview(bytearray(size))
        for round_index in range(first, first + count):
            began_at = time.monotonic()
            await trio.sleep(pause)
            outgoing = Outgoing(own, blake3(own).digest())
            check_committed(
                await exchange_with(self._exchanges, peer, round_index, outgoing, theirs, is_initiator=is_initiator)
            )
            seconds.append(time.monotonic() - began_at)
        return {"seconds": seconds}


def _read_index(path: Path) -> tuple[SignedIndex, Index]:
    return decode_signed_index(index_of(path).read_bytes(), RUN_ID, path.stat().st_size)

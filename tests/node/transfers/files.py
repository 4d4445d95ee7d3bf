"""Checkpoints as files, with their indices."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.transfers.giver import Holding
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import BLOCK_BYTES, Index, SignedIndex, sign_index
from farandole.protocol.wire.identity import public_bytes

from ...protocol.checkpoints import test_blocks
from ..parties import Handler, MemoryHost, serve

RUN = b"r" * 32
NOBODY: Any = SimpleNamespace(set_handler=lambda protocol, handler: None)
"""The host of a service that dials no peer, and that a test asks itself."""
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
VECTORS = ("slow", "momentum", "mean", "square")


class ToDonor(MemoryHost):
    """A host whose streams all lead to one donor."""

    def __init__(self, nursery: trio.Nursery, donor: Handler) -> None:
        super().__init__(bytes(32), nursery, {})
        self._donor = donor

    async def open_stream(self, peer: bytes, protocol: str, timeout: float = 8.0) -> Any:
        await trio.lowlevel.checkpoint()
        near, far = trio.testing.memory_stream_pair()
        self.nursery.start_soon(serve, self._donor, self.end_of(far, peer, protocol))
        return self.end_of(near, peer, protocol)


def checkpoint_bytes(num_elements: int, seed: int = 1, round_index: int = 7) -> bytes:
    """Return four vectors of one parameter, in the order in which trainers write them."""
    size = 4 * num_elements
    header: dict[str, object] = {
        "__metadata__": {"format": "farandole/checkpoint/1", "round": str(round_index), "layout": bytes(32).hex()}
    }
    header |= {
        f"{vector}/w": {"dtype": "F32", "shape": [num_elements], "data_offsets": [start * size, (start + 1) * size]}
        for start, vector in enumerate(VECTORS)
    }
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + random.Random(seed).randbytes(len(VECTORS) * size)


def index_of(content: bytes, round_index: int = 7, key: Ed25519PrivateKey = KEY) -> Index:
    blocks = (content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES))
    hashes = b"".join(hashlib.sha256(block).digest() for block in blocks)
    author, size = public_bytes(key), len(content)
    return test_blocks.index_of(author=author, stage=0, num_stages=1, round=round_index, size=size, hashes=hashes)


def signed_index_of(content: bytes, round_index: int = 7) -> tuple[SignedIndex, Index]:
    index = index_of(content, round_index)
    return sign_index(KEY, index), index


def hold(path: Path, content: bytes) -> Holding:
    path.write_bytes(content)
    return Holding(path, *signed_index_of(content))


def is_required(name: str) -> bool:
    return name.startswith(("slow/", "momentum/"))


def finder(holding: Holding) -> Callable[[BlockQuestion], Awaitable[Holding | None]]:
    """Return a function that finds this checkpoint, whichever is asked for."""

    async def find(question: BlockQuestion) -> Holding | None:
        await trio.lowlevel.checkpoint()
        return holding

    return find


async def run_here(function: Any, *args: object) -> object:
    """Run in this thread: the mock clock would jump while a thread works."""
    await trio.lowlevel.checkpoint()
    return function(*args)

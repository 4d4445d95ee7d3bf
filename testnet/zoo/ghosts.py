"""Ghosts: one process with many keys, which send heartbeats, far ahead of all, and do nothing else.

``python -m farandole.testnet.zoo.ghosts join INVITE ...``, as a testnet starts its nodes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.mesh.host import open_host
from farandole.node.state.messenger import Messenger, open_messenger
from farandole.protocol.run.invite import decode_invite
from farandole.protocol.state.entries import Beat, Kind, Member, Payload, Signed, deltas_of
from farandole.protocol.state.push import MAX_BATCH_BYTES, PROTOCOL, Batch
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.messagepack import encode

from .plan import NICENESS, plan_of, tame, targets_of

NUM_GHOSTS: Final = 60
# The round that ghosts claim to have trained.
CLAIMED_ROUND: Final = 100_000
BEAT_INTERVAL: Final = 2.0


def signed(writer: Writer, kind: Kind, index: int, payload: Payload) -> Signed:
    """Return a new entry; nothing is stored, so a key is good for one life."""
    now = time.time()
    while (mark := writer.mark_needed(kind, index, now)) is not None:
        writer.marked(mark)
    return writer.write(kind, index, payload, now).signed


def entries_of(ghosts: list[Writer]) -> Iterator[Signed]:
    """Yield the entries of all ghosts at a heartbeat."""
    for ghost in ghosts:
        for kind, payload in ((Kind.MEMBER, Member(device="cpu")), (Kind.BEAT, BEAT)):
            if ghost.delay(kind, 0, time.time()) == 0:
                yield signed(ghost, kind, 0, payload)


BEAT: Final = Beat(inner_steps=10 * CLAIMED_ROUND, round=CLAIMED_ROUND, loss=2_000_000, tokens_per_second=1_000)


async def haunt(messenger: Messenger, targets: dict[bytes, str], run_id: bytes) -> None:
    """Push all ghosts' heartbeats to all targets, endlessly."""
    ghosts = [Writer(Ed25519PrivateKey.generate(), run_id) for _ in range(NUM_GHOSTS)]
    while True:
        for delta in deltas_of(entries_of(ghosts), max_bytes=MAX_BATCH_BYTES):
            for peer in targets:
                messenger.send_nowait(peer, PROTOCOL, encode(Batch(True, delta)))
        await trio.sleep(BEAT_INTERVAL)


async def main() -> None:
    """Run one host, with one connection to each node."""
    targets, run_id = targets_of(), decode_invite(sys.argv[2]).run_id
    async with (
        open_host(Ed25519PrivateKey.generate(), ["/ip4/127.0.0.1/tcp/0"]) as host,
        open_messenger(host) as messenger,
    ):
        for peer, address in targets.items():
            host.dialler.add_addresses(peer, [address])
        await haunt(messenger, targets, run_id)


if __name__ == "__main__":
    plan_of()
    tame(NICENESS)
    trio.run(main)

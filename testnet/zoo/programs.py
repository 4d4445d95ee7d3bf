"""Hostile programs that take part in the run state alone, with one host and a connection to each node.

``python -m farandole.testnet.zoo.programs join INVITE ...``, as a testnet starts its nodes. *Ghosts* are many keys of
one process, which send heartbeats, far ahead of all, and do nothing else. A *flood* is one member that sends 10,000
valid messages a second, of all kinds, to all nodes together, and prints the number that it has sent.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.loop.training import MAX_PAIRING_MESSAGE, PAIRING_PROTOCOL
from farandole.node.mesh.host import Host, open_host
from farandole.node.state.messenger import open_messenger
from farandole.protocol.rounds import pairing_messages
from farandole.protocol.run.invite import decode_invite
from farandole.protocol.state.entries import Beat, Delta, Kind, Lease, Member, Payload, Signed, deltas_of
from farandole.protocol.state.push import MAX_BATCH_BYTES, MAX_PUSH_BYTES, PROTOCOL, Batch
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.messagepack import SESSION_BYTES, encode

from .plan import NICENESS, plan_of, tame, targets_of


def signed(writer: Writer, kind: Kind, index: int, payload: Payload) -> Signed:
    """Return a new entry; nothing is stored, so a key is good for one life."""
    now = time.time()
    while (mark := writer.mark_needed(kind, index, now)) is not None:
        writer.marked(mark)
    return writer.write(kind, index, payload, now).signed


# Ghosts

NUM_GHOSTS: Final = 60
# The round that ghosts claim to have trained.
CLAIMED_ROUND: Final = 100_000
BEAT_INTERVAL: Final = 2.0
BEAT: Final = Beat(inner_steps=10 * CLAIMED_ROUND, round=CLAIMED_ROUND, loss=2_000_000, tokens_per_second=1_000)


def entries_of(ghosts: list[Writer]) -> Iterator[Signed]:
    """Yield the entries of all ghosts at a heartbeat."""
    for ghost in ghosts:
        for kind, payload in ((Kind.MEMBER, Member(device="cpu")), (Kind.BEAT, BEAT)):
            if ghost.delay(kind, 0, time.time()) == 0:
                yield signed(ghost, kind, 0, payload)


async def haunt(host: Host, targets: dict[bytes, str], run_id: bytes) -> None:
    """Push all ghosts' heartbeats to all targets, endlessly."""
    ghosts = [Writer(Ed25519PrivateKey.generate(), run_id) for _ in range(NUM_GHOSTS)]
    async with open_messenger(host) as messenger:
        while True:
            for delta in deltas_of(entries_of(ghosts), max_bytes=MAX_BATCH_BYTES):
                for peer in targets:
                    messenger.send_nowait(peer, PROTOCOL, encode(Batch(True, delta)))
            await trio.sleep(BEAT_INTERVAL)


# A flood

PER_SECOND: Final = 10_000
# Messages in one write.
BURST: Final = 50
# Pause after a stream was refused or reset, before the next.
RETRY_SECONDS: Final = 0.2

_BEAT: Final = Beat(inner_steps=1, round=1, loss=None, tokens_per_second=1)


def push(entries: Sequence[Signed]) -> bytes:
    """Return one frame with these entries."""
    return frame(encode(Batch(False, Delta(tuple(entries)))), MAX_PUSH_BYTES)


def newer(run_id: bytes) -> Iterator[bytes]:
    """Yield ever newer entries of one author, as long as its ticks last, then of another."""
    while True:
        writer = Writer(Ed25519PrivateKey.generate(), run_id)
        for number in range(32):
            yield push([signed(writer, Kind.LEASE, number % 8, Lease(epoch=number, corpus=bytes(8)))])


def authors(run_id: bytes) -> Iterator[bytes]:
    """Yield heartbeats, each with a key of its own."""
    while True:
        yield push([signed(Writer(Ed25519PrivateKey.generate(), run_id), Kind.BEAT, 0, _BEAT)])


def kinds_of(run_id: bytes) -> list[tuple[str, Iterator[bytes]]]:
    """Return the kinds of message: the protocol, and an endless iterator of frames."""
    known = push([signed(Writer(Ed25519PrivateKey.generate(), run_id), Kind.BEAT, 0, _BEAT)])
    withdraw = pairing_messages.encode_message(pairing_messages.Withdraw(bytes(SESSION_BYTES)))
    return [
        (PROTOCOL, itertools.repeat(push([]))),
        (PROTOCOL, itertools.repeat(known)),
        (PROTOCOL, newer(run_id)),
        (PROTOCOL, authors(run_id)),
        (PAIRING_PROTOCOL, itertools.repeat(frame(withdraw, MAX_PAIRING_MESSAGE))),
    ]


async def pour(host: Host, peer: bytes, protocol: str, frames: Iterator[bytes], per_second: float) -> None:
    """Send frames of one kind to one peer, endlessly, over a new stream whenever one is closed."""
    while True:
        try:
            stream = await host.open_stream(peer, protocol)
            next_at = trio.current_time()
            while True:
                await stream.send_all(b"".join(itertools.islice(frames, BURST)))
                next_at = max(next_at + BURST / per_second, trio.current_time() - 1.0)
                await trio.sleep_until(next_at)
        except (PeerUnreachableError, trio.BrokenResourceError, trio.TooSlowError):
            await trio.sleep(RETRY_SECONDS)


async def flood(host: Host, targets: dict[bytes, str], run_id: bytes) -> None:
    """Send all kinds to all targets, endlessly, over a stream for each."""
    kinds = kinds_of(run_id)
    async with trio.open_nursery() as pouring:
        for peer in targets:
            for protocol, frames in kinds:
                pouring.start_soon(pour, host, peer, protocol, frames, PER_SECOND / len(targets) / len(kinds))


async def main(program: Callable[[Host, dict[bytes, str], bytes], Awaitable[None]]) -> None:
    """Run one host, with the nodes' addresses."""
    targets, run_id = targets_of(), decode_invite(sys.argv[2]).run_id
    async with open_host(Ed25519PrivateKey.generate(), ["/ip4/127.0.0.1/tcp/0"]) as host:
        for peer, address in targets.items():
            host.dialler.add_addresses(peer, [address])
        await program(host, targets, run_id)


if __name__ == "__main__":
    program = {"ghosts": haunt, "flood": flood}[plan_of().program]
    tame(NICENESS)
    trio.run(main, program)

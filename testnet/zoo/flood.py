"""A flood: one member that sends 10,000 valid messages a second, of all kinds, to all nodes together.

``python -m farandole.testnet.zoo.flood join INVITE ...``, as a testnet starts its nodes. It prints the number of sent
messages when it ends.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.loop.training import MAX_PAIRING_MESSAGE, PAIRING_PROTOCOL
from farandole.node.mesh.host import Host, open_host
from farandole.protocol.rounds import pairing_messages
from farandole.protocol.run.invite import decode_invite
from farandole.protocol.state.entries import Beat, Delta, Kind, Lease, Signed
from farandole.protocol.state.push import MAX_PUSH_BYTES, PROTOCOL, Batch
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.messagepack import SESSION_BYTES, encode

from .ghosts import signed
from .plan import NICENESS, plan_of, tame, targets_of

PER_SECOND: Final = 10_000
# Messages in one write.
BURST: Final = 50
# Pause after a stream was refused or reset, before the next.
RETRY_SECONDS: Final = 0.2
SAY_SECONDS: Final = 5.0

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


async def flood(
    host: Host, peer: bytes, protocol: str, frames: Iterator[bytes], per_second: float, note: Callable[[str, int], None]
) -> None:
    """Send frames of one kind to one peer, endlessly, over a new stream whenever one is closed."""
    while True:
        try:
            stream = await host.open_stream(peer, protocol)
            note("streams", 1)
            next_at = trio.current_time()
            while True:
                await stream.send_all(b"".join(itertools.islice(frames, BURST)))
                note("messages", BURST)
                next_at = max(next_at + BURST / per_second, trio.current_time() - 1.0)
                await trio.sleep_until(next_at)
        except (PeerUnreachableError, trio.BrokenResourceError, trio.TooSlowError):
            note("refusals", 1)
            await trio.sleep(RETRY_SECONDS)


async def main() -> None:
    """Run one host, with a stream for each kind to each node."""
    targets, kinds = targets_of(), kinds_of(decode_invite(sys.argv[2]).run_id)
    counts = {"messages": 0, "streams": 0, "refusals": 0}

    def note(what: str, number: int) -> None:
        counts[what] += number

    async with open_host(Ed25519PrivateKey.generate(), ["/ip4/127.0.0.1/tcp/0"]) as host, trio.open_nursery() as all_:
        for peer, address in targets.items():
            host.dialler.add_addresses(peer, [address])
            for protocol, frames in kinds:
                all_.start_soon(flood, host, peer, protocol, frames, PER_SECOND / len(targets) / len(kinds), note)
        while True:
            await trio.sleep(SAY_SECONDS)
            print(trio.current_time(), counts, flush=True)


if __name__ == "__main__":
    plan_of()
    tame(NICENESS)
    trio.run(main)

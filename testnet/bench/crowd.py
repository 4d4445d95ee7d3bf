"""A thousand members of a run in one process, as load on a node: they publish entries and do not train.

    python -m farandole.testnet.bench.crowd ADDRESS RUN_ID CREATOR NUM_MEMBERS

A few of the members are real hosts, connected to the node at ADDRESS. They push the signed entries of all members to
it, each entry through two hosts, as its neighbours in a real run would, and answer requests for the run state. The
other members have no address. Rounds, losses and partners change as in a run. RUN_ID and CREATOR are hexadecimal. The
process runs until it is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import trio

from farandole.node.mesh.host import Host, open_host
from farandole.node.state.gossip import GossipService
from farandole.node.state.messenger import Messenger, open_messenger
from farandole.protocol.state.entries import PARTNER_BYTES, Beat, Entry, Kind, Member, Payload, Progress, Signed
from farandole.protocol.state.liveness import BASE_PERIOD, PEERS_A_SECOND
from farandole.protocol.state.packing import deltas_of
from farandole.protocol.state.push import MAX_BATCH_BYTES, NUM_CHOSEN, Batch
from farandole.protocol.state.push import PROTOCOL as PUSH_PROTOCOL
from farandole.protocol.state.state import RunState
from farandole.protocol.state.writer import Mark, Writer
from farandole.protocol.wire.identity import public_key_of

from ..simulate.state import SharedChecker, key_of

# As many connections as a node of a large run keeps.
NUM_HOSTS: Final = 12
ROUND_SECONDS: Final = 30.0
TOKENS_PER_SECOND: Final = 10_000
PROGRESS_PERIOD: Final = 60.0
# The interval at which a neighbour's push leaves.
TICK_SECONDS: Final = 0.5
# Two in three members give this address, at which nothing listens; the others give none.
NOBODY: Final = "/ip4/127.0.0.1/tcp/9"
# Above the numbers of other benchmarks' nodes: a key is derived from its number.
FIRST_NUMBER: Final = 1_000_000


class Extra:
    """One member."""

    def __init__(self, number: int, run_id: bytes) -> None:
        self.key = key_of(FIRST_NUMBER + number)
        self._writer = Writer(self.key, run_id)
        self._writer.resume(())
        self._number = number
        self.author = self._writer.author

    def write(self, payload: Payload, kind: Kind, now: float) -> list[Entry]:
        """Return the member's next entry of this kind, or none if the last is too young; ``now`` is in Unix seconds."""
        if self._writer.delay(kind, 0, now) > 0:
            return []
        mark = self._writer.mark_needed(kind, 0, now)
        if mark is not None:
            self._writer.marked(mark)
        return [self._writer.write(kind, 0, payload, now)]

    def member(self) -> Member:
        """Return what the member publishes about itself."""
        device = "cpu" if self._number % 2 else "NVIDIA GeForce RTX 4090"
        return Member(device=device, addresses=(NOBODY,) if self._number % 3 else ())

    def beat(self, seconds: float, partner: bytes) -> Beat:
        """Return the heartbeat ``seconds`` after the run began."""
        round_index = int(seconds / ROUND_SECONDS)
        loss = 3.0 + 7.0 * math.exp(-round_index / 20) + 0.1 * math.sin(self._number + round_index)
        return Beat(round_index * 100, round_index, int(loss * 1e6), TOKENS_PER_SECOND, partner[:PARTNER_BYTES])

    def progress(self, seconds: float) -> Progress:
        """Return the progress ``seconds`` after the run began."""
        rounds = int(seconds / ROUND_SECONDS)
        return Progress(rounds * 100, rounds, int(seconds) * TOKENS_PER_SECOND, rounds * 1_000_000, rounds * 1_000_000)


class MemberTurns:
    """Takes all members in turn, ``per_second`` of them each second."""

    def __init__(self, members: Sequence[Extra], per_second: float) -> None:
        self._members = itertools.cycle(members)
        self._per_second = per_second
        self._due = 0.0

    def take(self, seconds: float) -> list[Extra]:
        """Return the members whose turn comes within the next ``seconds``."""
        number, self._due = divmod(self._due + seconds * self._per_second, 1.0)
        return list(itertools.islice(self._members, int(number)))


class Crowd:
    """Members of the run, and the entries that they publish over time."""

    def __init__(self, run_id: bytes, num_members: int, rng: random.Random) -> None:
        self.members = [Extra(number, run_id) for number in range(num_members)]
        self._rng = rng
        self._began_at = time.time()
        self._partners: dict[bytes, bytes] = {}
        self._round = -1
        period = max(BASE_PERIOD, num_members / PEERS_A_SECOND)
        self._beats = MemberTurns(self.members, num_members / period)
        self._progresses = MemberTurns(self.members, num_members / PROGRESS_PERIOD)

    def all_at_once(self) -> list[Entry]:
        """Return the entries that a newcomer receives."""
        now = time.time()
        return [
            entry
            for member in self.members
            for entry in (
                *member.write(member.member(), Kind.MEMBER, now),
                *member.write(member.progress(0.0), Kind.PROGRESS, now),
                *member.write(member.beat(0.0, b""), Kind.BEAT, now),
            )
        ]

    def due(self, seconds: float) -> list[Entry]:
        """Return the entries that members publish in the next ``seconds``."""
        now = time.time()
        since = now - self._began_at
        self._pair(int(since / ROUND_SECONDS))
        entries: list[Entry] = []
        for member in self._beats.take(seconds):
            entries += member.write(member.beat(since, self._partners.get(member.author, b"")), Kind.BEAT, now)
        for member in self._progresses.take(seconds):
            entries += member.write(member.progress(since), Kind.PROGRESS, now)
        return entries

    def _pair(self, round_index: int) -> None:
        if round_index == self._round:
            return
        self._round = round_index
        authors = [member.author for member in self.members]
        self._rng.shuffle(authors)
        pairs = zip(authors[::2], authors[1::2], strict=False)
        self._partners = {author: other for pair in pairs for author, other in (pair, pair[::-1])}


class Wire:
    """A messenger that can also inject incoming pushes."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self.send_nowait = messenger.send_nowait
        self.push: Callable[[bytes, bytes], None]

    def set_receiver(
        self,
        protocol: str,
        max_bytes: int,
        receive: Callable[[bytes, bytes], None],
        on_failed: Callable[[bytes, str], None] | None = None,
    ) -> None:
        """See `Messenger.set_receiver`."""
        if protocol == PUSH_PROTOCOL:
            self.push = receive
        self._messenger.set_receiver(protocol, max_bytes, receive, on_failed)


class NoStore:
    """A store that keeps nothing: the crowd never restarts."""

    async def load_authors(self) -> dict[bytes, bytes]:
        """Return no authors."""
        return {}

    async def save_authors(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Do nothing."""

    async def load_mark(self) -> Mark:
        """Return an empty mark."""
        return ()

    async def save_mark(self, mark: Mark) -> None:
        """Do nothing."""


class CrowdNeighbour:
    """A member that is a real host, connected to the node."""

    def __init__(self, host: Host, messenger: Messenger, extra: Extra, state: RunState, rng: random.Random) -> None:
        self.host = host
        self.wire = Wire(messenger)
        writer = Writer(extra.key, state.run_id)
        self.gossip = GossipService(state, writer, host, self.wire, NoStore(), rng)


def batches_of(entries: Iterable[Entry]) -> list[bytes]:
    """Return the messages that carry these entries."""
    signed: list[Signed] = [entry.signed for entry in entries]
    return [
        msgspec.msgpack.encode(Batch(is_choice=True, delta=delta)) for delta in deltas_of(signed, (), MAX_BATCH_BYTES)
    ]


async def run_crowd(address: str, run_id: bytes, creator: bytes, num_members: int) -> None:
    """Run the crowd until cancelled."""
    rng = random.Random(0)
    crowd = Crowd(run_id, num_members, rng)
    checker = SharedChecker(run_id, creator)
    node = public_key_of(address.rpartition("/")[2])
    async with contextlib.AsyncExitStack() as stack:
        neighbours = []
        for extra in crowd.members[:NUM_HOSTS]:
            host = await stack.enter_async_context(open_host(extra.key, ["/ip4/127.0.0.1/tcp/0"]))
            messenger = await stack.enter_async_context(open_messenger(host))
            state = RunState(run_id, creator, checker=checker)
            neighbours.append(CrowdNeighbour(host, messenger, extra, state, random.Random(rng.random())))
        async with trio.open_nursery() as nursery:
            for neighbour in neighbours:
                await nursery.start(neighbour.gossip.run)
                await neighbour.host.connect(node, [address])
            fill(neighbours, crowd.all_at_once())
            while True:
                await trio.sleep(TICK_SECONDS)
                await spread(neighbours, node, crowd.due(TICK_SECONDS), rng)


def fill(neighbours: list[CrowdNeighbour], entries: list[Entry]) -> None:
    """Give all neighbours the members of a run that is there already; the node asks for them in its syncs.

    A push of so many new authors would be a flood, of which the node takes a few a second.
    """
    now = time.time()
    for delta in deltas_of([entry.signed for entry in entries]):
        for neighbour in neighbours:
            neighbour.gossip.state.merge(delta, now)


async def spread(neighbours: list[CrowdNeighbour], node: bytes, entries: list[Entry], rng: random.Random) -> None:
    """Give the entries to all neighbours, and let ``NUM_CHOSEN`` of them push each batch to the node."""
    told_by = rng.sample(neighbours, min(NUM_CHOSEN, len(neighbours)))
    for batch in batches_of(entries):
        for neighbour in neighbours:
            neighbour.wire.push(neighbours[0].host.author, batch)
        for neighbour in told_by:
            neighbour.wire.send_nowait(node, PUSH_PROTOCOL, batch)
        await trio.lowlevel.checkpoint()


if __name__ == "__main__":
    where, run, creator_key, number = sys.argv[1:]
    trio.run(run_crowd, where, bytes.fromhex(run), bytes.fromhex(creator_key), int(number))

"""Sybils among honest authors: run state with the real state machines, in virtual time.

Liars know every invented author, and repeatedly send all of them to their neighbours and to nodes that sync with them.
The tables of an open run are smaller than the number of authors. With `invited`, an author needs an admission, and a
member that may invite has a limited number of seats.

The measures are whether honest authors stay in every honest node's table, and how fast an honest entry reaches all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.invitations import Admission, invite_members, sign_witness
from farandole.protocol.state.entries import AdmissionProof, Delta, Kind, Member
from farandole.protocol.state.state import MAX_AUTHORS
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import public_bytes
from farandole.protocol.wire.messagepack import encode

from .simulation import UNIX_EPOCH
from .state import RUN_ID, SimulatedNode, World, delays_of, key_of

QUOTA: Final = 8
"""Seats that the hostile member may give away."""
FIRST_SYBIL: Final = 1_000_000
"""Number of the first invented author; honest nodes have smaller ones."""
_CREATOR: Final = 999_999
_FOR_EVER: Final = int(UNIX_EPOCH) + 10**9
_TELL_SECONDS: Final = 10.0
_SEATS: Final = 1_000
LIES_AT: Final = 1.0
"""Virtual second at which the lies begin."""
WRITES_AT, WRITE_SECONDS, FOLLOWED_SECONDS = 60.0, 15.0, 40.0
"""Virtual second from which honest nodes write and traffic counts; seconds in which every honest node writes an entry,
and from their beginning to the end of the play."""
ENDS_AT: Final = WRITES_AT + FOLLOWED_SECONDS
NUM_LIARS: Final = 4
LOSS: Final = 0.05

Admissions = Literal["open", "uninvited", "invited"]
"""``open``: anybody is a member; else an invite is needed, which the liars lack, or have, with a quota."""


@dataclass(frozen=True, slots=True)
class SybilScenario:
    """The parameters of a simulation."""

    honest: int
    sybils: int
    """Number of invented authors; with 0 there are no liars."""
    admission: Admissions = "open"
    max_authors: int = MAX_AUTHORS
    replaced_a_minute: float = 0.1
    """Share of the honest nodes that are replaced each minute."""


@dataclass(frozen=True, slots=True)
class SybilOutcome:
    """The state of the honest nodes at the end, without nodes that joined or died."""

    kept: float
    """Mean share of the honest authors that the honest tables hold."""
    most_invented: int
    """Number of invented authors in the table that has the most."""
    are_equal: bool
    """Whether all tables hold the same invented authors."""
    delays: list[float]
    """Seconds from an entry's writing to its arrival at each node, sorted; infinity where it never arrived."""
    messages: float
    """Messages per node and second."""
    num_bytes: float
    """Bytes per node and second."""

    def delay(self, share: float) -> float:
        """Return the seconds within which this share of the deliveries was made."""
        return self.delays[min(int(share * len(self.delays)), len(self.delays) - 1)]


def network_of(peer: bytes) -> str:
    """Return a network of its own for each peer: the best case for a liar."""
    return hashlib.sha256(peer).hexdigest()


def sybil_entries(
    number: int, now: float, invited_by: Ed25519PrivateKey | None = None, sponsor: Admission | None = None
) -> Delta:
    """Return the entries of invented authors; ``invited_by``: each has an admission to one of this sponsor's seats."""
    invite = invited_by and invite_members(invited_by, RUN_ID, bytes(32), range(QUOTA), _FOR_EVER, sponsor=sponsor)
    entries = []
    for index in range(number):
        writer = Writer(key_of(FIRST_SYBIL + index), RUN_ID)
        writer.marked(((0, int(now) + 100),))
        if invited_by and invite:
            admission = witnessed(invite.admit(RUN_ID, writer.author, index % QUOTA), invited_by)
            entries.append(writer.write(Kind.ADMISSION, 0, AdmissionProof(encode(admission)), now).signed)
        entries.append(writer.write(Kind.MEMBER, 0, Member(device="invented"), now).signed)
    return Delta(tuple(entries))


def witnessed(admission: Admission, by: Ed25519PrivateKey) -> Admission:
    """Return an admission with a member's word for it."""
    return msgspec.structs.replace(admission, witness=sign_witness(by, RUN_ID, admission, int(UNIX_EPOCH)))


def let_lie(world: World, liar: SimulatedNode, sybils: Delta) -> None:
    """Start a member that sends all invented authors to its neighbours, and to nodes that sync with it."""
    liar.state.places.capacity = FIRST_SYBIL
    liar.start(world.contacts())

    def tell() -> bool:
        now, unix = world.simulation.now, liar.clock.unix()
        liar.gossip.merge(sybils, liar.author, unix, now, forward=False, is_asked=True)
        liar.gossip.push.queue(sybils.entries, None)
        return True

    world.simulation.call_every(_TELL_SECONDS, tell)


def build(scenario: SybilScenario, seed: int) -> tuple[World, Delta]:
    """Return a world of settled honest nodes, and the entries that the liars send."""
    now = UNIX_EPOCH + LIES_AT
    if scenario.admission == "open":
        world = World(seed, scenario.honest, LOSS, max_authors=scenario.max_authors, network_of=network_of)
        return world, sybil_entries(scenario.sybils, now)
    creator, liar = key_of(_CREATOR), scenario.honest + 1
    sponsors = invite_members(creator, RUN_ID, b"sponsor".ljust(32), range(1), _FOR_EVER, quota=QUOTA)
    sponsor = sponsors.admit(RUN_ID, public_bytes(key_of(liar)), 0)
    invites = [
        invite_members(
            creator,
            RUN_ID,
            f"honest {index}".encode().ljust(32),
            range(index * _SEATS, (index + 1) * _SEATS),  # a creator's invites share no seat; 0 is the sponsor's
            _FOR_EVER,
        )
        for index in range(2 * scenario.honest // _SEATS + 1)  # up to the same number again join as replacements
    ]

    @cache
    def admission_of(author_number: int) -> bytes:
        if author_number == liar:
            return encode(witnessed(sponsor, creator))
        invite = invites[author_number // _SEATS]
        admission = invite.admit(RUN_ID, public_bytes(key_of(author_number)), author_number)
        return encode(witnessed(admission, creator))

    numbers = {public_bytes(key_of(number)): number for number in range(1, 2 * scenario.honest)}
    world = World(
        seed,
        scenario.honest,
        LOSS,
        max_authors=scenario.max_authors,
        network_of=network_of,
        creator=public_bytes(creator),
        admission_of=lambda author: admission_of(numbers[author]),
    )
    if scenario.admission == "uninvited":
        return world, sybil_entries(scenario.sybils, now)
    return world, sybil_entries(scenario.sybils, now, key_of(liar), sponsor)


def play(scenario: SybilScenario, seed: int) -> SybilOutcome:
    """Play the scenario; equal seeds give equal outcomes."""
    world, sybils = build(scenario, seed)
    world.settle()
    honest = list(world.nodes)
    if sybils.entries:
        liars = [world.add_node() for _ in range(NUM_LIARS if scenario.admission == "open" else 1)]
        for liar in liars:
            world.simulation.call_at(LIES_AT, partial(let_lie, world, liar, sybils))
    num_replaced = round(scenario.replaced_a_minute * len(honest) * ENDS_AT / 60.0)
    world.replace(world.simulation.rng.sample(honest, num_replaced), ENDS_AT)
    world.simulation.run_until(WRITES_AT)
    sent = {node.author: _sent(world, node) for node in honest}
    written = world.publish_all([node for node in honest if node.is_running], WRITE_SECONDS)
    world.simulation.run_until(ENDS_AT)
    stayed = [node for node in honest if node.is_running]
    authors = {node.author for node in stayed}
    invented = {signed.author for signed in sybils.entries}
    known = [frozenset(invented & set(node.state.authors)) for node in stayed]
    kept = sum(other.author in node.state for node in stayed for other in stayed)
    traffic = [(_sent(world, node), sent[node.author]) for node in stayed]
    return SybilOutcome(
        kept=kept / len(stayed) ** 2,
        most_invented=max(map(len, known)),
        are_equal=len(set(known)) == 1,
        delays=delays_of([each for each in written if each[0].author in authors], stayed),
        messages=sum(after[0] - before[0] for after, before in traffic) / len(stayed) / FOLLOWED_SECONDS,
        num_bytes=sum(after[1] - before[1] for after, before in traffic) / len(stayed) / FOLLOWED_SECONDS,
    )


def _sent(world: World, node: SimulatedNode) -> tuple[int, int]:
    traffic = world.network.traffic[node.author]
    return traffic.messages, traffic.num_bytes

"""Audits: rounds are committed to, some are replayed by others, and who committed to what was not done is avoided.

After the inner steps of a round its author signs a `Commitment`: the hashes of where it began and of what came out.
Every member whose processor is of the same class draws, for each new commitment of each other member, whether to
replay that round. The draw is a hash of the commitment and of the auditor's own next one, which did not exist when the
author signed. So no author knows which rounds are replayed, or by whom, and what a few liars draw changes nothing for
the others. (One auditor for each round, by rendezvous hashing, was rejected: an author tries starts until the hash
names a friend.) The chances add up to the run's rate, for each author and round.

The partner of an exchange compares what it got with what the author has committed to for that round. An author that
sends something else, or has no commitment for the round, is avoided for a while when that has happened in several
rounds: the partner knows, but cannot prove it, and one that dies and comes back may do it once.

An auditor fetches the start from the author, which the commitment proves, and replays. What comes out twice alike, and
is not what was signed, is proof: anybody who replays it sees the same. The auditor avoids the author from then on, and
publishes the signed commitment. Others believe nothing: they replay it too, and hear each accuser once, so that false
ones cost little. An author that does not give its starts is avoided for a while, after several rounds.

A member replays its own rounds in the same way: the first one of each trainer, before it judges any other's, and some
later. If its own replay differs, its machine computes wrongly, and it stops. No author is judged by a machine whose
replays differ from each other.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from .entries import RULES, Commitment, Kind, Signed
from .identity import framed, short_name
from .trainer_messages import Replay, Replayed

# Of a member's replays, those of its own rounds. A replay takes as long as the round's inner steps, so that all of them
# together take the run's rate of a member's time.
OWN_SHARE: Final = 0.1
# Rounds that wait to be replayed; authors keep starts for no more rounds than this.
MAX_WAITING: Final = 4
# A round with more inner steps than this many of one's own is left to faster members.
MAX_TIMES_OWN_STEPS: Final = 4
# Rounds in which an author does not give its start, or not what it has committed to, before it is avoided; and for how
# long, in seconds.
MAX_FAILED: Final = 3
# Of so many rounds.
FAILED_WITHIN: Final = 100
AVOID_SECONDS: Final = 3_600.0
# An entry reaches all nodes within seconds; one of a machine that hangs for a while comes later.
COMMIT_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class RoundClaim:
    """A member's commitment, and the signature on it; None for one's own, which proves nothing to oneself."""

    author: bytes
    commitment: Commitment
    signed: Signed | None = None

    @property
    def id(self) -> bytes:
        """32 bytes."""
        encoded = msgspec.msgpack.encode(self.commitment)
        return hashlib.sha256(framed(b"farandole/commitment/1", self.author, encoded)).digest()

    @property
    def kind(self) -> tuple[str, str, bytes]:
        """Build, processor and text: what two must share to compute the same."""
        return self.commitment.build, self.commitment.device, self.commitment.corpus

    @property
    def is_comparable(self) -> bool:
        """Whether replays give equal bits: of GPUs it was not measured, and a stream of text cannot be read again."""
        return not self.commitment.device.startswith("cuda") and any(self.commitment.corpus)


# Events


@dataclass(frozen=True, slots=True)
class OwnRound:
    """A round of this node is committed to; ``others`` are what the run state has of the other live members."""

    claim: RoundClaim
    path: str
    """Of its start."""
    others: Sequence[RoundClaim]


@dataclass(frozen=True, slots=True)
class ContributionReceived:
    """An exchange was committed: of that round of the peer's, by its word, with this BLAKE3 of what it gave."""

    peer: bytes
    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class CommitmentsHeard:
    """There may be new commitments: these are what the run state has of the other live members, who are ``live``."""

    claims: Sequence[RoundClaim]
    live: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Accused:
    """A live member says that a replay of this commitment, which is genuine, gives something else."""

    accuser: bytes
    claim: RoundClaim


@dataclass(frozen=True, slots=True)
class StartFetched:
    """The start that `FetchStart` asked for is here; ``path`` is empty if the author did not give it."""

    path: str = ""
    is_excused: bool = False
    """It gives to others now, or has replaced the commitment since."""


@dataclass(frozen=True, slots=True)
class TrainerGone:
    """There is no trainer; what it replayed is not known."""


Event = OwnRound | ContributionReceived | CommitmentsHeard | Accused | StartFetched | Replayed | TrainerGone


# Outputs


@dataclass(frozen=True, slots=True)
class FetchStart:
    """Fetch the start of this round from these, the likeliest first."""

    claim: RoundClaim
    donors: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Avoid:
    """Do not meet this member, until then (infinity: as long as this node lives)."""

    author: bytes
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Denounce:
    """Publish this claim as false, and keep its start for those who replay it."""

    claim: RoundClaim
    path: str


@dataclass(frozen=True, slots=True)
class Distrust:
    """This machine computes wrongly: contribute nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Audited:
    """A round was as its author committed to."""

    claim: RoundClaim
    path: str


Output = FetchStart | Replay | Avoid | Denounce | Distrust | Audited


@dataclass(slots=True)
class _Case:
    """A round to be replayed."""

    claim: RoundClaim
    path: str = ""
    accuser: bytes = b""
    first: Replayed | None = None
    """What the first replay gave, if it was not what was signed."""


@dataclass(slots=True)
class _Memory:
    """What a node remembers of the other members."""

    considered: dict[bytes, int] = field(default_factory=dict)
    """Author -> newest round that it has drawn for."""
    failed: dict[bytes, set[int]] = field(default_factory=dict)
    """Author -> rounds whose start it did not give, or in which it gave something else than it committed to."""
    received: dict[bytes, tuple[ContributionReceived, float]] = field(default_factory=dict)
    """Author -> what it gave in the last exchange, and when; until it is compared."""
    proved: set[bytes] = field(default_factory=set)
    """Authors of false commitments."""
    liars: set[bytes] = field(default_factory=set)
    """Accusers of whom an accusation was wrong, or could not be checked."""
    heard: set[bytes] = field(default_factory=set)
    """Accusers whose accusation was replayed."""


class Audits:
    """Decides which rounds a node replays, and what follows. ``rate`` is the run's.

    `handle` takes monotonic times in seconds.
    """

    def __init__(self, author: bytes, rate: float) -> None:
        self._author = author
        self._rate = rate
        self._own: RoundClaim | None = None
        self._is_proved = False  # a replay of an own round by this trainer was right
        self._is_distrusted = False
        self._waiting = deque[_Case](maxlen=MAX_WAITING)
        self._case: _Case | None = None
        self._memory = _Memory()

    def handle(self, event: Event, now: float) -> list[Output]:
        """Take an event in; returns what to do about it."""
        if self._is_distrusted:
            return []
        outputs: list[Output] = []
        match event:
            case OwnRound():
                self._draw(event)
            case ContributionReceived():
                self._memory.received[event.peer] = event, now
            case CommitmentsHeard():
                outputs += self._compare_received(event, now)
            case Accused():
                self._hear(event)
            case StartFetched():
                outputs += self._take_start(event, now)
            case Replayed():
                outputs += self._compare(event)
            case TrainerGone():
                self._case, self._is_proved = None, False
                own = [case for case in self._waiting if case.claim.author == self._author]
                for case in own:  # the next trainer removes their starts
                    self._waiting.remove(case)
        return outputs + self._next()

    def _draw(self, event: OwnRound) -> None:
        own = self._own = event.claim
        if not own.is_comparable:
            return
        if not self._is_proved:
            if not any(case.claim.author == self._author for case in self._cases):
                self._waiting.appendleft(_Case(own, event.path))
            return
        if is_drawn(own.id, own.id, self._rate * OWN_SHARE):
            self._waiting.appendleft(_Case(own, event.path))
        alike = [claim for claim in event.others if claim.kind == own.kind and claim.author != self._author]
        chance = self._rate * (1.0 - OWN_SHARE) / max(1, len({claim.author for claim in alike}))
        considered = self._memory.considered
        self._memory.considered = {claim.author: considered.get(claim.author, -1) for claim in alike}
        for claim in sorted(alike, key=lambda claim: claim.commitment.round):
            round_index = claim.commitment.round
            if round_index <= self._memory.considered[claim.author]:
                continue
            self._memory.considered[claim.author] = round_index
            if self._may_judge(claim) and is_drawn(claim.id, own.id, chance):
                self._waiting.append(_Case(claim))

    def _compare_received(self, event: CommitmentsHeard, now: float) -> list[Output]:
        """Whether partners gave what they have committed to.

        Nothing follows where that may have been replaced by what they have committed to since.
        """
        committed: dict[bytes, dict[int, bytes]] = {}
        for claim in event.claims:
            committed.setdefault(claim.author, {})[claim.commitment.round] = claim.commitment.contribution
        outputs: list[Output] = []
        for peer, (received, at) in list(self._memory.received.items()):
            rounds = committed.get(peer, {})
            digest = rounds.get(received.round)
            if digest is None and now < at + COMMIT_SECONDS:
                continue
            del self._memory.received[peer]
            is_there = digest is not None or max(rounds, default=0) < received.round + RULES[Kind.COMMITMENT].slots
            if digest != received.digest and is_there and peer in event.live:
                outputs += self._note_failed(peer, received.round, now)
        return outputs

    def _may_judge(self, claim: RoundClaim) -> bool:
        own = self._own
        return (
            own is not None
            and self._is_proved
            and claim.is_comparable
            and claim.kind == own.kind
            and claim.author not in (self._author, *self._memory.proved)
            and claim.commitment.steps <= MAX_TIMES_OWN_STEPS * own.commitment.steps
        )

    def _hear(self, event: Accused) -> None:
        """Replay what a member is accused of, for each accuser once: most of them accuse no second member."""
        memory = self._memory
        if event.accuser in (self._author, event.claim.author) or event.accuser in memory.liars | memory.heard:
            return
        if self._may_judge(event.claim) and len(self._waiting) < MAX_WAITING:
            memory.heard.add(event.accuser)
            self._waiting.append(_Case(event.claim, accuser=event.accuser))

    @property
    def _cases(self) -> list[_Case]:
        return [*self._waiting, *([] if self._case is None else [self._case])]

    def _next(self) -> list[Output]:
        if self._case is not None or not self._waiting or self._is_distrusted:
            return []
        self._case = case = self._waiting.popleft()
        if case.path:
            return [replay_of(case.claim, case.path)]
        return [FetchStart(case.claim, tuple(filter(None, (case.claim.author, case.accuser))))]

    def _take_start(self, event: StartFetched, now: float) -> list[Output]:
        case = self._case
        if case is None:
            return []
        if event.path:
            case.path = event.path
            return [replay_of(case.claim, case.path)]
        self._case = None
        if event.is_excused:
            return []
        if case.accuser:  # the round may be long ago: no fault of the accused
            self._memory.liars.add(case.accuser)
            return []
        return self._note_failed(case.claim.author, case.claim.commitment.round, now)

    def _note_failed(self, author: bytes, round_index: int, now: float) -> list[Output]:
        before = self._memory.failed.pop(author, set())
        rounds = {round_index, *(other for other in before if other > round_index - FAILED_WITHIN)}
        if len(rounds) < MAX_FAILED:
            self._memory.failed[author] = rounds
            return []
        reason = f"in {MAX_FAILED} rounds it gave no start to replay, or a partner something else than it committed to"
        return [Avoid(author, now + AVOID_SECONDS, reason)]

    def _compare(self, replayed: Replayed) -> list[Output]:
        case = self._case
        if case is None:
            return []
        commitment, is_own = case.claim.commitment, case.claim.author == self._author
        if replayed.problem and (is_own or not replayed.is_unfit):  # of this machine's memory or disk
            self._case = None
            return []
        if (replayed.end, replayed.contribution) == (commitment.end, commitment.contribution):
            if case.first is not None:
                return self._distrust("two replays of one round differ")
            return self._accept(case)
        if case.first is None:
            case.first = replayed
            return [replay_of(case.claim, case.path)]
        if replayed != case.first:
            return self._distrust("two replays of one round differ")
        if is_own:
            return self._distrust(f"a replay of its own round {commitment.round} gives other bits")
        self._case = None
        self._memory.proved.add(case.claim.author)
        reason = f"a replay of its round {commitment.round} gives something else than it committed to"
        return [Avoid(case.claim.author, math.inf, reason), Denounce(case.claim, case.path)]

    def _accept(self, case: _Case) -> list[Output]:
        self._case = None
        self._is_proved = self._is_proved or case.claim.author == self._author
        if case.accuser:
            self._memory.liars.add(case.accuser)
        return [Audited(case.claim, case.path)]

    def _distrust(self, words: str) -> list[Output]:
        self._is_distrusted, self._case = True, None
        return [Distrust(f"this machine computes wrongly: {words}. Look after its memory, its cooling, its clock")]


def is_drawn(audited: bytes, following: bytes, chance: float) -> bool:
    """Whether the auditor replays a commitment with this id, by that of the auditor's own next one."""
    digest = hashlib.sha256(framed(b"farandole/audit/1", audited, following)).digest()
    return int.from_bytes(digest[:8]) < chance * 2**64


def replay_of(claim: RoundClaim, path: str) -> Replay:
    """The command to replay a round whose start lies at ``path``."""
    commitment = claim.commitment
    return Replay(
        path=path,
        author=claim.author,
        first_step=commitment.first_step,
        steps=commitment.steps,
        begun_at=commitment.begun_at,
        microbatch=commitment.microbatch,
        fragment=commitment.fragment,
    )


def name_of(claim: RoundClaim) -> str:
    """A claim's author and round, for people."""
    return f"round {claim.commitment.round} of {short_name(claim.author)}"

"""Audits: members commit to their rounds, others replay some of them, and avoid authors of false commitments.

After the inner steps of a round its author signs a `Commitment`: the hashes of the round's start and of its result.
Every member whose processor is of the same class draws, for each new commitment of each other member, whether to
replay that round. The draw is a hash of the commitment and of the auditor's own next one, which did not exist when the
author signed. So no author knows which rounds are replayed, or by which members, and the draws of a few liars change
nothing for the others. (One auditor for each round, by rendezvous hashing, was rejected: an author tries starts until
the hash names a friend.) The chances add up to the run's rate, for each author and round.

The partner of an exchange compares the contribution that it got with the author's commitment for that round. An author
that sends something else, or has no commitment for the round, is avoided for a while if that has happened in several
rounds. One round is not enough: the partner cannot prove it, and an author that dies and comes back may do it once.

An auditor fetches the round's start from the author, checks it against the commitment, and replays the round. If two
replays give the same result, and it is not the signed one, that is proof: every member that replays the round sees the
same. The auditor avoids the author from then on, and publishes the signed commitment. Other members do not believe an
accusation: they replay the round too, and act on each accuser once, so that false accusations cost little. An author
that does not give its starts is avoided for a while, after several rounds.

A member replays its own rounds in the same way: the first one of each trainer, before it judges any other member's, and
some later ones. If its own replay differs, its machine computes wrongly, and it stops. A machine whose replays differ
from each other judges no author.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ..state.entries import RULES, Commitment, Kind, Signed
from ..trainer.trainer_messages import Replay, Replayed
from ..wire.identity import framed, short_name
from .pairing_events import ExchangeEnded

# Share of a member's replays that are of its own rounds. A replay takes as long as the round's inner steps, so all of
# a member's replays together take the run's rate of its time.
OWN_SHARE: Final = 0.1
# Rounds that wait to be replayed; authors keep starts for no more rounds than this.
MAX_WAITING: Final = 4
# A round with more inner steps than this many times the node's own is left to faster members.
MAX_TIMES_OWN_STEPS: Final = 4
# An author is avoided for `AVOID_SECONDS` if in `MAX_FAILED` of the last `FAILED_WITHIN` rounds it did not give its
# start, or gave something else than it committed to.
MAX_FAILED: Final = 3
FAILED_WITHIN: Final = 100
AVOID_SECONDS: Final = 3_600.0
# An entry reaches all nodes within seconds; an entry of a machine that hangs for a while comes later.
COMMIT_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class RoundClaim:
    """A member's commitment and the signature on it; None for this node's own, where it would prove nothing."""

    author: bytes
    commitment: Commitment
    signed: Signed | None = None

    @property
    def id(self) -> bytes:
        """Return the claim's id, 32 bytes."""
        encoded = msgspec.msgpack.encode(self.commitment)
        return hashlib.sha256(framed(b"farandole/commitment/1", self.author, encoded)).digest()

    @property
    def kind(self) -> tuple[str, str, bytes]:
        """Return build, processor and text, which two members must share to compute the same bits."""
        return self.commitment.build, self.commitment.device, self.commitment.corpus

    @property
    def is_comparable(self) -> bool:
        """Return whether replays give equal bits: not measured on GPUs, and a text stream cannot be read twice."""
        return not self.commitment.device.startswith("cuda") and any(self.commitment.corpus)


@dataclass(frozen=True, slots=True)
class FetchStart:
    """Fetch the start of this round from ``donors``, the likeliest first."""

    claim: RoundClaim
    donors: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Avoid:
    """Do not exchange with this member before ``until`` (infinity: while this node runs)."""

    author: bytes
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Denounce:
    """Publish this claim as false, and keep its start for members that replay it."""

    claim: RoundClaim
    path: str


@dataclass(frozen=True, slots=True)
class Distrust:
    """Contribute nothing: this machine computes wrongly."""

    reason: str


@dataclass(frozen=True, slots=True)
class Audited:
    """The replay of a round gave what its author committed to."""

    claim: RoundClaim


Output = FetchStart | Replay | Avoid | Denounce | Distrust | Audited


@dataclass(slots=True)
class _Case:
    """A round that must be replayed."""

    claim: RoundClaim
    path: str = ""
    accuser: bytes = b""
    first: Replayed | None = None
    """Result of the first replay, if it was not the signed one."""

    def replay(self) -> Replay:
        """Return the command to replay the round, whose start is there."""
        return Replay(self.path, self.claim.author, self.claim.commitment)


class Audits:
    """Decides which rounds a node replays, and what follows. ``rate``: the run's audit rate.

    Each method returns what to do next; times are monotonic seconds.
    """

    def __init__(self, author: bytes, rate: float) -> None:
        self._author = author
        self._rate = rate
        self._own: RoundClaim | None = None
        self._is_proved = False  # a replay of an own round by this trainer was right
        self._is_distrusted = False
        self._waiting = deque[_Case](maxlen=MAX_WAITING)
        self._case: _Case | None = None
        self._considered: dict[bytes, int] = {}  # author -> newest of its rounds for which this node has drawn
        self._failed: dict[bytes, set[int]] = {}
        """Author -> rounds whose start it did not give, or in which it gave something else than it committed to."""
        self._received: dict[bytes, tuple[ExchangeEnded, float]] = {}
        """Author -> its contribution in the last exchange, and when; until it is compared."""
        self._proved: set[bytes] = set()  # authors of commitments proved false
        self._heard: set[bytes] = set()  # accusers whose accusation was queued: whatever came of it, no other one is

    def note_own(self, own: RoundClaim, path: str, others: Sequence[RoundClaim]) -> list[Output]:
        """Note this node's commitment to a round, whose start is in the file ``path``, and draw for the others' rounds.

        ``others``: commitments of the other live members in the run state.
        """
        self._own = own
        if not own.is_comparable:
            return self._next()
        if not self._is_proved:
            cases = [*self._waiting, *([] if self._case is None else [self._case])]
            if not any(case.claim.author == self._author for case in cases):
                self._waiting.appendleft(_Case(own, path))
            return self._next()
        if is_drawn(own.id, own.id, self._rate * OWN_SHARE):
            self._waiting.appendleft(_Case(own, path))
        alike = [claim for claim in others if claim.kind == own.kind and claim.author != self._author]
        chance = self._rate * (1.0 - OWN_SHARE) / max(1, len({claim.author for claim in alike}))
        self._considered = {claim.author: self._considered.get(claim.author, -1) for claim in alike}
        for claim in sorted(alike, key=lambda claim: claim.commitment.round):
            round_index = claim.commitment.round
            if round_index <= self._considered[claim.author]:
                continue
            self._considered[claim.author] = round_index
            if self._may_judge(claim) and is_drawn(claim.id, own.id, chance):
                self._waiting.append(_Case(claim))
        return self._next()

    def note_exchange(self, ended: ExchangeEnded, now: float) -> None:
        """Note the end of an exchange, to compare what was received with its author's commitment."""
        if ended.committed:
            self._received[ended.peer] = ended, now

    def compare_received(self, claims: Sequence[RoundClaim], live: frozenset[bytes], now: float) -> list[Output]:
        """Compare partners' contributions with the commitments in the run state of the other live members, ``live``.

        Nothing follows where newer commitments may have replaced the one for that round.
        """
        committed: dict[bytes, dict[int, bytes]] = {}
        for claim in claims:
            committed.setdefault(claim.author, {})[claim.commitment.round] = claim.commitment.contribution
        outputs: list[Output] = []
        for peer, (received, at) in list(self._received.items()):
            rounds = committed.get(peer, {})
            digest = rounds.get(received.partner_round)
            if digest is None and now < at + COMMIT_SECONDS:
                continue
            del self._received[peer]
            newest = max(rounds, default=0)
            is_there = digest is not None or newest < received.partner_round + RULES[Kind.COMMITMENT].slots
            if digest != received.partner_digest and is_there and peer in live:
                outputs += self._note_failed(peer, received.partner_round, now)
        return [] if self._is_distrusted else outputs

    def _may_judge(self, claim: RoundClaim) -> bool:
        own = self._own
        return (
            own is not None
            and self._is_proved
            and claim.is_comparable
            and claim.kind == own.kind
            and claim.author not in (self._author, *self._proved)
            and claim.commitment.steps <= MAX_TIMES_OWN_STEPS * own.commitment.steps
        )

    def hear_accusation(self, accuser: bytes, claim: RoundClaim) -> list[Output]:
        """Queue the replay of a round that a live member says gives something else than its author has signed.

        One for each accuser, as most accuse only one.
        """
        if accuser in (self._author, claim.author) or accuser in self._heard:
            return []
        if self._may_judge(claim) and len(self._waiting) < MAX_WAITING:
            self._heard.add(accuser)
            self._waiting.append(_Case(claim, accuser=accuser))
        return self._next()

    def _next(self) -> list[Output]:
        if self._case is not None or not self._waiting or self._is_distrusted:
            return []
        self._case = case = self._waiting.popleft()
        if case.path:
            return [case.replay()]
        return [FetchStart(case.claim, tuple(filter(None, (case.claim.author, case.accuser))))]

    def take_start(self, path: str, now: float, *, is_excused: bool = False) -> list[Output]:
        """Take the start that `FetchStart` asked for; ``path`` is empty if its author did not give it.

        ``is_excused``: the author is busy giving to others, or has replaced the commitment since.
        """
        case, outputs = self._case, list[Output]()
        if case is None:
            return []
        if path:
            case.path = path
            return [case.replay()]
        self._case = None
        if not (case.accuser or is_excused):  # the round of an accusation may be long past
            outputs = self._note_failed(case.claim.author, case.claim.commitment.round, now)
        return outputs + self._next()

    def _note_failed(self, author: bytes, round_index: int, now: float) -> list[Output]:
        before = self._failed.pop(author, set())
        rounds = {round_index, *(other for other in before if other > round_index - FAILED_WITHIN)}
        if len(rounds) < MAX_FAILED:
            self._failed[author] = rounds
            return []
        reason = f"in {MAX_FAILED} rounds it gave no start to replay, or a partner something else than it committed to"
        return [Avoid(author, now + AVOID_SECONDS, reason)]

    def judge(self, replayed: Replayed) -> list[Output]:
        """Compare the result of a replay with what the round's author has signed."""
        case = self._case
        if case is None:
            return []
        commitment, is_own = case.claim.commitment, case.claim.author == self._author
        outputs: list[Output] = []
        if replayed.problem and (is_own or not replayed.is_unfit):
            pass  # a problem of this machine's memory or disk
        elif (replayed.end, replayed.contribution) == (commitment.end, commitment.contribution):
            if case.first is not None:
                return self._distrust("two replays of one round differ")
            self._is_proved = self._is_proved or is_own
            outputs = [Audited(case.claim)]
        elif case.first is None:
            case.first = replayed
            return [case.replay()]
        elif replayed != case.first:
            return self._distrust("two replays of one round differ")
        elif is_own:
            return self._distrust(f"a replay of its own round {commitment.round} gives other bits")
        else:
            self._proved.add(case.claim.author)
            reason = f"a replay of its round {commitment.round} gives something else than it committed to"
            outputs = [Avoid(case.claim.author, math.inf, reason), Denounce(case.claim, case.path)]
        self._case = None
        return outputs + self._next()

    def end_trainer(self) -> list[Output]:
        """Note that the trainer is gone; the result of its replay is not known."""
        self._case, self._is_proved = None, False
        own = [case for case in self._waiting if case.claim.author == self._author]
        for case in own:  # the next trainer removes their starts
            self._waiting.remove(case)
        return self._next()

    def _distrust(self, words: str) -> list[Output]:
        self._is_distrusted, self._case = True, None
        return [Distrust(f"this machine computes wrongly: {words}. Look after its memory, its cooling, its clock")]


def is_drawn(audited: bytes, following: bytes, chance: float) -> bool:
    """Return whether the auditor replays the commitment ``audited``, given the id of its own next commitment."""
    digest = hashlib.sha256(framed(b"farandole/audit/1", audited, following)).digest()
    return int.from_bytes(digest[:8]) < chance * 2**64


def name_of(claim: RoundClaim) -> str:
    """Return a claim's author and round as text for users."""
    return f"round {claim.commitment.round} of {short_name(claim.author)}"

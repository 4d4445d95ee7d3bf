"""Audits: which rounds are replayed, which accusers are believed, and what liars gain."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from farandole.protocol.rounds import audits
from farandole.protocol.rounds.pairing_events import ExchangeEnded
from farandole.protocol.state.entries import RULES, Commitment, Kind
from farandole.protocol.trainer.trainer_messages import Replay, Replayed

T = TypeVar("T")
ALICE, BOB, MALLORY = b"a" * 32, b"b" * 32, b"m" * 32
RIGHT = Replayed(b"e" * 32, b"c" * 32)
WRONG = Replayed(b"x" * 32, b"y" * 32)


def claim(author: bytes, round_index: int, **changes: object) -> audits.RoundClaim:
    """Return a commitment to the result `RIGHT`; no two have the same start."""
    start = random.Random(f"{author.hex()} {round_index}").randbytes(32)
    commitment = Commitment(
        round_index, start, 10 * round_index, 10, 0, 2, 0, b"e" * 32, b"c" * 32, b"t" * 8, "torch", "cpu"
    )
    return audits.RoundClaim(author, msgspec.structs.replace(commitment, **changes))


LIVE = frozenset({BOB, MALLORY})


class Auditor:
    """Alice's audits, with a trainer that replays at once."""

    def __init__(self, rate: float = 100.0) -> None:
        self.audits = audits.Audits(ALICE, rate)
        self.now = 0.0
        self.round = 0
        self.false: dict[bytes, Replayed] = {}
        """Author -> the result of replays of its rounds."""
        self.withholds: set[bytes] = set()
        self.busy: set[bytes] = set()
        self.fetched: list[audits.RoundClaim] = []

    def follow(self, said: list[audits.Output]) -> list[audits.Output]:
        """Give the trainer's and the network's answers to outputs; return all outputs."""
        outputs, waiting = list(said), list(said)
        while waiting:
            match waiting.pop(0):
                case Replay(author=author):
                    following = self.audits.judge(self.false.get(author, RIGHT))
                case audits.FetchStart(wanted, _):
                    self.fetched.append(wanted)
                    path = "" if wanted.author in self.withholds else "fetched"
                    following = self.audits.take_start(path, self.now, is_excused=wanted.author in self.busy)
                case _:
                    following = []
            outputs += following
            waiting += following
        return outputs

    def train(self, *others: audits.RoundClaim) -> list[audits.Output]:
        """Train the next round, after which the others' commitments ``others`` are known."""
        self.round += 1
        self.now += 60.0
        return self.follow(self.audits.note_own(claim(ALICE, self.round), "own", others))

    def hear(self, *claims: audits.RoundClaim, live: frozenset[bytes] = LIVE) -> list[audits.Output]:
        """Hear of the commitments in the run state."""
        return self.follow(self.audits.compare_received(claims, live, self.now))

    def hear_accusation(self, accuser: bytes, accused: audits.RoundClaim) -> list[audits.Output]:
        return self.follow(self.audits.hear_accusation(accuser, accused))

    def receive(self, peer: bytes, round_index: int, digest: bytes = RIGHT.contribution) -> None:
        """Commit an exchange with a peer."""
        ended = ExchangeEnded(bytes(16), peer, committed=True, partner_round=round_index, partner_digest=digest)
        self.audits.note_exchange(ended, self.now)


def of(kind: type[T], outputs: Iterable[audits.Output]) -> list[T]:
    return [output for output in outputs if isinstance(output, kind)]


def test_the_first_own_round_of_each_trainer_is_replayed_before_any_other() -> None:
    alice = Auditor()
    first = alice.train(claim(BOB, 1))
    assert of(audits.Audited, first) == [audits.Audited(claim(ALICE, 1))]
    assert not alice.fetched
    alice.train(claim(BOB, 2))
    assert [wanted.commitment.round for wanted in alice.fetched] == [2]
    alice.follow(alice.audits.end_trainer())
    assert of(audits.Audited, alice.train(claim(BOB, 3))) == [audits.Audited(claim(ALICE, 3))]


def test_every_round_is_drawn_at_the_rate_by_all_auditors_together() -> None:
    """The share of (author, round) with an audit, over 1,000 rounds of one author and 20 auditors."""
    num_auditors, rate, drawn = 20, 0.03, 0
    for round_index, auditor in itertools.product(range(1_000), range(num_auditors)):
        following = claim(bytes([auditor]) * 32, round_index + 1)
        drawn += audits.is_drawn(claim(MALLORY, round_index).id, following.id, rate / num_auditors)
    assert 15 < drawn < 50
    assert not audits.is_drawn(b"a" * 32, b"b" * 32, 0.0)
    assert audits.is_drawn(b"a" * 32, b"b" * 32, 1.0)


def test_who_committed_to_what_was_not_done_is_avoided_and_denounced_after_two_replays() -> None:
    alice = Auditor()
    alice.train()
    alice.false[MALLORY] = WRONG
    outputs = alice.train(claim(MALLORY, 5), claim(BOB, 5))
    (avoid,) = of(audits.Avoid, outputs)
    assert (avoid.author, avoid.until) == (MALLORY, math.inf)
    assert of(audits.Denounce, outputs) == [audits.Denounce(claim(MALLORY, 5), "fetched")]
    assert [replay.author for replay in of(Replay, outputs)].count(MALLORY) == 2
    assert not of(audits.Avoid, alice.train(claim(MALLORY, 6), claim(BOB, 6)))
    assert [wanted.author for wanted in alice.fetched].count(MALLORY) == 1, "what is proved needs no other replay"


def test_a_start_that_no_replica_can_begin_with_is_false_and_want_of_memory_is_nobodys_fault() -> None:
    alice = Auditor()
    alice.train()
    alice.false[MALLORY] = Replayed(problem="not finite", is_unfit=True)
    alice.false[BOB] = Replayed(problem="no memory")
    avoided = of(audits.Avoid, alice.train(claim(MALLORY, 5), claim(BOB, 5)))
    assert [avoid.author for avoid in avoided] == [MALLORY]


def test_an_accusation_is_believed_only_after_a_replay_a_liar_is_heard_once_and_no_check_does_no_harm() -> None:
    alice = Auditor(rate=1e-9)
    alice.train()
    alice.train(claim(BOB, 2))
    outputs = alice.hear_accusation(MALLORY, claim(BOB, 2))
    assert of(audits.Audited, outputs) == [audits.Audited(claim(BOB, 2))]
    assert not of(audits.Avoid, outputs)
    for round_index in range(3, 40):
        assert not alice.hear_accusation(MALLORY, claim(BOB, round_index))
    alice.false[BOB] = WRONG
    outputs = alice.hear_accusation(b"c" * 32, claim(BOB, 3))
    assert [avoid.author for avoid in of(audits.Avoid, outputs)] == [BOB]
    alice = Auditor(rate=1e-9)
    alice.train()
    alice.withholds.add(BOB)
    for number in range(3 * audits.MAX_FAILED):
        assert not of(audits.Avoid, alice.hear_accusation(bytes([number]) * 32, claim(BOB, number)))


def test_who_gives_no_starts_is_avoided_for_a_while_after_several_rounds_but_not_if_it_is_busy() -> None:
    alice = Auditor()
    alice.train()
    alice.withholds.add(MALLORY)
    for round_index in range(1, audits.MAX_FAILED):
        assert not of(audits.Avoid, alice.train(claim(MALLORY, round_index), claim(BOB, round_index)))
    outputs = alice.train(claim(MALLORY, audits.MAX_FAILED), claim(BOB, audits.MAX_FAILED))
    (avoid,) = of(audits.Avoid, outputs)
    assert (avoid.author, avoid.until) == (MALLORY, alice.now + audits.AVOID_SECONDS)
    alice = Auditor()
    alice.train()
    alice.withholds.add(BOB)
    alice.busy.add(BOB)
    for round_index in range(1, 10):
        assert not of(audits.Avoid, alice.train(claim(BOB, round_index)))


def test_a_machine_whose_replays_differ_or_whose_own_round_comes_out_otherwise_accuses_nobody_and_stops() -> None:
    alice = Auditor()
    alice.train()
    outputs = alice.audits.note_own(claim(ALICE, 2), "own", [claim(BOB, 2)])
    while not isinstance(outputs[-1], audits.FetchStart):
        outputs = alice.audits.judge(RIGHT)
    alice.audits.take_start("fetched", 0.0)
    alice.audits.judge(WRONG)
    (distrust,) = alice.audits.judge(Replayed(b"z" * 32, b"z" * 32))
    assert isinstance(distrust, audits.Distrust)
    assert not alice.audits.note_own(claim(ALICE, 3), "own", [claim(BOB, 3)])
    alice = Auditor()
    alice.false[ALICE] = WRONG
    assert of(audits.Distrust, alice.train())


def test_other_machines_other_texts_and_endless_rounds_are_left_to_others() -> None:
    alice = Auditor()
    alice.train()
    alice.train(
        claim(BOB, 5, device="another"),
        claim(BOB, 6, build="another"),
        claim(BOB, 7, corpus=b"another "),
        claim(BOB, 9, device="cuda"),
        claim(BOB, 8, steps=10 * audits.MAX_TIMES_OWN_STEPS + 1),
    )
    assert not alice.fetched


def test_what_waits_is_bounded_by_what_authors_keep() -> None:
    alice = Auditor()
    alice.train()
    replayed = 0
    for round_index in range(2, 100):  # the trainer is slow: nothing is replayed in this time
        alice.audits.note_own(claim(ALICE, round_index), "own", [claim(BOB, round_index)])
    outputs = alice.audits.judge(RIGHT)
    while outputs and replayed < 100:
        is_replay = isinstance(outputs[-1], Replay)
        replayed += is_replay
        outputs = alice.audits.judge(RIGHT) if is_replay else alice.audits.take_start("fetched", 0.0)
    assert replayed <= audits.MAX_WAITING + 1


def test_who_gives_its_partner_something_else_than_it_commits_to_is_avoided_for_a_while() -> None:
    alice, outputs = Auditor(), list[audits.Output]()
    for round_index in range(audits.MAX_FAILED):
        assert not outputs
        alice.receive(MALLORY, round_index, b"other" * 6)
        alice.receive(BOB, round_index)
        outputs = alice.hear(claim(MALLORY, round_index), claim(BOB, round_index))
    assert [(avoid.author, avoid.until) for avoid in of(audits.Avoid, outputs)] == [(MALLORY, audits.AVOID_SECONDS)]


def test_who_commits_to_fewer_rounds_than_it_takes_part_in_is_avoided_and_a_late_entry_does_no_harm() -> None:
    alice, outputs = Auditor(), list[audits.Output]()
    for round_index in range(2 * audits.MAX_FAILED):
        alice.receive(MALLORY, 2 * round_index + 1)
        alice.receive(BOB, round_index)
        assert not alice.hear(claim(MALLORY, 2 * round_index)), "the entries may be on their way"
        alice.now += audits.COMMIT_SECONDS
        outputs += alice.hear(claim(MALLORY, 2 * round_index), claim(BOB, round_index))
    assert {avoid.author for avoid in of(audits.Avoid, outputs)} == {MALLORY}


def test_a_member_that_is_gone_or_whose_commitment_was_replaced_has_done_nothing() -> None:
    alice = Auditor()
    for round_index in range(2 * audits.MAX_FAILED):
        alice.receive(BOB, 10 * round_index)
        alice.receive(MALLORY, round_index)
        alice.now += audits.COMMIT_SECONDS
        later = claim(BOB, 10 * round_index + RULES[Kind.COMMITMENT].slots)
        assert not alice.hear(later, live=frozenset({BOB}))


def test_a_member_that_never_commits_is_avoided_for_a_while() -> None:
    alice, outputs = Auditor(), list[audits.Output]()
    for round_index in range(audits.MAX_FAILED):
        alice.receive(MALLORY, round_index)
        alice.now += audits.COMMIT_SECONDS
        outputs += alice.hear()
    assert [avoid.author for avoid in of(audits.Avoid, outputs)] == [MALLORY]

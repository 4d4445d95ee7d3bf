"""A contribution that is taken in while it arrives: whatever the order of the calls, the outcome is the same."""

from __future__ import annotations

import math

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from farandole.training.base.errors import DataError, DivergedError, ScreeningError
from farandole.training.engine.learner import Learner
from farandole.training.outer import codec
from farandole.training.outer.partner import EvaluationTime
from farandole.training.screening.rule import EVALUATION_BATCHES, EVALUATION_SECONDS, Encounter

from ..conftest import ALICE, BOB, MakeReplica, refusal

EVERY_CODEC = pytest.mark.parametrize("name", [*codec.CODECS, "topk"])


@pytest.fixture(autouse=True)
def _many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_SLICE", 512)


def trained(make_replica: MakeReplica, author: bytes, **outer: object) -> Learner:
    replica = make_replica(author, **outer)
    for _ in range(3):
        replica.learn()
    return replica


def sent(replica: Learner) -> bytearray:
    out = bytearray(replica.round_end.contribution_bytes)
    replica.round_end.contribute(out)
    return out


@EVERY_CODEC
def test_the_bytes_that_progress_names_are_final(make_replica: MakeReplica, name: str) -> None:
    alice = trained(make_replica, ALICE, codec=name)
    out = bytearray(alice.round_end.contribution_bytes)
    seen: list[bytes] = []

    size, digest = alice.round_end.contribute(out, progress=lambda ready: seen.append(bytes(out[:ready])))

    assert len(seen) == math.ceil(alice.checkpoint.layout.num_elements / 512)
    assert all(bytes(out).startswith(part) for part in seen)
    assert len(seen[-1]) == size == len(out)
    assert digest == blake3(out).digest()


@EVERY_CODEC
def test_what_is_taken_in_as_it_arrives_gives_the_same_outer_step(make_replica: MakeReplica, name: str) -> None:
    of_bob = sent(trained(make_replica, BOB, codec=name))
    whole, parts = (trained(make_replica, ALICE, codec=name) for _ in range(2))
    sent(whole)
    sent(parts)
    incoming = bytearray(len(of_bob))

    whole.round_end.apply(of_bob, Encounter(b"", 2, 1))
    for available in (0, 1, 100, 100, 3_000, 3_001, len(of_bob)):
        incoming[:available] = of_bob[:available]
        parts.round_end.take_in(incoming, available)
    assert refusal(parts, incoming) == ""
    incoming[:] = bytes(len(incoming))  # it is not read again
    parts.round_end.apply(incoming, Encounter(b"", 2, 1))

    assert torch.equal(whole.round_end.slow_weights(), parts.round_end.slow_weights())


@given(arrivals=st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), max_size=6))
def test_another_contribution_in_the_same_place_is_taken_in_anew(
    make_replica: MakeReplica, arrivals: list[tuple[bool, int]]
) -> None:
    """Now this one's, now that one's first bytes arrive, each from the first byte on; at last Bob's count."""
    of = {True: sent(trained(make_replica, BOB)), False: sent(trained(make_replica, b"c" * 32))}
    node, twin = (trained(make_replica, ALICE) for _ in range(2))
    sent(node)
    sent(twin)
    incoming = bytearray(len(of[True]))

    for whose, available in arrivals:
        node.round_end.take_in(incoming, 0)
        incoming[:available] = of[whose][:available]
        node.round_end.take_in(incoming, min(available, len(incoming)))
    node.round_end.take_in(incoming, 0)
    incoming[:] = of[True]
    node.round_end.apply(incoming, Encounter(b"", 1, 1))
    twin.round_end.apply(of[True], Encounter(b"", 1, 1))

    assert torch.equal(node.round_end.slow_weights(), twin.round_end.slow_weights())


def test_who_is_asked_again_looks_again(make_replica: MakeReplica) -> None:
    """An exchange that was screened may fail, and another partner's bytes come to the same place."""
    alice = trained(make_replica, ALICE)
    sent(alice)
    incoming = sent(trained(make_replica, BOB))

    assert refusal(alice, incoming) == ""
    incoming[:] = bytes(len(incoming))
    assert "norm" in refusal(alice, incoming)
    with pytest.raises(ScreeningError, match="norm"):
        alice.round_end.apply(incoming, Encounter(b"", 1, 1))


def test_nothing_is_taken_in_before_there_is_an_own_contribution(make_replica: MakeReplica) -> None:
    alice = trained(make_replica, ALICE)
    of_bob = sent(trained(make_replica, BOB))

    alice.round_end.take_in(of_bob, len(of_bob))

    assert "no contribution" in refusal(alice, of_bob)
    sent(alice)
    assert refusal(alice, of_bob) == ""


@EVERY_CODEC
def test_a_flaw_found_on_the_way_is_the_reason_of_the_refusal(make_replica: MakeReplica, name: str) -> None:
    alice = trained(make_replica, ALICE, codec=name)
    sent(alice)
    of_bob = sent(trained(make_replica, BOB, codec=name))
    flawed = b"\xff" * 8 + bytes(of_bob[8:])

    for available in (0, 2_500, len(flawed)):
        alice.round_end.take_in(flawed, available)

    assert "cannot be used" in refusal(alice, flawed)
    assert refusal(alice, of_bob) == ""


def test_a_replica_that_diverges_on_the_way_has_sent_nothing(make_replica: MakeReplica) -> None:
    alice = trained(make_replica, ALICE)
    alice.round_end.weights.flat[-1] = math.inf
    progress: list[int] = []

    with pytest.raises(DivergedError):
        alice.round_end.contribute(bytearray(alice.round_end.contribution_bytes), progress=progress.append)

    assert progress
    assert progress[-1] < alice.round_end.contribution_bytes
    assert not alice.round_end.awaits_outer_step


class Machine:
    """Evaluates a batch in ``seconds``, by a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.num_evaluated = 0
        self.time = EvaluationTime(lambda: self.now)

    def evaluate(self, num_batches: int) -> float:
        self.num_evaluated += num_batches
        self.now += num_batches * self.seconds
        return 1.0

    def contributions(self, number: int) -> list[int]:
        """Return the number of batches for each of so many contributions, with one loss each."""
        found = []
        for _ in range(number):
            self.time.begin()
            found.append(self.time.num_batches(self.evaluate))
            assert self.time.num_batches(self.evaluate) == found[-1], "one number for all losses of a contribution"
            if found[-1]:
                self.time.timed(self.evaluate, found[-1])
        return found


def test_a_machine_that_was_busy_at_first_is_not_slow_for_ever() -> None:
    machine = Machine(2.0 * EVALUATION_SECONDS)
    assert set(machine.contributions(8)) == {0}
    machine.seconds = 0.1 * EVALUATION_SECONDS
    assert machine.contributions(8)[-1] == EVALUATION_BATCHES


def test_a_machine_that_gets_slower_takes_fewer_batches() -> None:
    machine = Machine(0.1 * EVALUATION_SECONDS)
    assert machine.contributions(2) == [EVALUATION_BATCHES] * 2
    machine.seconds = 0.4 * EVALUATION_SECONDS
    assert machine.contributions(8)[-1] == 2


def test_a_partner_does_not_wait_for_a_machine_that_is_far_too_slow() -> None:
    machine = Machine(100 * EVALUATION_SECONDS)
    assert set(machine.contributions(20)) == {0}
    assert machine.num_evaluated == 2


def test_without_text_no_loss_is_known() -> None:
    def evaluate(num_batches: int) -> float:
        raise DataError("there is none")

    times = EvaluationTime()
    for _ in range(8):
        times.begin()
        assert times.num_batches(evaluate) == 0

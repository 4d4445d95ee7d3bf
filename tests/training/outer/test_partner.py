"""A contribution that is taken in while it arrives: whatever the order of the calls, the outcome is the same."""

from __future__ import annotations

import math

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farandole.training.base.errors import DataError, DivergedError
from farandole.training.engine.learner import Learner
from farandole.training.outer import codec, round_end
from farandole.training.outer.contribution import Copier, DeviceCopier, Exam
from farandole.training.screening.rule import Encounter

from ..conftest import ALICE, BOB, LateCopier, MakeReplica, refusal, sent, train

EVERY_CODEC = pytest.mark.parametrize("name", codec.CODECS)


@pytest.fixture(autouse=True)
def _many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_SLICE", 512)


def trained(make_replica: MakeReplica, author: bytes, **outer: object) -> Learner:
    replica = make_replica(author, **outer)
    train(replica)
    return replica


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

    assert torch.equal(whole.round_end.outer.slow, parts.round_end.outer.slow)


@pytest.fixture(scope="module")
def arriving(make_replica: MakeReplica) -> tuple[dict[bool, bytearray], Tensor]:
    """Bob's contribution and another partner's; and Alice's slow weights after an exchange with Bob."""
    of = {is_bobs: sent(trained(make_replica, author)) for is_bobs, author in ((True, BOB), (False, b"c" * 32))}
    alice = trained(make_replica, ALICE)
    sent(alice)
    alice.round_end.apply(of[True], Encounter(b"", 1, 1))
    return of, alice.round_end.outer.slow.clone()


@given(arrivals=st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), max_size=6))
def test_another_contribution_in_the_same_place_is_taken_in_anew(
    make_replica: MakeReplica, arriving: tuple[dict[bool, bytearray], Tensor], arrivals: list[tuple[bool, int]]
) -> None:
    """Now this one's, now that one's first bytes arrive, each from the first byte on; at last Bob's count."""
    of, expected = arriving
    node = trained(make_replica, ALICE)
    sent(node)
    incoming = bytearray(len(of[True]))

    for whose, available in arrivals:
        node.round_end.take_in(incoming, 0)
        incoming[:available] = of[whose][:available]
        node.round_end.take_in(incoming, min(available, len(incoming)))
    node.round_end.take_in(incoming, 0)
    incoming[:] = of[True]
    node.round_end.apply(incoming, Encounter(b"", 1, 1))

    assert torch.equal(node.round_end.outer.slow, expected)


def test_who_is_asked_again_looks_again(make_replica: MakeReplica) -> None:
    """An exchange that was screened may fail, and another partner's bytes come to the same place."""
    alice = trained(make_replica, ALICE)
    sent(alice)
    incoming = sent(trained(make_replica, BOB))

    assert refusal(alice, incoming) == ""
    incoming[:] = bytes(len(incoming))
    assert "norm" in refusal(alice, incoming)


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
    slow = alice.round_end.outer.slow.clone()
    alice.round_end.weights.flat[-1] = math.inf
    progress: list[int] = []

    with pytest.raises(DivergedError, match="diverged in round 0"):
        alice.round_end.contribute(bytearray(alice.round_end.contribution_bytes), progress=progress.append)

    assert progress
    assert progress[-1] < alice.round_end.contribution_bytes
    assert not alice.round_end.awaits_outer_step
    assert torch.equal(alice.round_end.outer.slow, slow)


MOST, LEAST = 2_048, 256
EXCHANGE_SECONDS = 4.0
MAX_SECONDS = 3.0


class Machine:
    """Measures a window of one token in ``seconds``, by a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.keys: list[bytes] = []
        self.exam = Exam(1, clock=lambda: self.now)

    def measure(self, num_windows: int, key: bytes) -> float:
        self.now += num_windows * self.seconds
        self.keys.append(key)
        self.num_windows = num_windows
        return 1.0

    def judge(self, chance: float = 0.5, seconds: float = EXCHANGE_SECONDS) -> int:
        """Return on how many windows each of three losses was measured; 0: there was no time for one of them."""
        begun_at = self.now
        self.exam.begin(chance, seconds)
        losses = [self.exam.loss(self.measure) for _ in range(3)]
        assert (self.exam.late_seconds == 0.0) == (None not in losses)
        self.took = self.now - begun_at
        return 0 if None in losses else self.num_windows


def test_a_machine_is_judged_by_its_present_speed_and_measures_on_some_text_at_least() -> None:
    machine = Machine(2.0 * EXCHANGE_SECONDS / LEAST)
    assert machine.judge() == 0
    assert machine.exam.late_seconds == 3 * LEAST * machine.seconds
    machine.seconds = EXCHANGE_SECONDS / 1e6
    assert [machine.judge() for _ in range(8)][-1] == MOST
    machine = Machine(1e-6)
    assert machine.judge() == MOST
    for seconds, num_windows in ((EXCHANGE_SECONDS / 120_000, 1_000), (EXCHANGE_SECONDS / LEAST / 3, LEAST)):
        machine.seconds = seconds
        assert [machine.judge() for _ in range(8)][-1] == pytest.approx(num_windows, abs=2)


def test_nobody_waits_often_for_a_machine_that_is_far_too_slow() -> None:
    machine = Machine(100.0 * EXCHANGE_SECONDS)
    assert {machine.judge() for _ in range(20)} == {0}
    assert len(machine.keys) <= 4, "a warm-up, and now and then a window"


def test_judging_takes_seconds_even_where_there_are_minutes_and_ends_in_time_where_there_are_few() -> None:
    machine = Machine(0.001)
    machine.judge(seconds=600.0)
    assert MAX_SECONDS / 2 < machine.took <= MAX_SECONDS + 2 * machine.seconds
    machine = Machine(EXCHANGE_SECONDS / LEAST / 10)
    machine.judge()
    for seconds in (EXCHANGE_SECONDS, EXCHANGE_SECONDS / 4, EXCHANGE_SECONDS / 100, 0.0, -1.0):
        machine.judge(seconds=seconds)
        assert machine.took <= max(seconds, 0.0)


def test_each_exchange_has_text_of_its_own_that_chance_determines() -> None:
    machine = Machine(1e-6)
    for chance in (0.1, 0.2, 0.1):
        machine.judge(chance)
    first, second, again = machine.keys[-9::3]
    assert first == again != second
    assert len(set(machine.keys[-3:])) == 1, "all losses of a judgement are of the same text"


def test_without_text_no_loss_is_known() -> None:
    def measure(num_windows: int, key: bytes) -> float:
        raise DataError("there is none")

    exam = Exam()
    for _ in range(8):
        exam.begin(0.5, EXCHANGE_SECONDS)
        assert exam.loss(measure) is None
        assert not exam.has_text
        assert not exam.late_seconds


# Contributions of a device whose memory is not the host's, with real copies and the calls in CUDA's order.


@pytest.fixture(params=["staged", "late"])
def copier(request: pytest.FixtureRequest) -> Copier:
    return LateCopier() if request.param == "late" else DeviceCopier(torch.device("cpu"))


@EVERY_CODEC
def test_what_is_copied_is_what_a_cpu_makes(
    make_replica: MakeReplica, copier: Copier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two rounds, the partner's bytes arriving in parts: the same bytes and the same weights, bit for bit."""
    plain = [trained(make_replica, author, codec=name) for author in (ALICE, BOB)]
    monkeypatch.setattr(round_end, "copier_for", lambda device: copier)
    copied = [trained(make_replica, author, codec=name) for author in (ALICE, BOB)]

    for _ in range(2):
        made: dict[Learner, bytearray] = {}
        for each in (*plain, *copied):
            each.learn()
            made[each] = out = bytearray(each.round_end.contribution_bytes)
            final: list[bytearray] = []

            def keep(ready: int, out: bytearray = out, final: list[bytearray] = final) -> None:
                final.append(out[:ready])

            _, digest = each.round_end.contribute(out, progress=keep)
            assert len(final) == math.ceil(each.checkpoint.layout.num_elements / 512)
            assert all(out.startswith(part) for part in final), "final when it is told of"
            assert digest == blake3(out).digest()
        for alice, bob in (plain, copied):
            alice.round_end.take_in(made[bob], 1_000)
            alice.round_end.take_in(made[bob], 3_000)
            assert refusal(alice, made[bob]) == ""
            alice.round_end.apply(made[bob], Encounter(b"", 3, 1), own_first=True)
            bob.round_end.apply(made[alice], Encounter(b"", 1, 3), own_first=False)
        assert [*map(made.get, plain)] == [*map(made.get, copied)]
        for one, other in zip(plain, copied, strict=True):
            assert torch.equal(one.round_end.outer.slow, other.round_end.outer.slow)


def test_inner_steps_may_change_the_weights_while_they_are_sent(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(make_replica, ALICE, codec="int8")
    expected = sent(plain)
    monkeypatch.setattr(round_end, "copier_for", lambda device: LateCopier())
    moving = trained(make_replica, ALICE, codec="int8")

    def step(num_ready: int) -> None:
        moving.round_end.weights.flat.add_(1.0)

    moving.round_end.contribute(out := bytearray(len(expected)), progress=step)

    assert out == expected

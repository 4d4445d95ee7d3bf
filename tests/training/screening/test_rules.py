"""What holds for every screening rule that a run file may name, and for what they remember."""

import math
import struct
import typing

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.rules import GuardConfig, ScreeningConfig, ScreeningRules
from farandole.training.engine.learner import HeldOutLoss
from farandole.training.outer import contribution
from farandole.training.screening.rule import (
    MAX_NUMBERS,
    MAX_PEERS,
    MAX_SERIES,
    Accept,
    Encounter,
    Histories,
    Partner,
    Refuse,
)

from ..conftest import ALICE, BOB, Asking, MakeReplica, exchange, refusal, sent, train

# Of a context of 16 tokens.
MAX_WINDOWS = 2_048 // 16
RULES: list[ScreeningConfig] = [rule() for rule in typing.get_args(ScreeningRules) or (ScreeningRules,)]
every_rule = pytest.mark.parametrize("settings", RULES, ids=lambda settings: settings.kind)


@every_rule
def test_an_honest_partner_is_accepted_and_what_cannot_be_averaged_is_not(
    make_replica: MakeReplica, settings: ScreeningConfig
) -> None:
    alice, bob = (make_replica(author, screening=settings) for author in (ALICE, BOB))
    train(alice)
    train(bob)
    sent(alice)
    of_bob = sent(bob)
    values = np.frombuffer(of_bob, np.float32)

    assert isinstance(alice.round_end.screen(of_bob, Encounter(BOB, 1, 1)), Accept)
    assert refusal(alice, (1e6 * values).tobytes())
    assert refusal(alice, np.full_like(values, math.nan).tobytes())
    assert alice.round_end.screen(of_bob, Encounter(BOB, 1, 1)) == Accept(), "refusals leave nothing behind"


@every_rule
def test_honest_partners_get_the_same_mean_to_the_bit(make_replica: MakeReplica, settings: ScreeningConfig) -> None:
    averaging = {"alpha": 0.0, "beta": 1.0, "gamma": 1.0}
    alice, bob = (make_replica(author, screening=settings, **averaging) for author in (ALICE, BOB))
    alice.learn()
    bob.learn()

    exchange(alice, bob, tokens=(100, 300))

    assert torch.equal(alice.round_end.slow_weights(), bob.round_end.slow_weights())


def test_a_verdicts_weight_and_clip_are_shares() -> None:
    assert Accept().shares == (0.5, 0.5)
    assert Accept(weight=0.25).shares == (0.75, 0.25)
    assert Accept(weight=0.5, clip=0.5).shares == (0.75, 0.25)
    assert Accept(clip=0.0).shares == (1.0, 0.0)


def test_the_loss_towards_a_partner_is_that_of_weights_moved_so_far(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contribution, "_MAX_SECONDS", math.inf)  # else a busy machine measures on less text
    alice, bob = make_replica(ALICE), make_replica(BOB)
    for node in (alice, bob):
        node.learn()
    of_bob = sent(bob)
    sent(alice)
    alice.learn()  # what has been learnt since is not moved by asking
    before = alice.round_end.fast_weights()
    losses: list[float | None] = []

    def judge(partner: Partner) -> Refuse:
        losses.extend(partner.evaluate(share) for share in (0.0, 1.0))
        losses.append(partner.loss_before())
        return Refuse("asked only")

    alice.round_end.partner._rule = Asking(judge)
    alice.round_end.screen(of_bob, Encounter(chance=0.25))

    assert torch.equal(alice.round_end.fast_weights(), before)
    start, contributed = make_replica(ALICE), make_replica(ALICE)
    contributed.learn()
    key = struct.pack("<d", 0.25)
    expected = [each._held_out.on_exam(MAX_WINDOWS, key) for each in (contributed, bob, start)]
    assert losses == pytest.approx(expected, rel=1e-6)


peers = st.binary(min_size=1, max_size=32)
numbers = st.floats(allow_nan=False)


@given(st.lists(st.tuples(peers, st.text(min_size=1, max_size=8), numbers), max_size=50))
def test_histories_survive_a_restart(entries: list[tuple[bytes, str, float]]) -> None:
    histories, names = Histories(), {name for _, name, _ in entries[:MAX_SERIES]}
    for peer, name, number in entries:
        if name in names:
            histories.of(peer).append(name, number)

    encoded = histories.encode()
    again = Histories.decode(encoded) if encoded else Histories()

    assert all(again.of(peer).series == histories.of(peer).series for peer, _, _ in entries)


def test_histories_are_bounded() -> None:
    histories = Histories()
    for number in range(MAX_PEERS + 10):
        histories.of(number.to_bytes(4, "little")).append("met", number)
    history = histories.of(bytes(4))
    assert not history.series, "the first peers are forgotten"
    for number in range(MAX_NUMBERS + 5):
        history.append("distance", number)
    assert history["distance"][0] == 5
    assert len(history["distance"]) == MAX_NUMBERS
    with pytest.raises(ValueError, match="would be another"):
        for number in range(MAX_SERIES):
            history.append(str(number), 0.0)


@pytest.mark.parametrize("raw", [b"", b"rubbish", msgspec.msgpack.encode([(b"p", {"a": [0.0] * (MAX_NUMBERS + 1)})])])
def test_a_damaged_file_of_histories_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        Histories.decode(raw)


@pytest.mark.parametrize(("seconds_left", "clip"), [(math.inf, 1.0), (0.0, 0.5)])
def test_where_there_is_no_time_half_of_a_contribution_counts(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, seconds_left: float, clip: float
) -> None:
    asked: list[tuple[int, bytes]] = []
    on_exam = HeldOutLoss.on_exam

    def counting(held_out: HeldOutLoss, num_windows: int, key: bytes) -> float:
        asked.append((num_windows, key))
        return on_exam(held_out, num_windows, key)

    monkeypatch.setattr(HeldOutLoss, "on_exam", counting)
    alice, bob = (make_replica(author, screening=GuardConfig()) for author in (ALICE, BOB))
    for each in (alice, bob):
        each.learn()
    sent(alice)
    of_bob = sent(bob)
    verdict = alice.round_end.screen(of_bob, Encounter(BOB, 1, 1, chance=0.25), seconds_left)
    assert isinstance(verdict, Accept)
    assert verdict.clip == clip
    _warm_up, _measured, *judged = asked
    assert len(judged) >= 2 * (clip == 1.0)
    assert len(set(judged)) == (clip == 1.0), "all losses of a judgement are of the same text"
    before = alice.round_end.outer.slow.clone()
    alice.round_end.apply(of_bob, Encounter(BOB, 1, 1, chance=0.25))
    assert len(asked) == len(judged) + 2, "it is not judged again"
    assert not torch.equal(before, alice.round_end.outer.slow)

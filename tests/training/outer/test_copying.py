"""Contributions of a device whose memory is not the host's, with real copies and the calls in CUDA's order."""

import math

import pytest
import torch
from blake3 import blake3

from farandole.training.engine.learner import Learner
from farandole.training.outer import codec, round_end
from farandole.training.outer.contribution import Copier, DeviceCopier
from farandole.training.screening.rule import Encounter

from ..conftest import ALICE, BOB, LateCopier, MakeReplica, refusal, sent, train

EVERY_CODEC = pytest.mark.parametrize("name", [*codec.CODECS, "topk"])


@pytest.fixture(params=["staged", "late"])
def copier(request: pytest.FixtureRequest) -> Copier:
    return LateCopier() if request.param == "late" else DeviceCopier(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_SLICE", 512)


def pair(make_replica: MakeReplica, name: str) -> tuple[Learner, Learner]:
    both = make_replica(ALICE, codec=name), make_replica(BOB, codec=name)
    for each in both:
        train(each, 2)
    return both


@EVERY_CODEC
def test_what_is_copied_is_what_a_cpu_makes(
    make_replica: MakeReplica, copier: Copier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two rounds, the partner's bytes arriving in parts: the same bytes and the same weights, bit for bit."""
    plain = pair(make_replica, name)
    monkeypatch.setattr(round_end, "copier_for", lambda device: copier)
    copied = pair(make_replica, name)

    for _ in range(2):
        sent: dict[Learner, bytearray] = {}
        for each in (*plain, *copied):
            each.learn()
            sent[each] = out = bytearray(each.round_end.contribution_bytes)
            final: list[bytearray] = []

            def keep(ready: int, out: bytearray = out, final: list[bytearray] = final) -> None:
                final.append(out[:ready])

            _, digest = each.round_end.contribute(out, progress=keep)
            assert len(final) == math.ceil(each.checkpoint.layout.num_elements / 512)
            assert all(out.startswith(part) for part in final), "final when it is told of"
            assert digest == blake3(out).digest()
        for alice, bob in (plain, copied):
            alice.round_end.take_in(sent[bob], 1_000)
            alice.round_end.take_in(sent[bob], 3_000)
            assert refusal(alice, sent[bob]) == ""
            alice.round_end.apply(sent[bob], Encounter(b"", 3, 1), own_first=True)
            bob.round_end.apply(sent[alice], Encounter(b"", 1, 3), own_first=False)
        assert [*map(sent.get, plain)] == [*map(sent.get, copied)]
        for one, other in zip(plain, copied, strict=True):
            assert torch.equal(one.round_end.slow_weights(), other.round_end.slow_weights())


def test_inner_steps_may_change_the_weights_while_they_are_sent(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = pair(make_replica, "int8")
    expected = sent(plain)
    monkeypatch.setattr(round_end, "copier_for", lambda device: LateCopier())
    moving, _ = pair(make_replica, "int8")

    def step(num_ready: int) -> None:
        moving.round_end.weights.flat.add_(1.0)

    moving.round_end.contribute(out := bytearray(len(expected)), progress=step)

    assert out == expected

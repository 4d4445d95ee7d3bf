"""Sketches compare a checkpoint with other members' weights; a few liars among the members decide nothing."""

from __future__ import annotations

import math
import random
import struct

import pytest

from farandole.protocol.checkpoints import sketches
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.messagepack import encode

RNG = random.Random(1)


def drawn() -> sketches.Sketch:
    return tuple(RNG.gauss(0.0, 1.0) for _ in range(sketches.NUM_BUCKETS))


def near(sketch: sketches.Sketch, share: float) -> sketches.Sketch:
    """Return another sketch, at a distance of about this share of its norm."""
    return tuple(value + share * step for value, step in zip(sketch, drawn(), strict=True))


def scaled(sketch: sketches.Sketch, factor: float) -> sketches.Sketch:
    return tuple(factor * value for value in sketch)


HONEST = drawn()
MEMBERS = [near(HONEST, 0.05) for _ in range(sketches.MAX_JUDGES)]
NOISE = drawn()
POISONS = [NOISE, scaled(HONEST, 3.0), scaled(HONEST, 0.2), scaled(HONEST, -1.0), (math.inf,) * sketches.NUM_BUCKETS]


def test_distances_are_relative_to_the_larger_norm() -> None:
    assert sketches.distance(HONEST, HONEST) == 0.0
    assert sketches.distance(scaled(HONEST, 2.0), HONEST) == pytest.approx(0.5)
    assert sketches.distance(HONEST, scaled(HONEST, 2.0)) == pytest.approx(0.5)
    assert sketches.distance(HONEST, scaled(HONEST, -1.0)) == pytest.approx(2.0)
    zero = (0.0,) * sketches.NUM_BUCKETS
    assert sketches.distance(zero, zero) == 0.0
    assert sketches.distance(zero, HONEST) == pytest.approx(1.0)


@pytest.mark.parametrize("num_members", [1, 2, 3, 7])
def test_honest_weights_are_fit_and_noise_and_scaled_ones_are_not(num_members: int) -> None:
    members = MEMBERS[:num_members]
    assert sketches.judge(near(HONEST, 0.05), members).verdict is sketches.SketchVerdict.FIT
    for poison in POISONS:
        judgement = sketches.judge(poison, members)
        assert judgement.verdict is (
            sketches.SketchVerdict.UNFIT if num_members > 1 else sketches.SketchVerdict.DISPUTED
        )
        assert "far from" in str(judgement)
    assert sketches.judge(HONEST, []).verdict is sketches.SketchVerdict.UNKNOWN


def test_members_that_have_just_averaged_do_not_make_a_third_one_unfit() -> None:
    copies = [HONEST, HONEST, HONEST]
    assert sketches.judge(near(HONEST, 0.2), copies).verdict is sketches.SketchVerdict.FIT
    assert sketches.judge(near(HONEST, 0.5), copies).verdict is sketches.SketchVerdict.UNFIT


def test_members_that_are_far_apart_allow_for_more() -> None:
    members = [near(HONEST, 0.12) for _ in range(5)]  # 0.17 from each other
    assert sketches.judge(near(HONEST, 0.4), members).verdict is sketches.SketchVerdict.FIT
    assert sketches.judge(near(HONEST, 0.4), MEMBERS[:5]).verdict is sketches.SketchVerdict.UNFIT


# Liars among the members that answer


@pytest.mark.parametrize(("num_honest", "num_liars"), [(1, 1), (2, 1), (2, 2), (4, 3)])
def test_liars_that_are_half_or_fewer_cannot_make_honest_weights_unfit(num_honest: int, num_liars: int) -> None:
    for lie in POISONS[:4]:
        members = [*MEMBERS[:num_honest], *[lie] * num_liars]
        assert sketches.judge(near(HONEST, 0.05), members).verdict is sketches.SketchVerdict.FIT
    apart = [*MEMBERS[:num_honest], *(drawn() for _ in range(num_liars))]
    assert sketches.judge(near(HONEST, 0.05), apart).verdict is sketches.SketchVerdict.FIT


@pytest.mark.parametrize(("num_honest", "num_liars"), [(2, 1), (3, 2), (4, 3)])
def test_liars_that_are_fewer_than_half_cannot_make_poison_fit(num_honest: int, num_liars: int) -> None:
    honest = MEMBERS[:num_honest]
    for poison in POISONS[:4]:
        for lie in (poison, near(poison, 0.3), scaled(poison, 10.0), drawn()):
            assert sketches.judge(poison, [*honest, *[lie] * num_liars]).verdict is sketches.SketchVerdict.UNFIT


def test_one_liar_cannot_say_what_is_usual() -> None:
    """Neither a sketch far from all others nor a copy of another member's moves the bound beyond its limits."""
    usual = sketches.judge(HONEST, MEMBERS[:3]).bound
    assert sketches.judge(HONEST, [*MEMBERS[:2], scaled(NOISE, 1e6)]).bound == pytest.approx(usual)
    assert sketches.judge(HONEST, [*MEMBERS[:2], MEMBERS[0]]).bound >= sketches.NEAR
    assert sketches.judge(HONEST, [drawn(), drawn(), drawn()]).bound == sketches.FAR


# Which members are asked


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in numbers]


def test_who_holds_the_checkpoint_is_asked_only_where_there_is_nobody_else_and_its_network_last() -> None:
    assert sketches.choose_judges(names(1, 2, 3), names(0, 2), {}) == names(1, 3)
    assert sketches.choose_judges(names(2), names(0, 2), {}) == names(2)
    assert sketches.choose_judges([], names(0), {}) == []
    networks = dict(zip(names(0, 1, 2), ("a", "a", "b"), strict=True))
    assert sketches.choose_judges(names(1, 2), names(0), networks) == names(2, 1)


def test_many_keys_from_one_network_do_not_take_the_places_of_other_networks() -> None:
    liars, honest = names(*range(10, 40)), names(1, 2, 3)
    networks = dict.fromkeys(liars, "liars'") | {member: str(member[0]) for member in honest}
    judges = sketches.choose_judges([*liars, *honest], names(0), networks)
    assert len(judges) == sketches.MAX_JUDGES
    assert set(honest) < set(judges)
    assert set(judges[:4]) == {liars[0], *honest}


# Encoding


def test_answers_have_a_size_and_finite_values() -> None:
    raw = struct.pack(f"<{sketches.NUM_BUCKETS}f", *HONEST)
    assert len(sketches.encode_answer(raw)) <= sketches.MAX_ANSWER_BYTES
    assert sketches.decode_answer(sketches.encode_answer(raw)) == sketches.values_of(raw)
    assert sketches.decode_answer(sketches.encode_answer(b"")) is None
    assert len(encode(sketches.SketchQuestion(bytes(32), 511, bytes(32)))) <= sketches.MAX_QUESTION_BYTES
    infinite = struct.pack(f"<{sketches.NUM_BUCKETS}f", math.inf, *HONEST[1:])
    for lie in (encode([raw[1:]]), encode([raw + b"\0"]), sketches.encode_answer(infinite), b"", b"\x91\xc0"):
        with pytest.raises(RemoteProtocolError):
            sketches.decode_answer(lie)
    assert len(raw) == sketches.SKETCH_BYTES

"""Activations and gradients of a model that trains, honest ones and falsified ones."""

from __future__ import annotations

import argparse
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch
from torch import Tensor

from farandole.protocol.run.models import PRESETS, layers_of
from farandole.protocol.run.rules import encoded_bytes
from farandole.training.engine.link_statistics import YOUNG_ROUNDS, Direction, Kind, LinkStatistics, UsualTraffic
from farandole.training.model.model import build_model, cross_entropy
from farandole.training.outer.codec import decode, encode

ANN, BOB, EVE = b"ann", b"bob", b"eve"
NUM_HONEST, NUM_MORE = 400, 200


@dataclass(frozen=True)
class Passing:
    """What passes between two stages for one microbatch: activations, and their gradient."""

    activations: Tensor
    gradient: Tensor


def train(num_microbatches: int) -> Iterator[Passing]:
    """The model ``tiny`` in two stages, from its first step on, four microbatches a step."""
    model = msgspec.structs.replace(PRESETS["tiny"], num_stages=2)
    stages = [build_model(model, 7, layers, has_ends=not layers.start) for layers in layers_of(model)]
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95))
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    generator = torch.Generator().manual_seed(1)
    for number in range(num_microbatches):
        starts = torch.randint(0, len(text) - model.context - 1, (2,), generator=generator)
        tokens = torch.stack([text[start : start + model.context + 1] for start in starts])
        passing = stages[0].advance(stages[0].embed(tokens[:, :-1]))
        passing.retain_grad()
        loss = cross_entropy(stages[0].logits(stages[1].advance(passing)), tokens[:, 1:])
        loss.backward()
        assert passing.grad is not None
        yield Passing(passing.detach(), passing.grad)
        if number % 4 == 3:
            torch.nn.utils.clip_grad_norm_(parameters, 4.0)
            optimiser.step()
            optimiser.zero_grad()


@pytest.fixture(scope="module")
def passings() -> list[Passing]:
    return list(train(NUM_HONEST + NUM_MORE))


def statistics() -> LinkStatistics:
    return LinkStatistics(PRESETS["tiny"].width, torch.device("cpu"), torch.Generator().manual_seed(3))


def judge(
    of: LinkStatistics,
    kind: Kind,
    peer: bytes,
    passing: Passing,
    change: Callable[[Tensor], Tensor],
    num_rounds: int = YOUNG_ROUNDS,
) -> str:
    if kind == "activations":
        return of.judge_activations(peer, change(passing.activations), num_rounds)
    return of.judge_gradient(peer, change(passing.gradient), of.mark(passing.activations), num_rounds)


def unchanged(values: Tensor) -> Tensor:
    return values


def in_four_bits(values: Tensor) -> Tensor:
    sent = bytearray(encoded_bytes("int4", values.numel()))
    encode("int4", values.flatten(), sent)
    return decode("int4", sent, values.numel()).view_as(values)


def noise(values: Tensor) -> Tensor:
    drawn = torch.randn(values.shape, generator=torch.Generator().manual_seed(int(abs(values.sum()) * 1e9)))
    return drawn * (float(torch.linalg.vector_norm(values)) / float(torch.linalg.vector_norm(drawn)))


ATTACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "three times as large": lambda values: 3.0 * values,
    "a third as large": lambda values: 0.3 * values,
    "a thousand times as large": lambda values: 1_000.0 * values,
    "reversed": lambda values: -values,
    "noise of the same norm": noise,
}


@pytest.mark.parametrize("kind", ["activations", "gradients"])
def test_what_is_honest_is_no_outlier_from_the_first_step_on(passings: list[Passing], kind: Kind) -> None:
    """A third sender joins in the middle."""
    stats = statistics()
    faults = []
    for number, passing in enumerate(passings):
        senders = (ANN, BOB) if number < NUM_HONEST else (ANN, BOB, EVE)
        faults.append(judge(stats, kind, senders[number % len(senders)], passing, unchanged))
    assert not any(faults)


@pytest.mark.parametrize("kind", ["activations", "gradients"])
def test_replicas_that_have_not_averaged_yet_do_not_suspect_each_other(passings: list[Passing], kind: Kind) -> None:
    """One is at the seed's weights, in a run that just begins; the other trains."""
    stats, first = statistics(), passings[:4]
    for number, passing in enumerate(passings[:300]):
        assert not judge(stats, kind, ANN, passing, unchanged, num_rounds=number // 100)
        assert not judge(stats, kind, BOB, first[number % 4], unchanged, num_rounds=number // 100)
    assert judge(stats, kind, EVE, passings[300], ATTACKS["a thousand times as large"], num_rounds=2)


def test_a_direction_makes_an_outlier_only_once_replicas_have_averaged(passings: list[Passing]) -> None:
    for num_rounds, is_outlier in ((2, False), (3, True)):
        stats = copy.deepcopy(honest(passings, "activations"))
        fault = judge(stats, "activations", EVE, passings[400], ATTACKS["reversed"], num_rounds)
        assert bool(fault) is is_outlier


@pytest.mark.parametrize("senders", [(ANN,), (ANN, BOB)])
def test_a_node_that_heard_nothing_while_levels_rose_believes_all_who_tell_it(
    passings: list[Passing], senders: tuple[bytes, ...]
) -> None:
    """Three outliers of a sender have it avoided. One of two senders is not believed alone."""
    stats = statistics()
    for number, passing in enumerate(passings[:40]):
        judge(stats, "activations", senders[number % len(senders)], passing, unchanged, num_rounds=0)
    alone = copy.deepcopy(stats)
    faults = [
        judge(stats, "activations", senders[number % len(senders)], passing, lambda x: 50.0 * x, num_rounds=1)
        for number, passing in enumerate(passings[40:100])
    ]
    assert sum(map(bool, faults)) < 3
    if len(senders) > 1:
        larger = [judge(alone, "activations", BOB, each, lambda x: 50.0 * x, num_rounds=1) for each in passings[40:50]]
        assert all(larger)


@pytest.mark.parametrize("kind", ["activations", "gradients"])
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("travel", [unchanged, in_four_bits])
def test_what_is_falsified_is_an_outlier_within_50_microbatches(
    passings: list[Passing], kind: Kind, attack: str, travel: Callable[[Tensor], Tensor]
) -> None:
    """One of two senders begins in the middle; the other, who goes on, is not suspected."""
    stats = copy.deepcopy(honest(passings, kind, travel))

    def falsify(values: Tensor) -> Tensor:
        return travel(ATTACKS[attack](values))

    faults = [
        judge(stats, kind, EVE, passing, falsify) if number % 2 else judge(stats, kind, ANN, passing, travel)
        for number, passing in enumerate(passings[NUM_HONEST:])
    ]
    assert not any(faults[::2])
    outliers = [number for number, fault in enumerate(faults[1::2]) if fault]
    assert outliers[2] < 50, "three have the sender avoided"


HONEST: dict[tuple[Kind, Callable[[Tensor], Tensor]], LinkStatistics] = {}


def honest(passings: list[Passing], kind: Kind, travel: Callable[[Tensor], Tensor] = unchanged) -> LinkStatistics:
    """After both senders have been honest for a while."""
    if (kind, travel) not in HONEST:
        HONEST[kind, travel] = statistics()
        for number, passing in enumerate(passings[:NUM_HONEST]):
            judge(HONEST[kind, travel], kind, EVE if number % 2 else ANN, passing, travel)
    return HONEST[kind, travel]


def test_where_most_senders_change_at_once_the_node_begins_anew(passings: list[Passing]) -> None:
    stats = copy.deepcopy(honest(passings, "activations"))
    faults = [
        judge(stats, "activations", (ANN, EVE)[number % 2], passing, ATTACKS["three times as large"])
        for number, passing in enumerate(passings[NUM_HONEST:])
    ]
    assert not any(faults[100:])


def test_a_sender_that_has_nobody_beside_it_is_believed_in_the_end(passings: list[Passing]) -> None:
    """Else a node that was wrong about the only other one would wait for ever."""
    stats = statistics()
    for passing in passings[:NUM_HONEST]:
        assert not judge(stats, "activations", ANN, passing, unchanged)
    faults = [judge(stats, "activations", ANN, passing, ATTACKS["reversed"]) for passing in passings[NUM_HONEST:]]
    assert all(faults[:3])
    assert not any(faults[50:])


@pytest.mark.parametrize("seed", range(8))
def test_a_sole_sender_whose_gradients_turn_with_the_training_is_not_suspected(seed: int) -> None:
    """As they do in the first inner steps: within 16 microbatches, to a cosine of -0.2 with the earlier direction.

    The attack: a sender reverses gradients, or sends noise, and so turns them in the same time or at once.
    """
    generator = torch.Generator().manual_seed(seed)

    def unit(vector: Tensor) -> Tensor:
        return torch.nn.functional.normalize(vector, dim=0)

    def drawn(direction: Tensor, signal: float = 1.0) -> Direction:
        strength = signal * (0.4 + 1.1 * float(torch.rand((), generator=generator)))
        vector: Direction = unit(strength * direction + unit(torch.randn(256, generator=generator))).numpy()
        return vector

    first, other = unit(torch.randn(256, generator=generator)), unit(torch.randn(256, generator=generator))
    turned = unit(other - 0.25 * first)
    usual = UsualTraffic()
    for _ in range(200):
        assert not usual.judge(ANN, 0.0, drawn(first))
    for sign, signal in ((-1.0, 1.0), (1.0, 0.0)):
        attacked = copy.deepcopy(usual)
        assert any(attacked.judge(ANN, 0.0, sign * drawn(first, signal)) for _ in range(40))
    for number in range(200):
        share = min(number / 16, 1.0)
        assert not usual.judge(ANN, 0.0, drawn(unit((1 - share) * first + share * turned)))

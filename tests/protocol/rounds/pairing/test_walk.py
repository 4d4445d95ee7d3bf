"""A random walk: a peer sends anything at any time, and the node keeps its invariants."""

from __future__ import annotations

import math
import random

import pytest

from farandole.protocol.rounds.pairing import Pairing
from farandole.protocol.rounds.pairing_events import (
    FOLLOWING,
    ContributionReady,
    Event,
    ExchangeEnded,
    GoAlone,
    MessageReceived,
    PeerLost,
    PeersChanged,
    RoundStarted,
    SendMessage,
    StartExchange,
    State,
)
from farandole.protocol.rounds.pairing_messages import (
    Agree,
    Begin,
    Busy,
    Decline,
    Message,
    Propose,
    Ready,
    Withdraw,
    decode_message,
    encode_message,
)
from farandole.protocol.rounds.pairing_waits import WAIT_SHARE
from farandole.protocol.run.rules import RoundConfig
from farandole.protocol.trainer.trainer_messages import FinishRound
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.timers import SetTimer, TimerFired

from .nodes import ALICE, BOB, BOXED, CAROL, HIGH, LOW, MALLORY, MIDDLE, SEVERAL, STEPS


def _random_message(rng: random.Random, sessions: list[bytes]) -> Message:
    session, seconds = rng.choice(sessions), rng.choice([0.0, rng.uniform(0, 100)])
    some: list[Message] = [
        Propose(session, rng.choice([seconds, None])),
        Agree(session, rng.choice([seconds, None])),
        Decline(session, rng.choice(["matched", "away"])),
        Busy(session, seconds),
        Withdraw(session),
        Ready(session),
        Begin(session),
    ]
    return rng.choice(some)


@pytest.mark.parametrize(("config", "round_index"), [(BOXED, 0), (STEPS, 0), (SEVERAL, 0), (SEVERAL, 1)])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_peers_do_a_round_ends_by_its_deadline(seed: int, config: RoundConfig, round_index: int) -> None:
    for walk in range(100):
        _walk(random.Random(100 * seed + walk), config, round_index)


def _walk(rng: random.Random, config: RoundConfig, round_index: int) -> None:
    machine = Pairing(ALICE, config, rng)
    now, timer, ready_at, outcomes, tries = 0.0, math.inf, math.inf, 0, 0
    sessions = [LOW, MIDDLE, HIGH]
    exchange: StartExchange | None = None

    def handle(event: Event) -> None:
        nonlocal timer, outcomes, exchange, tries
        before = machine.state
        try:
            outputs = machine.handle(event, now)
        except RemoteProtocolError:
            assert machine.state is before
            return
        assert machine.state is before or machine.state in _reachable(before)
        for output in outputs:
            match output:
                case SetTimer(at=at):
                    timer = at
                case SendMessage(payload=payload):
                    sessions.append(decode_message(payload).session)
                case StartExchange():
                    assert exchange is None
                    assert now <= ready_at + WAIT_SHARE * config.exchange_seconds
                    assert output.deadline == ready_at + config.exchange_seconds
                    exchange, tries = output, tries + 1
                case GoAlone():
                    in_time = now <= ready_at + WAIT_SHARE * config.exchange_seconds
                    assert exchange is None
                    assert in_time or isinstance(event, ExchangeEnded)
                    outcomes += 1
                case FinishRound():
                    assert ready_at == math.inf
                    assert config.takes_steps(round_index)

    handle(PeersChanged(frozenset((BOB, CAROL))))
    handle(RoundStarted(round_index))
    for _ in range(rng.randrange(60)):
        now = min(now + rng.choice([0.0, rng.uniform(0, 5)]), timer)
        action = rng.randrange(10)
        if exchange is not None and rng.random() < 0.3:  # it ends in one of the possible ways
            ended, exchange = exchange, None
            is_committed = rng.random() < 0.3
            outcomes += is_committed
            handle(
                ExchangeEnded(
                    ended.session, ended.peer, is_committed, is_broken=not is_committed and rng.random() < 0.8
                )
            )
            continue
        if now >= timer:
            timer = math.inf
            handle(TimerFired())
        elif action == 0 and ready_at == math.inf:
            ready_at = now
            handle(ContributionReady(round_index))
        elif action == 1:
            handle(PeerLost(rng.choice([BOB, CAROL])))
        elif action == 2:
            handle(PeersChanged(frozenset(rng.sample([BOB, CAROL], rng.randrange(3)))))
        else:
            payload = encode_message(_random_message(rng, sessions))
            handle(MessageReceived(rng.choice([BOB, CAROL, MALLORY]), payload))
    if ready_at == math.inf:
        ready_at = now
        handle(ContributionReady(round_index))
    while not outcomes:  # from here on no peer sends anything
        if exchange is not None:
            ended, exchange = exchange, None
            handle(ExchangeEnded(ended.session, ended.peer, committed=False, is_broken=True))
        else:
            assert timer < math.inf
            now, timer = max(now, timer), math.inf
            handle(TimerFired())
    assert outcomes == 1, "one outer step a round"
    assert tries <= 2
    assert machine.state is State.IDLE


def _reachable(state: State) -> set[State]:
    """Return the states reachable from a state by any number of transitions, itself included."""
    reached = {state}
    while fresh := {after for step in reached for after in FOLLOWING[step]} - reached:
        reached |= fresh
    return reached

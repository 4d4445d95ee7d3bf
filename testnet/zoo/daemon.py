"""A hostile member: the real daemon, whose trainer sends what an attack says, and which may pair as it should not.

``python -m farandole.testnet.zoo.daemon join ...``: all options are those of ``farandole``.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from functools import partial
from typing import Any, Final

import trio

from farandole.node.base.system.processes import start_child
from farandole.node.cli import main
from farandole.node.member import assembly
from farandole.node.trainer import trainer
from farandole.protocol.rounds import pairing_messages as messages
from farandole.protocol.rounds.pairing_events import (
    ContributionReady,
    Event,
    ExchangeEnded,
    GoAlone,
    MessageReceived,
    Output,
    PeersChanged,
    RoundStarted,
    SendMessage,
    StartExchange,
)
from farandole.protocol.run.rules import RoundConfig
from farandole.protocol.wire.messagepack import SESSION_BYTES
from farandole.protocol.wire.timers import SetTimer, TimerFired

from .plan import plan_of, tame

# Pairing of a hostile member: it proposes to all, agrees with all, and exchanges with each that is ready in turn.

# Seconds between two proposals to each peer: the fastest rate that no honest node limits.
PROPOSE_INTERVAL: Final = 0.5


class GreedyPairing:
    """A greedy replacement for the parts of `farandole.protocol.rounds.pairing.Pairing` that the training loop uses.

    ``does_exchange``: whether it follows through. If not, each partner waits for it until its patience ends.
    """

    def __init__(
        self, own: bytes, config: RoundConfig, rng: random.Random, num_fragments: int = 1, *, does_exchange: bool
    ) -> None:
        self._own = own
        self._deadline = config.exchange_seconds
        self._rng = rng
        self._does_exchange = does_exchange
        self._peers: frozenset[bytes] = frozenset()
        self._bound: dict[bytes, float] = {}  # peer -> until when it waits for this member, or has declined
        self._waiting: OrderedDict[bytes, bytes] = OrderedDict()  # peer -> session of ours for which it is ready
        self._round = -1
        self._is_free = False  # a contribution waits for a partner
        self._has_timer = False

    def handle(self, event: Event, now: float) -> list[Output]:
        """See `Pairing.handle`."""
        match event:
            case RoundStarted(round=round_):
                self._round, self._is_free = round_, False
            case ContributionReady():
                self._is_free = True
            case PeersChanged(peers=peers):
                self._peers = peers - {self._own}
                return []  # no training loop may run yet
            case MessageReceived(peer=peer, payload=payload):
                return [*self._answer(peer, messages.decode_message(payload), now), *self._meet_next(now)]
            case ExchangeEnded(committed=False, round=round_):
                return [GoAlone(round_, "the exchange failed")]
            case TimerFired():
                proposals = [
                    self._say(peer, messages.Propose(self._rng.randbytes(SESSION_BYTES), 0.0))
                    for peer in sorted(self._peers)
                    if self._bound.get(peer, 0.0) <= now
                ]
                return [*proposals, SetTimer(now + PROPOSE_INTERVAL)]
        timer = [] if self._has_timer else [SetTimer(now)]
        self._has_timer = True
        return [*timer, *self._meet_next(now)]

    def _answer(self, peer: bytes, message: messages.Message, now: float) -> list[Output]:
        match message:
            case messages.Propose(session=session):
                self._bound[peer] = now + self._deadline
                ready = [self._say(peer, messages.Ready(session))] if self._does_exchange else []
                return [self._say(peer, messages.Agree(session, 0.0)), *ready]
            case messages.Ready(session=session) if self._does_exchange:
                self._waiting[peer] = session
            case messages.Agree():  # a second proposal to a node that waits is noticed
                self._bound[peer] = now + self._deadline
            case messages.Withdraw():
                self._bound.pop(peer, None)
                self._waiting.pop(peer, None)
            case messages.Begin(session=session) if self._does_exchange and self._is_free:
                self._is_free = False
                return [self._start(session, peer, now, is_initiator=False)]
        return []

    def _meet_next(self, now: float) -> list[Output]:
        if not self._is_free or not self._waiting:
            return []
        self._is_free = False
        peer, session = self._waiting.popitem(last=False)
        return [self._say(peer, messages.Begin(session)), self._start(session, peer, now, is_initiator=True)]

    def _start(self, session: bytes, peer: bytes, now: float, *, is_initiator: bool) -> StartExchange:
        return StartExchange(session, peer, self._round, is_initiator, now + self._deadline)

    def _say(self, peer: bytes, message: messages.Message) -> SendMessage:
        return SendMessage(peer, messages.encode_message(message))


HONEST_TRAINER = "farandole.node.trainer_process.main"


async def start_hostile_child(module: str, *arguments: Any) -> tuple[trio.Process, trio.SocketStream]:
    """As `start_child`, with the hostile trainer in the place of the honest one."""
    return await start_child(f"{__package__}.learner" if module == HONEST_TRAINER else module, *arguments)


if __name__ == "__main__":
    plan = plan_of()
    tame()
    # The daemon has no place for such parts, so they replace names that its modules import: to mypy these names are not
    # exported, and the types are others.
    trainer.start_child = start_hostile_child  # type: ignore[attr-defined, assignment]
    if plan.pairing != "honest":
        greedy = partial(GreedyPairing, does_exchange=plan.pairing == "greedy")
        assembly.Pairing = greedy  # type: ignore[attr-defined, assignment]
    main()

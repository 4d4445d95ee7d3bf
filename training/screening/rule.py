"""The interface of screening rules.

A partner's contribution arrives piece by piece. A rule sees each piece as it is decoded (`ScreeningRule.feed`), and
judges when all of it is there and its hash is right, before anything of it is used. It refuses it, which ends the
exchange at both partners with the reason, or accepts it with a weight: how much of the mean is the partner's.
"""

from __future__ import annotations

import abc
import importlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from farandole.protocol.run.rules import ScreeningConfig
from farandole.protocol.wire.bounds import Latest

# Peers that are remembered, the most recently met ones: more than a node meets in a day of one-minute rounds.
MAX_PEERS = 2_048
# Numbers of one series: a rule that wants more of the past keeps a running mean.
MAX_NUMBERS = 64
# Number of series of one peer, or of all peers together: of each of 64 fragments two, of near and of far peers, and a
# handful.
MAX_SERIES = 144
# Of all peers, encoded: rules keep a handful of numbers of most, and 2,048 x 16 x 64 of 9 bytes would be 18 MiB.
MAX_BYTES = 32 * 1024 * 1024

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Series = Annotated[list[float], msgspec.Meta(max_length=MAX_NUMBERS)]
_Saved = list[tuple[bytes, Annotated[dict[_Name, _Series], msgspec.Meta(max_length=MAX_SERIES)]]]


class History:
    """Series of numbers by name; each keeps its newest `MAX_NUMBERS`."""

    def __init__(self) -> None:
        self._series: dict[str, deque[float]] = {}

    def __getitem__(self, name: str) -> tuple[float, ...]:
        """The numbers of a series, the oldest first; empty if nothing was appended."""
        return tuple(self._series.get(name, ()))

    def append(self, name: str, number: float) -> None:
        """Add a number to a series. Raises `ValueError` for more than `MAX_SERIES` names."""
        if name not in self._series:
            if len(self._series) == MAX_SERIES:
                raise ValueError(f"a peer's history has {MAX_SERIES} series already: {name!r} would be another")
            self._series[name] = deque(maxlen=MAX_NUMBERS)
        self._series[name].append(number)

    @property
    def series(self) -> dict[str, list[float]]:
        """Return all series, by name."""
        return {name: list(numbers) for name, numbers in self._series.items()}


class Histories:
    """The histories of all peers; the peers that were met longest ago are forgotten beyond `MAX_PEERS`."""

    def __init__(self) -> None:
        self._of = Latest[bytes, History](MAX_PEERS)

    def of(self, peer: bytes) -> History:
        """Return the history of a peer by its key, and count it as met now. b"" stands for all peers together."""
        history = self._of[peer] = self._of.get(peer) or History()
        return history

    def encode(self) -> bytes:
        """Encode all histories for a file; empty if nothing is remembered. At most `MAX_BYTES`."""
        kept = [(peer, history.series) for peer, history in self._of.items() if history.series]
        return msgspec.msgpack.encode(kept) if kept else b""

    @classmethod
    def decode(cls, raw: bytes) -> Histories:
        """Decode the result of `encode`. Raises `ValueError` if ``raw`` is anything else."""
        histories = cls()
        for peer, series in msgspec.msgpack.decode(raw, type=_Saved):
            history = histories.of(peer)
            for name, numbers in series.items():
                for number in numbers:
                    history.append(name, number)
        return histories


# The number of tokens is the partner's word. Whatever it says, the other one keeps this share of the mean, unless the
# rule leaves it more; honest pairs reach it when one is twenty times as fast.
MIN_SHARE = 0.05
# Shares are multiples of this, so that a share and what it leaves of 1 are exact: each partner computes both.
_SHARE_STEP = 2.0**-24


@dataclass(frozen=True, slots=True)
class Accept:
    """The contribution is averaged: the mean is own + weight * clip * (partner's - own)."""

    weight: float = 0.5
    """The partner's share of the mean, from 0 to 1."""
    clip: float = 1.0
    """How far towards the partner's contribution, from 0 to 1. At 1, two partners with shares that sum to 1 get the
    same mean to the bit."""
    is_suspect: bool = False
    """Whether this node suspects the peer now, and tells the others so."""
    remark: str = ""
    """For people: why less than all of its share counts."""
    is_behind: bool = False
    """Whether the mean is clearly worse than the partner's own weights: a newcomer's are still of an earlier round."""

    @property
    def shares(self) -> tuple[float, float]:
        """One's own share of the mean, and the partner's."""
        partner = self.weight * self.clip
        return 1.0 - partner, partner


@dataclass(frozen=True, slots=True)
class Refuse:
    """The contribution is not averaged."""

    reason: str
    """For people: it ends the sentence "the contribution of PEER was refused: ..."."""
    is_suspect: bool = False
    """As `Accept.is_suspect`."""


Verdict = Accept | Refuse


@dataclass(frozen=True, slots=True)
class Encounter:
    """The partner of a round, and what both partners report of themselves."""

    peer: bytes = b""
    """The partner's key, 32 bytes."""
    own_tokens: int = 0
    """Tokens behind one's own contribution."""
    partner_tokens: int = 0
    """Tokens that the partner claims for its contribution."""
    chance: float = 1.0
    """A number from [0, 1) that this node has drawn for the exchange, which no peer can foresee; 1: none."""
    is_suspected: bool = False
    """Whether enough members that this node has averaged with suspect the partner (`protocol.state.believing`)."""


UNKNOWN = Encounter()
"""A partner of whom nothing is known."""


@dataclass(frozen=True, slots=True)
class Partner:
    """Everything that a rule may know of a partner when it judges."""

    encounter: Encounter
    own: Tensor
    """One's own contribution, (n,) fp32, as the partner decodes it."""
    contribution: Tensor
    """The partner's, (n,) fp32, likewise. A rule does not write into either."""
    history: History
    """What rules have remembered of this peer."""
    everybody: History
    """What rules have remembered of all peers together."""
    fragment: int
    """Which fragment of the parameters the contributions are of, from 0."""
    movement: Callable[[], float]
    """How far one's own contribution is from what it would be without the inner steps of the round: a norm. The codec's
    rounding counts, as it does in the distance to the partner's. In a round without inner steps, the value of the last
    round that had some; 0 if it is unknown."""
    partner_movement: Callable[[], float]
    """How far the partner's contribution is from what one's own would be without inner steps."""
    shares_text: bool
    """Whether all members have the same text, so that the loss of the partner's own weights says how good they are."""
    has_loss: Callable[[], bool]
    """Whether this replica can measure a loss: a stage cannot, nor one without held-out text."""
    evaluate: Callable[[float], float | None]
    """The loss on this exchange's windows of text, in nats a token, of one's own weights moved by this share of the
    difference between the two contributions: 0 for one's own. None where it is not known in time."""
    loss_before: Callable[[], float | None]
    """The same of the weights with which the round began; None likewise, and in a round without inner steps."""
    loss_as_sent: Callable[[], float | None]
    """The same of one's own weights as the partner decodes them; None where they are exact as well."""


class ScreeningRule(abc.ABC):
    """A screening rule with its settings. What it remembers between rounds goes into histories, which are saved."""

    sums: Tensor = torch.empty(0, dtype=torch.float64)
    """All that `feed` keeps: (k,) fp64 on the host, added up over pieces."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Forget all pieces, with zeros for the sums: others will follow, from the first on."""

    @abc.abstractmethod
    def feed(self, own: Tensor, contribution: Tensor) -> None:
        """Add up the next piece of one's own contribution and the partner's, (n,) fp32 each, on the training device."""

    @abc.abstractmethod
    def judge(self, partner: Partner) -> Verdict:
        """The verdict, once every piece was fed. May be asked again about the same contribution."""

    def remember(self, partner: Partner, verdict: Verdict) -> None:  # noqa: B027 - not every rule has a memory
        """A contribution was refused, or an outer step was taken with it: keep what later verdicts need. Optional."""


def rule_of(settings: ScreeningConfig) -> ScreeningRule:
    """The rule that a run's settings name, from the module of that name."""
    module = importlib.import_module(f"{__package__}.{settings.kind}")
    rule: ScreeningRule = module.RULE(settings)
    return rule


def share_by_tokens(own_tokens: int, partner_tokens: int, min_share: float = MIN_SHARE) -> float:
    """The partner's share of the mean: by tokens, at least ``min_share`` for either, and half if neither saw any.

    Seen from both sides the two shares sum to 1 exactly.
    """
    total = own_tokens + partner_tokens
    if total == 0:
        return 0.5
    lesser = max(min(own_tokens, partner_tokens) / total, min_share)
    lesser = min(math.ceil(lesser / _SHARE_STEP) * _SHARE_STEP, 0.5)
    return 1.0 - lesser if own_tokens < partner_tokens else lesser

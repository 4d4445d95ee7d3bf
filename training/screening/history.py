"""What screening rules remember of each peer: short series of numbers, which survive a restart of the trainer."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Annotated

import msgspec

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
        self._of: OrderedDict[bytes, History] = OrderedDict()

    def of(self, peer: bytes) -> History:
        """Return the history of a peer by its key, and count it as met now. b"" stands for all peers together."""
        history = self._of.setdefault(peer, History())
        self._of.move_to_end(peer)
        while len(self._of) > MAX_PEERS:
            self._of.popitem(last=False)
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

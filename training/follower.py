"""Any rank except rank 0: it executes the orders of rank 0 between two steps of the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from .contribution import Contribution
from .copying import Copier
from .engine import no_progress
from .errors import CodecError, TrainingError
from .outer_state import OuterState
from .partner import Decoder
from .ranks import Order, Ranks, parameters_of, reshard, synchronize, whole_of
from .share import OWN_LAST
from .shared_vectors import RankVectors, take_share


class RankPart:
    """The part of a replica's outer state that a rank works on; rank 0 has the same vectors, by the same classes."""

    def __init__(self, vectors: RankVectors) -> None:
        share, outer, layout = vectors.share, vectors.outer, vectors.layout
        self._vectors = vectors
        self._theta = share.empty(torch.empty(0), layout.num_elements)
        self._outer = OuterState(outer, self._theta, Copier(), share)
        received = share.empty(self._theta, layout.largest_fragment(outer.fragments))
        self._decoder = Decoder(self._outer.contributor.form, received, Copier(), share)
        self._made: Contribution | None = None
        self._aside = ThreadPoolExecutor(1)
        self._encoding: Future[None] | None = None

    def read(self) -> None:
        """Obey `Order.READ`."""
        self._finish_encoding()
        self._vectors.parameters.read(self._theta)

    def write(self) -> None:
        """Obey `Order.WRITE`."""
        self._finish_encoding()
        self._vectors.parameters.write(self._theta)

    def encode(self, fragment: int) -> None:
        """Obey `Order.ENCODE`, in another thread: the loop goes on."""
        self._finish_encoding()
        part = self._vectors.layout.fragment(fragment, self._vectors.outer.fragments)
        self._made = self._outer.contributor.freeze(part)
        self._encoding = self._aside.submit(self._encode, self._made)

    @torch.no_grad()
    def _encode(self, made: Contribution) -> None:
        with contextlib.suppress(CodecError):  # rank 0 finds out, and reports it
            self._outer.contributor.encode(made, self._vectors.share.memory.outgoing, no_progress)

    def _finish_encoding(self) -> None:
        encoding, self._encoding = self._encoding, None
        if encoding is not None:
            encoding.result()

    @torch.no_grad()
    def decode(self, start: int, stop: int) -> None:
        """Obey `Order.DECODE`."""
        self._finish_encoding()
        assert self._made is not None
        self._decoder.decode(self._made, slice(start, stop), self._vectors.share.memory.incoming)

    @torch.no_grad()
    def step(self, order: int, is_late: bool, rates: float, weights: list[float]) -> None:
        """Obey `Order.OUTER`: see `Share.begin_step`."""
        self._finish_encoding()
        made = self._made
        assert made is not None
        pair: list[Tensor] = [made.sent, self._decoder.memory[: len(made.sent)]] if order else []
        if order == OWN_LAST:
            pair.reverse()
        self._outer.step(made, pair, weights if order else [], is_late=is_late, rates=rates)

    def close(self) -> None:
        """End the thread."""
        self._aside.shutdown()


class Follower:
    """Any rank except rank 0. It executes orders between two steps."""

    def __init__(self, ranks: Ranks, module: nn.Module, evaluate: Callable[[], float] | None) -> None:
        self.round = 0
        self.tokens = 0
        self.is_over = False
        self._ranks = ranks
        self._module = module
        self._evaluate = evaluate
        self._parameters: dict[str, nn.Parameter] = {}
        self._part: RankPart | None = None

    def begin(self) -> None:
        """Obey until rank 0 lets the loop begin."""
        self.step_taken()

    def step_taken(self) -> None:
        """Obey until the next step may be taken. Raises `TrainingError` if rank 0 has failed."""
        self._obey(Order.STEP)

    def end(self) -> None:
        """Obey until rank 0 has ended."""
        self._obey(Order.OVER)

    def abandon(self) -> None:
        """The loop has failed in this rank: the others find out when this process ends."""

    def report(self, loss: float) -> None:
        """Rank 0's losses are reported."""

    def _obey(self, until: Order) -> None:
        while not self.is_over:
            order, numbers = self._ranks.hear()
            match order:
                case Order.BEGIN:
                    self._take_names(self._ranks.hear_bytes(numbers[0]).decode().split("\n"))
                case Order.SHARE:
                    self._take_share(self._ranks.hear_bytes(numbers[0]))
                case Order.MEASURE:
                    self._measure()
                case Order.STEP:
                    self.round, self.tokens = int(numbers[0]), int(numbers[1])
                case Order.OVER:
                    self._end()
                case Order.FAILED:
                    self._end()
                    raise TrainingError("rank 0 has failed, and says why")
                case _ if self._part is not None:
                    _work(self._part, order, numbers)
                case Order.READ:
                    self._read()
                case Order.WRITE:
                    self._write()
            if order is until:
                return

    def _end(self) -> None:
        self.is_over = True
        if self._part is not None:
            self._part.close()
            self._part = None

    def _take_names(self, names: Iterable[str]) -> None:
        found = parameters_of(self._module, with_frozen=True)
        if missing := [name for name in names if name not in found]:
            raise TrainingError(f"the model of this rank lacks {missing[0]}, which that of rank 0 has")
        self._parameters = {name: found[name] for name in names}
        if self._part is not None:  # the engine begins again
            self._part.close()
            self._part = None

    def _take_share(self, told: bytes) -> None:
        vectors = take_share(self._ranks, self._module, self._parameters, told)
        self._part = None if vectors is None else RankPart(vectors)

    def _measure(self) -> None:
        if self._evaluate is None:
            raise TrainingError("evaluate= is to be given to every rank, or to none")
        self._evaluate()

    @torch.no_grad()
    def _read(self) -> None:
        synchronize(self._parameters.values())
        for parameter in self._parameters.values():
            whole_of(parameter)

    @torch.no_grad()
    def _write(self) -> None:
        synchronize(self._parameters.values())
        for parameter in self._parameters.values():
            self._ranks.replace(parameter, None)
        reshard(self._module)


def _work(part: RankPart, order: Order, numbers: list[float]) -> None:
    """Execute an order that concerns the shared vectors."""
    match order:
        case Order.READ:
            part.read()
        case Order.WRITE:
            part.write()
        case Order.ENCODE:
            part.encode(int(numbers[0]))
        case Order.DECODE:
            part.decode(int(numbers[0]), int(numbers[1]))
        case Order.OUTER:
            part.step(int(numbers[0]), bool(numbers[1]), numbers[2], numbers[3:5])
        case _:
            raise TrainingError(f"{order.name} is no order about vectors")

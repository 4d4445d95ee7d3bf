"""Any rank except rank 0: it executes the orders of rank 0 between two steps of the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from ..base.errors import CodecError, TrainingError
from ..engine.engine import no_progress
from ..outer.contribution import Contribution
from ..outer.copying import Copier
from ..outer.fast_weights import swap
from ..outer.outer_state import OuterState, Tried
from ..outer.partner import Decoder
from ..outer.share import OWN_LAST, HostWork
from ..screening.rule import rule_of
from .ranks import Order, Ranks, parameters_of, synchronize, whole_of
from .shared_vectors import RankVectors, take_share


class RankPart:
    """The part of a replica's outer state that a rank works on; rank 0 has the same vectors, by the same classes.

    The parameters have been read to ``theta`` (n,), the first of the shared vectors.
    """

    def __init__(self, vectors: RankVectors, theta: Tensor) -> None:
        share, outer, layout = vectors.share, vectors.outer, vectors.layout
        self._vectors = vectors
        self._theta = theta
        self._outer = OuterState(outer, theta, Copier(), share)
        received = share.empty(theta, layout.largest_fragment(outer.fragments))
        self._decoder = Decoder(self._outer.contributor.form, received, Copier(), share)
        self._rule = rule_of(vectors.screening)
        self._tried = torch.empty(0)
        self._made: Contribution | None = None
        self._aside = ThreadPoolExecutor(1)
        self._encoding: Future[None] | None = None

    def obey(self, order: Order, numbers: list[float]) -> None:
        """Execute an order that concerns the vectors."""
        self._finish_encoding()
        match order:
            case Order.READ:
                self._vectors.read(self._theta)
            case Order.WRITE:
                self._vectors.write(self._theta)
            case Order.ENCODE:
                self._begin_encoding(int(numbers[0]))
            case Order.DECODE:
                self._decode(slice(int(numbers[0]), int(numbers[1])))
            case Order.OUTER:
                self._step(int(numbers[0]), bool(numbers[1]), numbers[2], numbers[3:5])
            case Order.HOSTS if self._vectors.share.does_work_of_host:
                self._work(HostWork(int(numbers[0])), *numbers[1:3])
            case Order.HOSTS:
                pass
            case _:
                raise TrainingError(f"{order.name} is no order about vectors")

    def _begin_encoding(self, fragment: int) -> None:
        """Encode in another thread: the loop goes on."""
        part = self._vectors.layout.fragment(fragment, self._vectors.outer.fragments)
        self._tried = torch.empty(0)
        self._vectors.share.begin_encoding()
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

    @property
    def _own(self) -> Contribution:
        """The contribution that was made last."""
        assert self._made is not None
        return self._made

    @property
    def _received(self) -> Tensor:
        """The partner's contribution (n,)."""
        return self._decoder.memory[: len(self._own.sent)]

    @torch.no_grad()
    def _decode(self, span: slice) -> None:
        if span.start == 0:
            self._rule.begin()
        problem = self._decoder.decode(self._own, span, self._vectors.share.memory.incoming)
        if problem is None and self._vectors.share.does_work_of_host:
            self._decoder.feed(self._rule, self._own, span)

    @torch.no_grad()
    def _step(self, order: int, is_late: bool, rates: float, weights: list[float]) -> None:
        """See `Share.begin_step`."""
        pair: list[Tensor] = [self._own.sent, self._received] if order else []
        if order == OWN_LAST:
            pair.reverse()
        self._outer.step(self._own, pair, weights if order else [], is_late=is_late, rates=rates)

    @torch.no_grad()
    def _work(self, work: HostWork, first: float, second: float) -> None:
        """Do on this machine what rank 0 does on its own."""
        share, outer = self._vectors.share, self._outer
        if work in (HostWork.GATHER, HostWork.SPREAD):
            return share.move_as_told(work, first)
        made = self._own
        match work:
            case HostWork.DISTANCE:
                outer.distance_to_slow(made)
            case HostWork.ALIGNMENT:
                outer.alignment(made, self._received, None)
            case HostWork.SCREENING:
                self._decoder.add_up(self._rule)
            case HostWork.LIMIT_MOMENTUM:
                outer.limit_momentum(made.part, first)
            case HostWork.FILL:
                self._tried = self._theta.new_empty(len(made.theta))
                outer.fill(Tried(int(first)), second, made, self._received, self._tried)
            case HostWork.SWAP:
                swap(share, made.part, self._theta[made.part], self._tried)

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
        self._vectors: RankVectors | None = None
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
                    told = self._ranks.hear_bytes(numbers[0])
                    self._vectors = take_share(self._ranks, self._module, self._parameters, told)
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
                    self._part.obey(order, numbers)
                case Order.READ if self._vectors is not None:
                    self._part = _begin_part(self._vectors)
                case Order.READ:
                    self._read()
            if order is until:
                return

    def _end(self) -> None:
        self.is_over = True
        if self._part is not None:
            self._part.close()
        self._part = self._vectors = None

    def _take_names(self, names: Iterable[str]) -> None:
        found = parameters_of(self._module, with_frozen=True)
        if missing := [name for name in names if name not in found]:
            raise TrainingError(f"the model of this rank lacks {missing[0]}, which that of rank 0 has")
        self._parameters = {name: found[name] for name in names}
        if self._part is not None:  # the engine begins again
            self._part.close()
        self._part = self._vectors = None

    def _measure(self) -> None:
        if self._evaluate is None:
            raise TrainingError("evaluate= is to be given to every rank, or to none")
        self._evaluate()

    @torch.no_grad()
    def _read(self) -> None:
        synchronize(self._parameters.values())
        for parameter in self._parameters.values():
            whole_of(parameter)


def _begin_part(vectors: RankVectors) -> RankPart:
    """Read the parameters for the first time, as rank 0 does before it creates its outer state."""
    theta = vectors.share.empty(torch.empty(0), vectors.layout.num_elements)
    vectors.read(theta)
    return RankPart(vectors, theta)

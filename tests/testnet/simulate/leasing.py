"""Data leases under simulation: many nodes train on the slices of an epoch, die, leave and join, in virtual time.

Each node is a `farandole.testnet.simulate.state` node, whose run state is really signed, pushed and synced over a bad
network. On top are the leases' machine and the queue from which a real trainer draws. A slice takes as long as the
node's pace says. The slices that each trainer trains on are counted here.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from farandole.protocol.epochs.lease_claims import Standing
from farandole.protocol.epochs.leases import Leases, Output
from farandole.protocol.state.entries import Kind, Lease
from farandole.protocol.trainer.trainer_messages import DrawSlices, SlicesTrained
from farandole.testnet.simulate.state import SimulatedNode, World
from farandole.training.data.batches import SliceQueue

CORPUS = b"one text"
TICK_SECONDS = 1.0


class LeasingNode:
    """A node that trains ``pace`` slices a second while it has any, until it is stopped."""

    def __init__(self, epochs: Epochs, node: SimulatedNode, pace: float) -> None:
        self.node = node
        self.pace = pace
        self.leases = Leases(node.author, epochs.corpus, epochs.num_slices, epochs.num_epochs)
        self.is_training = True
        """Whether its trainer works; otherwise it leases and never trains."""
        self._epochs = epochs
        self._queue = SliceQueue(epochs.num_slices, epochs.corpus)
        self._credit = 0.0
        self._own_speed: float | None = None  # not known before the first slice
        self._unwritten: dict[int, Lease] = {}
        epochs.world.simulation.call_every(TICK_SECONDS, self._tick)  # while the node lives

    def leave(self) -> None:
        """Leave properly: hand the leases over."""
        self._report()
        self._carry_out(self.leases.leave())
        self._write()

    def _tick(self) -> bool:
        if not self.node.is_running:
            return False
        self.leases.follow(self.node.state)
        self._train()
        self._report()
        liveness = self.node.gossip.liveness
        live = frozenset(liveness.live(self.node.clock.monotonic()))
        speeds = {author: self._epochs.speeds.get(author, 0.0) for author in live}
        standing = Standing(live, frozenset(self._epochs.proven), speeds, liveness.period, self._own_speed)
        self._carry_out(self.leases.tick(standing, self.node.clock.monotonic()))
        self._write()
        return True

    def _train(self) -> None:
        if not self.is_training or not self._queue.has_more:
            self._credit = 0.0
            return
        self._credit += self.pace * TICK_SECONDS
        while self._credit >= 1.0 and self._queue.has_more:
            self._credit -= 1.0
            self._own_speed = self.pace
            epoch, index, part = self._queue.draw()
            self._queue.settle(epoch, index, part, is_kept=True)
            self._epochs.counts[epoch][index] += 1

    def _report(self) -> None:
        if ranges := self._queue.take_trained():
            self.leases.trained(SlicesTrained(self._queue.epoch, ranges))

    def _carry_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, DrawSlices):
                self._queue.assign(output.epoch, output.ranges)
            else:
                self._unwritten[output[0]] = output[1]

    def _write(self) -> None:
        """Publish the leases that may be written already; only the newest of each slot."""
        for index, lease in list(self._unwritten.items()):
            if self.node.writer.delay(Kind.LEASE, index, self.node.clock.unix()) <= 0:
                self.node.publish(Kind.LEASE, index, lease)
                del self._unwritten[index]


@dataclass
class Epochs:
    """A run of ``num_epochs`` of ``num_slices`` each, in a world whose nodes are already connected."""

    world: World
    num_slices: int
    num_epochs: int = 1
    corpus: bytes = CORPUS
    paces: tuple[float, float] = (0.5, 5.0)
    """Slices per second of the slowest and of the fastest node."""
    counts: list[Counter[int]] = field(default_factory=list)
    """Epoch -> slice -> number of times that it was trained on."""
    nodes: list[LeasingNode] = field(default_factory=list)
    proven: set[bytes] = field(default_factory=set)
    """Authors that have exchanged with all others: the ones that train, unless a test changes this."""
    speeds: dict[bytes, float] = field(default_factory=dict)
    """Author -> the speed that it signs."""

    def __post_init__(self) -> None:
        self.counts = [Counter() for _ in range(self.num_epochs)]
        self._rng = random.Random(f"{self.world.simulation.seed} paces")

    def begin(self, node: SimulatedNode, pace: float | None = None) -> LeasingNode:
        """Let a node begin to train."""
        leasing = LeasingNode(self, node, self._rng.uniform(*self.paces) if pace is None else pace)
        self.nodes.append(leasing)
        self.proven.add(node.author)
        self.speeds[node.author] = leasing.pace
        return leasing

    def join(self, preparation: float = 10.0) -> None:
        """Add a newcomer: it syncs its run state, and trains once it has the weights."""
        node = self.world.add_node()
        node.start(self.world.contacts())
        self.world.simulation.call_after(preparation, lambda: self.begin(node) if node.is_running else None)

    def replace(self, *, leaves: bool) -> None:
        """Let one node die, or leave properly, and another one join."""
        leasing = self.world.simulation.rng.choice(self.living)
        if leaves:
            leasing.leave()
            self.world.simulation.call_after(TICK_SECONDS, leasing.node.stop)
        else:
            leasing.node.stop()
        self.join()

    @property
    def living(self) -> list[LeasingNode]:
        """Return the nodes that run."""
        return [leasing for leasing in self.nodes if leasing.node.is_running]

    @property
    def is_over(self) -> bool:
        """Return whether all living nodes know that the epochs are over."""
        return all(leasing.leases.is_over for leasing in self.living)

    def play(self, seconds: float) -> float:
        """Run until the epochs are over, or for ``seconds``; return the virtual seconds that it took."""
        began_at = self.world.simulation.now
        self.world.simulation.run_until(began_at + seconds, lambda: self.is_over, every=TICK_SECONDS)
        return self.world.simulation.now - began_at

    def missed(self, epoch: int = 0) -> int:
        """Return the number of slices that no node trained on."""
        return self.num_slices - len(self.counts[epoch])

    def mean(self, epoch: int = 0) -> float:
        """Return how many times a slice was trained on, on average."""
        return self.counts[epoch].total() / self.num_slices

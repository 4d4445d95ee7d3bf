"""Supervision of trainers: decide after one dies whether to start another at once, later, or with less in memory.

A trainer resumes from its last checkpoint; the node's partners see a failed exchange, the mesh process is unaffected.

- *Out of memory*: the next trainer takes half as many sequences at a time, down to one. Its inner steps are the same
  within rounding (`farandole.training.engine.learner`). The size stays for this node's later lives.
- *Crashes* are followed by longer and longer delays. After `MAX_CRASHES` in a row the node rests: it reports the
  reason, serves its peers without training, and tries again much later, since the cause (a driver, another program that
  fills the card) may be gone by then. Where the model is cut, others rely on a stage's holders, so the node leaves.
- *Unfit weights of a peer* are the peer's fault: a peer must not be able to stop this node with them.
- *Setup errors* at first (no such device, too little text) are reported to the volunteer, who has just started the
  node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from .trainer_messages import Cause

# Delays in seconds before a dead trainer is started again from its checkpoint; the last one repeats. A machine that
# cannot train does not spin.
RESTART_DELAYS: Final = (1.0, 5.0, 30.0, 120.0)
# A trainer that trained for this time was healthy: the next crash counts as the first.
HEALTHY_SECONDS: Final = 300.0
# Crashes in a row after which the node rests. With the delays between them they take at least five minutes, which a
# transient fault does not outlast, and at most half an hour.
MAX_CRASHES: Final = 6
# A rest: a try costs some seconds of loading, and a month has 700 of them.
REST_SECONDS: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows a trainer's death."""

    words: str
    """The event and its consequence, for people."""
    delay: float = math.inf
    """Seconds until the next trainer starts; `REST_SECONDS`: the node gives up for now; infinity: none can run here."""


class Supervisor:
    """Judges the deaths of one node's trainers, one after the other.

    ``batch_size`` is the run's, in sequences. ``is_cut``: the model is cut into stages.
    """

    def __init__(self, batch_size: int, *, is_cut: bool = False) -> None:
        self.microbatch = 0
        """Sequences that the next trainer takes at a time; 0: the whole batch."""
        self._batch_size = batch_size
        self._is_cut = is_cut
        self._crashes = 0
        self._has_trained = False

    def judge(self, error: str, cause: Cause, lived: float | None) -> Verdict:
        """Decide what follows when a trainer has died ``lived`` seconds after it was ready; None: it never was."""
        self._has_trained = self._has_trained or lived is not None
        if cause == "setup" and not self._has_trained:
            return Verdict(error)
        if cause == "weights":
            return Verdict(f"{error}; trying another peer's", RESTART_DELAYS[0])
        if cause == "memory" and lived is not None and not self._is_cut:
            size = self.microbatch or self._batch_size
            if size == 1:
                return self._rest(f"{error}, with one sequence at a time. {_remedy(is_cut=False)}")
            self.microbatch = -(-size // 2)  # the next trainer takes half as many sequences at a time
            smaller = f"{self.microbatch} of a batch's {self._batch_size} sequences at a time"
            words = f"{error}; starting it again with {smaller}, which makes the same inner steps"
            return Verdict(words, RESTART_DELAYS[0])
        self._crashes = 1 if (lived or 0.0) > HEALTHY_SECONDS else self._crashes + 1
        words = f"{error}. {_remedy(self._is_cut)}" if cause == "memory" else error
        if self._crashes < MAX_CRASHES:
            delay = RESTART_DELAYS[min(self._crashes, len(RESTART_DELAYS)) - 1]
            return Verdict(f"{words}; starting it again in {delay:g} s from the last checkpoint", delay)
        words = f"{words}; {MAX_CRASHES} crashes in a row"
        if self._is_cut:
            return Verdict(f"{words}: leaving, so that others take this stage")
        return self._rest(words)

    def _rest(self, words: str) -> Verdict:
        self._crashes = 0
        advice = "to try at once: `farandole pause`, then `farandole resume`"
        words = f"{words}. Training rests for {REST_SECONDS / 60:.0f} minutes, the node stays in the run; {advice}"
        return Verdict(words, REST_SECONDS)


def _remedy(is_cut: bool) -> str:
    if is_cut:
        return (
            "What a stage takes is set by the run: its creator may make one with pipeline.recompute = true, or with "
            "fewer pipeline.in_flight; or choose a --device with more memory"
        )
    return "Close other programs, or choose a --device with more memory, or a run of a smaller model"


# Detect that a trainer hangs: its process lives, but makes no progress (a driver, a lock, a disk that never answers).
#
# The node pings the trainer, which answers when it looks for commands: between two inner steps and whenever it waits.
# So an answer takes at most as long as an inner step. A trainer that is silent for many times its longest answer hangs.
# Silence is counted in turns of this process, each of which counts for at most `MAX_TURN`: time in which the whole
# machine stood still, or was too busy for either process, must not count as silence.

WATCH_INTERVAL: Final = 1.0
# A turn counts for at most this: a busy machine is late by as much as a turn, a frozen one by more.
MAX_TURN: Final = 2 * WATCH_INTERVAL
# Limit of silence in longest inner steps: between two of them the trainer may validate, take an outer step, and save.
HUNG_STEPS: Final = 20.0
# Limit before the first answer, while the length of an inner step is unknown: it may be an hour for the largest models
# on the slowest machines.
FIRST_SECONDS: Final = 3_600.0


class Watchdog:
    """Measures the silence of one trainer after another. ``least``: the least limit of silence, in seconds."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._longest: float | None = None
        self._silent = 0.0
        self.is_asked = False
        """Whether an answer is awaited."""

    @property
    def limit(self) -> float:
        """Return the seconds of silence after which a trainer counts as hung."""
        return max(self._least, FIRST_SECONDS if self._longest is None else HUNG_STEPS * self._longest)

    @property
    def is_hung(self) -> bool:
        """Return whether the trainer hangs now."""
        return self._silent > self.limit

    def begin(self) -> None:
        """Start to watch another trainer. The longest answer of earlier trainers is kept."""
        self.is_asked, self._silent = False, 0.0

    def ask(self) -> None:
        """Note that the trainer was pinged."""
        self.is_asked, self._silent = True, 0.0

    def hear(self) -> None:
        """Note that the trainer has answered."""
        if self.is_asked:
            self._longest = max(self._longest or 0.0, self._silent)
        self.begin()

    def pass_time(self, seconds: float) -> None:
        """Note that ``seconds`` have passed."""
        if self.is_asked:
            self._silent += min(seconds, MAX_TURN)

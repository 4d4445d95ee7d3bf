"""The rounds of one trainer: inner steps, an exchange or none, the outer step; its saves and its validations.

A round: the trainer takes inner steps while `farandole.protocol.rounds.pairing` agrees on a partner. The trainer
contributes; its contribution is encoded while the exchange sends it. Then it takes the outer step, with the partner's
contribution or alone. Pairing never waits beyond its deadline, so neither does a round.

*Overlap.* Where the manifest says so, the inner steps of the next round begin as soon as the contribution is made, and
pairing goes on to that round as soon as the exchange has begun. The trainer takes the outer step between two inner
steps, at the latest before its next contribution: there is never more than one exchange.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

from ..run.manifest import Manifest
from ..state.node_state import Phase, TrainingState
from ..trainer import trainer_messages as messages
from ..wire.errors import LocalProtocolError
from ..wire.identity import peer_id_of
from . import pairing_events as pairing
from .pairing import MAX_ROUNDS_BEHIND, Pairing
from .training_events import FOLLOWING, UNSAVED, Enter, LoopState, Output, RoundEnd, Say, TrainerReport

VALIDATION_BATCHES: Final = 8
# Rounds over which the utilisation is a mean.
RECENT_ROUNDS: Final = 5
# After a sleep, news of the others' rounds arrives in parts for this time: first the old news that waited in buffers.
NEWS_SECONDS: Final = 3.0


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the loop."""

    run_id: bytes
    manifest: Manifest
    max_rounds: int | None
    """The round at which training ends; None: never."""
    checkpoint_seconds: float
    validate_every: int
    """Rounds between two validations; 0: never."""
    hung_seconds: float
    """A trainer that is silent for less does not hang, whatever its inner steps take; infinity: none is watched."""


class Decisions:
    """What is decided about one event: the loop's state, the training's, and outputs."""

    def __init__(self, partners: Pairing) -> None:
        self.state = LoopState.IDLE
        self.training = TrainingState()
        """The state as last published, with the latest changes."""
        self.outputs: list[Output] = []
        self.asked: deque[pairing.Output] = deque()
        """By pairing, and not carried out yet."""
        self._pairing = partners

    def move(self, state: LoopState) -> None:
        """Go to another state."""
        if state not in FOLLOWING[self.state]:
            raise LocalProtocolError(f"the training loop cannot be {state.value} after {self.state.value}")
        self.state = state

    def tell_pairing(self, event: pairing.Event, now: float) -> None:
        """Pass an event to pairing, whose outputs are carried out after this event."""
        self.asked.extend(self._pairing.handle(event, now))

    def change(self, **changes: object) -> None:
        """Change fields of the training's state."""
        self.training = msgspec.structs.replace(self.training, **changes)

    def enter(self, phase: Phase, detail: str, waits_for: str = "") -> None:
        """Show a phase."""
        self.outputs.append(Enter(phase, detail, waits_for))

    def say(self, text: str) -> None:
        """Print a line."""
        self.outputs.append(Say(text))


class TrainerRounds:
    """The rounds of one trainer, from its first to its last save.

    ``over``: why no further round begins; empty if one does.
    """

    def __init__(
        self, prepared: messages.Prepared, config: LoopConfig, decisions: Decisions, over: str, now: float
    ) -> None:
        self.ready_at = now
        self.exchange: pairing.StartExchange | None = None
        self.replay: messages.Replay | None = None
        """A replay that was asked for and has not begun."""
        self.num_saving = 0
        """Number of `Save` commands without their report."""
        self._lags = deque([(-math.inf, 0)])
        """(At, rounds behind the others), the first more than `NEWS_SECONDS` ago."""
        self._prepared = prepared
        self._config = config
        self._decisions = decisions
        self._over = over
        # The replica's count begins with its weights, which may be a peer's; this node's own tokens are counted here.
        self._tokens_before = decisions.training.tokens - prepared.tokens
        self._contributed: messages.Contributed | None = None
        self._ended: list[pairing.ExchangeEnded] = []  # exchanges of the newest contribution
        self._alone = ""  # why its outer step is taken alone
        self._ahead_since: float | None = None  # start of the round that overlaps with the one that seeks a partner
        self._round_after_replay = 0
        # A replica without a checkpoint is saved as soon as possible, so that a trainer that dies can be resumed.
        self._saved_at = now if prepared.resumed else -math.inf
        self._recent = deque[tuple[float, float]](maxlen=RECENT_ROUNDS + 1)  # (end of a round, busy seconds in it)

    def begin(self, others_round: int, is_near: bool, now: float) -> None:
        """Begin the first round: the others' if it is later than the weights' and near it.

        One further away is only claimed by others, and must not move this node. Where the model is cut the others'
        round always counts, because a stage that was lost begins again in the middle of the run.
        """
        if self._config.manifest.start is not None and self._prepared.resumed is None and self._config.validate_every:
            self._validate()  # the weights that the run starts from
        own_round, is_cut = self._prepared.round, self._config.manifest.model.num_stages > 1
        first_round = max(own_round, others_round) if is_near or is_cut else own_round
        self._lags = deque([(-math.inf, others_round - first_round)])  # although it had looked for newer weights
        self._start_round(first_round, now)

    def end_rounds(self, words: str) -> None:
        """End training with the exchange of this round."""
        self._over = words
        self.tell(messages.FinishRound(self._decisions.training.round))

    def hear(self, report: TrainerReport, now: float) -> None:
        """Process a report of the trainer."""
        decisions = self._decisions
        match report:
            case messages.Progress():
                decisions.change(
                    inner_steps=report.inner_steps,
                    inner_steps_this_round=report.inner_steps_this_round,
                    loss=report.loss,
                    tokens_per_second=report.tokens_per_second,
                    device_memory=report.device_memory,
                )
                self._count_tokens(report.tokens)
            case messages.Contributed():
                self._contribute(report, now)
            case messages.OuterStepTaken():
                self._finish_round(report, now)
            case messages.Validated(problem=problem) if problem:
                decisions.outputs.append(Say(problem, "warn"))
            case messages.Validated():
                decisions.outputs.append(report)
            case messages.Replayed():
                self._start_round(self._round_after_replay, now)
            case messages.Saved():
                self.num_saving = max(0, self.num_saving - 1)  # a loop that is over saves unasked
                if report.problem:
                    decisions.outputs.append(Say(report.problem, "warn", UNSAVED))
                elif report.note:
                    decisions.outputs.append(Say(report.note, "warn"))
            case messages.Pong() | messages.Prepared():
                pass

    def has_slept(self, others_round: int, now: float) -> int:
        """Return the rounds that this node lost at once, between two rounds; 0: none.

        A slow node loses rounds one by one, which does no harm.
        """
        training = self._decisions.training
        is_between = self._contributed_round != training.round and not training.inner_steps_this_round
        if self._decisions.state is not LoopState.TRAINING or not is_between or not others_round:
            return 0
        behind = others_round - training.round
        self._lags.append((now, behind))
        while self._lags[1][0] <= now - NEWS_SECONDS:
            self._lags.popleft()
        return behind if behind - max(self._lags[0][1], 0) > MAX_ROUNDS_BEHIND else 0

    # Rounds

    def _start_round(self, round_index: int, now: float) -> None:
        decisions = self._decisions
        if decisions.state is not LoopState.TRAINING:
            return
        maximum = self._config.max_rounds
        is_last = maximum is not None and round_index >= maximum
        if words := f"all {maximum} rounds are done" if is_last else self._over:
            decisions.change(round=round_index)
            decisions.enter("finished", f"{words}; staying for the others")
            decisions.say(f"{words}; staying for the others")
            self.save_and_end(now)
            return
        if self.replay is not None:
            decisions.enter("training", "replaying a round, to compare")
            self.tell(self.replay)
            self.replay, self._round_after_replay = None, round_index
            return
        self._train(round_index)
        decisions.tell_pairing(pairing.RoundStarted(round_index), now)

    def _train(self, round_index: int) -> None:
        """Have the trainer take the inner steps of a round."""
        rounds = self._config.manifest.rounds
        takes_steps = rounds.takes_steps(round_index)
        self._decisions.change(
            round=round_index,
            round_steps=rounds.inner_steps if takes_steps else 0,
            round_seconds=rounds.round_seconds if takes_steps else 0.0,
            inner_steps_this_round=0,
        )
        what = "inner steps of" if takes_steps else "another partner for"
        self._decisions.enter("training", f"{what} round {round_index}")
        self.tell(messages.Train(round_index, rounds.inner_steps, takes_steps, self._is_followed(round_index)))

    def _is_followed(self, round_index: int) -> bool:
        """Return whether the inner steps of the next round begin before this one's outer step."""
        return self._config.manifest.rounds.overlap and round_index + 1 != self._config.max_rounds and not self._over

    def _contribute(self, report: messages.Contributed, now: float) -> None:
        """Begin the exchange of a round whose inner steps are done, and where rounds overlap the next inner steps."""
        decisions, takes_steps = self._decisions, self._config.manifest.rounds.takes_steps(report.round)
        self._contributed, self._ended, self._alone = report, [], ""
        decisions.change(
            inner_steps=report.inner_steps,
            inner_steps_this_round=report.inner_steps_this_round,
            utilisation=self._note_busy(report.busy_seconds, now) or decisions.training.utilisation,
        )
        self._count_tokens(report.tokens)
        if takes_steps:
            decisions.change(tokens_per_second=report.tokens_this_round / max(report.seconds, 1e-9))
        if report.busy_seconds:
            decisions.change(speed=report.tokens_this_round / report.busy_seconds)
        if report.loss is not None:
            decisions.change(loss=report.loss)
        if decisions.state is LoopState.TRAINING and self._is_followed(report.round):
            self._train(report.round + 1)
            self._ahead_since = now
        self._show("pairing", f"contribution of round {report.round} is ready", "the partner")
        step_seconds = report.seconds / max(report.inner_steps, 1)
        decisions.tell_pairing(pairing.ContributionReady(report.round, report.fragment, step_seconds), now)

    def _note_busy(self, seconds: float, now: float) -> float | None:
        """Add a round's seconds of inner steps; return their share of the time of the last few rounds, if known."""
        recent = self._recent
        recent.append((now, seconds))
        if len(recent) == 1:
            return None
        return (sum(seconds for _, seconds in recent) - recent[0][1]) / max(now - recent[0][0], 1e-9)

    def _finish_round(self, report: messages.OuterStepTaken, now: float) -> None:
        """Go on to the next round after an outer step; validate and save if it is time."""
        assert self._contributed is not None, "an outer step follows a contribution"
        decisions = self._decisions
        decisions.outputs.append(RoundEnd(self._contributed, tuple(self._ended), self._alone, report.late_steps))
        following = report.round + 1
        every, maximum = self._config.validate_every, self._config.max_rounds
        if every and (following % every == 0 or following == maximum):
            self._validate()
        if following != maximum and now - self._saved_at >= self._config.checkpoint_seconds:
            self.save_soon(now)
        if decisions.training.round == report.round:
            self._start_round(following, now)
        elif decisions.state is LoopState.TRAINING:  # it began long ago
            decisions.enter("training", f"inner steps of round {following}")

    # Exchanges

    def carry_out(self, output: pairing.Output, now: float) -> None:
        """Carry out an output of pairing."""
        match output:
            case messages.UseFragment() | messages.FinishRound():
                self.tell(output)
            case pairing.GoAlone(round_index, reason):
                self._go_alone(round_index, reason)
                self._seek_next_partner(now)
            case pairing.StartExchange():
                self.exchange = output
                self._show("exchanging", f"exchange of round {output.round}", "the partner's contribution")
                self._decisions.outputs.append(output)
                self._seek_next_partner(now)

    def _seek_next_partner(self, now: float) -> None:
        """Start pairing for the overlapping round that already runs: the round before needs no partner any more."""
        if self._ahead_since is not None:
            began_at, self._ahead_since = self._ahead_since, None
            self._decisions.tell_pairing(pairing.RoundStarted(self._decisions.training.round, began_at), now)

    def _go_alone(self, round_index: int, reason: str) -> None:
        self._alone = reason
        self._decisions.change(partner="")
        self._show("outer step", f"outer step of round {round_index} alone: {reason}")
        self.tell(messages.TakeOuterStep(round_index))

    def end_exchange(self, ended: pairing.ExchangeEnded, now: float) -> None:
        """Take the outer step with the partner's contribution; otherwise seek another partner, or take it alone."""
        decisions, self.exchange = self._decisions, None
        self._ended.append(ended)
        is_overlapped = decisions.training.round != ended.round
        decisions.change(partner=peer_id_of(ended.peer) if ended.committed else "")
        if ended.committed:
            self._show("outer step", f"outer step of round {ended.round}")
            self.tell(messages.TakeOuterStep(ended.round, ended.peer, ended.partner_size, ended.partner_tokens))
        if ended.is_broken and not is_overlapped:
            self._show("pairing", f"the exchange of round {ended.round} broke", "another partner")
            decisions.outputs.append(Say(f"another partner is sought for round {ended.round}", "note"))
        decisions.tell_pairing(ended, now)
        if decisions.state is LoopState.LEAVING:
            self.save_and_end(now)

    # Checkpoints and validation

    def save_soon(self, now: float) -> None:
        """Save unless a save is under way: many newcomers may ask for it."""
        if self.num_saving == 0:
            self._save(now)

    def _save(self, now: float, *, is_last: bool = False) -> None:
        self._saved_at = now
        self.num_saving += 1
        self.tell(messages.Save(is_last))

    def save_and_end(self, now: float) -> None:
        """Save for the last time: the report of this checkpoint ends the trainer, so nothing is trained after it."""
        self._save(now, is_last=True)
        self._decisions.move(LoopState.ENDING)

    def _validate(self) -> None:
        """Measure the validation loss; where the model is cut, only at nodes that draw data, through all stages."""
        if self._prepared.has_loss and self._prepared.stage == 0:
            self.tell(messages.Validate(VALIDATION_BATCHES))

    # Outputs

    @property
    def _contributed_round(self) -> int:
        """Return the newest round whose contribution is made; -1: none."""
        return -1 if self._contributed is None else self._contributed.round

    def tell(self, command: messages.Command) -> None:
        """Send the trainer a command, unless its last save was ordered."""
        if self._decisions.state in (LoopState.TRAINING, LoopState.LEAVING):
            self._decisions.outputs.append(command)

    def _count_tokens(self, tokens: int) -> None:
        """Count for the run at stage 0 alone: every stage sees all tokens."""
        if self._prepared.stage == 0:
            self._decisions.change(tokens=self._tokens_before + tokens)

    def _show(self, phase: Phase, detail: str, waits_for: str = "") -> None:
        """Show the progress of a contribution; where rounds overlap, the phase is the inner steps'."""
        round_index = self._decisions.training.round
        if round_index == self._contributed_round:
            self._decisions.enter(phase, detail, waits_for)
        else:
            self._decisions.enter("training", f"inner steps of round {round_index}; {detail}")

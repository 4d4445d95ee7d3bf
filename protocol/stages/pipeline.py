"""A node's part in the pipeline: which microbatch is computed next, where it goes, and when an inner step is taken.

A microbatch is drawn at a node of stage 0, its *origin*, goes through one node of each other stage, and returns to its
origin, where the loss is computed; its gradient goes back over the same nodes (NoLoCo, arXiv 2506.10911, random
pipeline routing). The next hop is drawn at random among the live nodes of the next stage, in proportion to the credits
that they have given (`farandole.protocol.stages.activations`): a slow node gives them back slowly, so it is drawn less
often (SWARM, ICML 2023, wires by throughput). Each node takes inner steps on its own
(`farandole.protocol.stages.microbatches`). No node waits for another's step: a microbatch under way needs only nodes of
later stages to go forward, and no node's permission to go back. A stage with fewer nodes has a larger quota, so that
all stages take equally many steps.

**Losses.** A hop that refuses, or dies before the gradient is back, is replaced by another; if the microbatch had gone
on already, its origin sees it arrive twice and drops it. A microbatch counts at all stages or at none: its origin
decides when the gradient is back, and announces the outcome along the route. A node whose upstream hop dies before that
asks the origin, and so does one that has heard nothing by the origin's deadline, as a hop between may be frozen. A node
without an answer by its own deadline takes the gradient out again. One case remains, as with any commit: if the origin
dies during the announcement, some stages count one microbatch more.

**Falsified data.** The trainer judges the data that peers send (`farandole.training.engine.link_statistics`). An
outlier is dropped. A peer that sends several, or over which most microbatches are lost, is avoided
(`farandole.protocol.stages.microbatches`): its links are closed and, if it is an origin, its microbatches are
refused. A node without a link to the next stage gives no credits.

Sans-IO: `handle(event, now)`. The memory of a microbatch is a *slot* (`farandole.node.loop.pipeline_service`).
"""

from __future__ import annotations

import math
import random

from ..run.manifest import Manifest
from ..trainer import trainer_messages as messages
from ..trainer.trainer_messages import Job
from ..wire.timers import SetTimer, TimerFired
from . import activations as wire
from . import pipeline_events as machine
from .microbatches import (
    GIVEN_BACK,
    LOSES_ALL,
    MAX_JOBS,
    MIN_AHEAD,
    RETRY_INTERVAL,
    SUMMED,
    UNTOUCHED,
    Avoidance,
    Counts,
    Dialling,
    HeldOut,
    Hop,
    LinkStep,
    Microbatch,
    Microbatches,
    MicrobatchJobs,
    MicrobatchLink,
    Schedule,
    choose_hop,
    grant,
)

# A microbatch that three hops have refused or lost is dropped: the fault may be its own.
MAX_ATTEMPTS = 3
# Seconds that a node waits for an answer before it asks the origin again.
ASK_INTERVAL = 1.0
# A trainer that could not draw, for example for lack of data, is asked again after this time.
DRAW_INTERVAL = 0.5
# Microbatches from a round further from ours are refused: their activations are of too different weights.
MAX_ROUNDS_APART = 10

# Time between an origin's deadline and the deadline of the other nodes, which wait for its answer.
GRACE_SECONDS = 3.0
# Links of a node: to the next stage, from the one before, and between origins and the last stage; for a run of 1,000
# nodes with two stages, one of which has all but a few.
MAX_LINKS = 1_024
AVOIDED_ORIGIN = "its origin is avoided"
# Jobs on what a peer has sent, which the trainer judges.
JUDGED: tuple[Job, ...] = ("forward", "tail", "backward")
# What follows once a microbatch's data are here.
_AFTER_ARRIVAL: dict[LinkStep, tuple[LinkStep, Job]] = {
    LinkStep.COMING: (LinkStep.QUEUED, "forward"),
    LinkStep.HOME_COMING: (LinkStep.HOME, "tail"),
    LinkStep.RETURNING: (LinkStep.RETURNED, "backward"),
}


class Pipeline:
    """The pipeline state machine of one node; one instance per life of the trainer."""

    def __init__(
        self,
        manifest: Manifest,
        author: bytes,
        stage: int,
        rng: random.Random,
        counts: Counts | None = None,
        avoidance: Avoidance | None = None,
    ) -> None:
        """``author`` and ``stage``: this node's. ``counts`` and ``avoidance`` are taken over from earlier lives."""
        self.counts = counts or Counts()
        self._avoidance = avoidance or Avoidance()
        self._author, self._stage, self._manifest, self._config = author, stage, manifest, manifest.pipeline
        self._rng = rng
        self._nodes = machine.NodesChanged(frozenset(), 1, 1, 1)
        self._links: dict[int, MicrobatchLink] = {}
        self._dialling = Dialling(rng)
        self._ahead = MIN_AHEAD
        """Microbatches that may wait for their forward pass."""
        self._microbatches = Microbatches(self._config.in_flight)
        self._jobs = MicrobatchJobs()
        self._schedule = Schedule(self._config, stage, quota=lambda: self.quota, num_coming=self._num_coming)
        self._held_out = HeldOut()
        self._draw_after = -math.inf
        self._change_links_at = math.inf
        """When links may have to be opened or closed, as far as is known."""
        self._outputs: list[machine.Output] = []
        self._now = 0.0

    @property
    def num_in_flight(self) -> int:
        """Return the number of microbatches for which the trainer holds data."""
        return sum(microbatch.has_begun for microbatch in self._microbatches.by_ticket.values())

    @property
    def quota(self) -> int:
        """Return the microbatches of an inner step: what each node of this stage gets while the origins draw theirs."""
        nodes, drawn = self._nodes, self._manifest.inner.batch_size // self._config.microbatch_size
        return drawn if self._stage == 0 else max(1, round(drawn * nodes.num_origins / max(1, nodes.num_own)))

    @property
    def _is_last(self) -> bool:
        return self._stage == self._manifest.model.num_stages - 1

    def handle(self, event: machine.Event, now: float) -> list[machine.Output]:
        """Process an event and return the outputs to carry out."""
        self._now, self._outputs = now, []
        self._apply(event)
        self._expire()
        if now >= self._change_links_at:
            self._change_links()
        self._route()
        self._give_work()
        while (move := self._schedule.move_on(now)) is not None:  # nothing for this step is under way
            if move == "step":
                self._outputs.append(messages.TakeInnerStep())
            elif move == "drained":
                self._outputs.append(messages.FinishRound(self._schedule.round))
            self._give_work()
        self._grant()
        self._outputs.append(SetTimer(self._next_deadline()))
        return self._outputs

    def _apply(self, event: machine.Event) -> None:
        match event:
            case machine.NodesChanged():
                self._nodes, self._change_links_at = event, self._now
            case machine.LinkOpened(number, peer, is_upstream, is_return):
                self._links[number] = MicrobatchLink(peer, is_upstream, is_return, heard_at=self._now)
                self._change_links_at = self._now
                if is_upstream:
                    self._dialling.note_answer(peer, is_return)
                if len(self._links) > MAX_LINKS or self._avoidance.is_avoided(peer, self._now):
                    self._hang_up(number)
            case machine.LinkFailed(peer, is_return):
                self._dialling.note_answer(peer, is_return)
                self._change_links_at = self._now
                if is_return:
                    self._lose_origin(peer)
                else:
                    self._dialling.not_before[peer] = self._now + RETRY_INTERVAL
            case machine.LinkClosed(link):
                self._close_link(link)
            case machine.Received(number, message):
                if number in self._links:
                    self._hear(number, self._links[number], message)
            case machine.Tell():
                self._be_told(event.peer, event.message)
            case messages.Worked():
                self._worked(event)
            case messages.InnerStepTaken():
                if self._schedule.stepped(self._now):
                    self._outputs.append(messages.FinishRound(self._schedule.round))
            case messages.Train():
                self._outputs.append(event)
                self._schedule.begin_round(event)
            case messages.FinishRound(round_index) if round_index == self._schedule.round:
                self._schedule.end_round(self._now)
            case messages.Validate(num_batches):
                num_parts = self._manifest.inner.batch_size // self._config.microbatch_size
                self._held_out.begin(event, num_batches * num_parts, MAX_ATTEMPTS)
            case TimerFired():
                pass  # due actions are checked after every event

    # Links

    def _lose_origin(self, peer: bytes) -> None:
        for microbatch in self._microbatches.at(LinkStep.ROUTING):
            if microbatch.origin == peer:
                self._drop(microbatch, "its origin cannot be reached")

    def _hang_up(self, number: int) -> None:
        self._outputs.append(machine.LinkClosed(number))
        self._close_link(number)

    def _close_link(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is None:
            return
        self._change_links_at = self._now
        if link.is_upstream and link.is_return:
            self._lose_origin(link.peer)
        elif link.is_upstream:
            self._dialling.not_before[link.peer] = self._now + RETRY_INTERVAL
            if self._stage and not any(link.is_upstream for link in self._links.values()):
                for microbatch in self._microbatches.at(LinkStep.ROUTING):  # another node may have a way on
                    self._drop(microbatch, "no node of the next stage takes it")
        for microbatch in link.open.values():
            if link.is_upstream:
                microbatch.onward = None
                if microbatch.step not in GIVEN_BACK:
                    self._lose_hop(microbatch, link.peer, "a later stage's node was lost")
                continue
            microbatch.inward = None
            if microbatch.step is LinkStep.DONE:  # its origin may have its gradient
                microbatch.ask_at = self._now
            else:
                self._drop(microbatch, f"{'the last' if link.is_return else 'an earlier'} stage's node was lost")

    def _grant(self) -> None:
        has_way_on = self._is_last or any(link.is_upstream for link in self._links.values())
        self._ahead = grant(
            self._links,
            self._nodes,
            self._config.in_flight,
            self._ahead,
            num_free=len(self._microbatches.free_slots) if has_way_on else 0,
            num_waiting=self._num_coming(),
            is_starving=not self._jobs.given and self._schedule.may_begin(self._now) is not None,
        )
        # Credits travel with a gradient that the trainer is about to finish, unless they are waited for.
        given = [each for job, each in self._jobs.given if job == "backward" and self._stage]
        gradients = {each.inward[0] for each in given if each.inward}
        for number, link in self._links.items():
            may_wait = number in gradients and link.num_told > link.num_forwarded
            if not link.is_upstream and link.num_told < link.credits and not may_wait:
                link.num_told = link.credits
                self._outputs.append(machine.Send(number, wire.Credits(link.credits)))

    def _num_coming(self) -> int:
        return len(self._microbatches.at(LinkStep.COMING, LinkStep.QUEUED))

    def _leave(self, hop: Hop | None) -> None:
        """Remove a microbatch from a link."""
        if hop is not None and hop[0] in self._links:
            self._links[hop[0]].open.pop(hop[1], None)

    def _change_links(self) -> None:
        """Close links to nodes that have left the next stage or are dead, and to avoided peers; open others."""
        for number, link in list(self._links.items()):
            is_gone = link.is_upstream and not link.is_return and link.peer not in self._nodes.next_hops
            if is_gone or self._avoidance.is_avoided(link.peer, self._now):
                self._hang_up(number)
        if self._is_last:
            wanted = {microbatch.origin for microbatch in self._microbatches.at(LinkStep.ROUTING)}
        else:
            wanted = {hop for hop in self._nodes.next_hops if not self._avoidance.is_avoided(hop, self._now)}
        peers = self._dialling.choose(self._links.values(), wanted, self._now, is_return=self._is_last)
        self._outputs += [machine.OpenLink(peer, self._is_last) for peer in peers]
        later = (*self._dialling.not_before.values(), *self._avoidance.until(self._now))
        self._change_links_at = min((at for at in later if at > self._now), default=math.inf)

    # Messages from links

    def _hear(self, number: int, link: MicrobatchLink, message: wire.Event) -> None:
        if isinstance(message, wire.Credits):
            link.credits = message.total
            return
        link.heard_at = self._now
        match message:
            case wire.Forward():
                self._arrive(number, link, message)
            case wire.Gradient(index) if index in link.open:
                microbatch = link.open[index]
                awaited_at = LinkStep.OUT if self._stage else LinkStep.HOME_OUT
                if microbatch.step is awaited_at and not microbatch.is_held_out:
                    microbatch.step, microbatch.sender = LinkStep.RETURNING, link.peer
                    return
                self._leave(microbatch.onward)
                microbatch.onward = None
                self._hang_up(number)  # a gradient of nothing
                self._drop(microbatch, "a gradient that cannot be")
            case wire.DataReceived(index) if index in link.open and link.open[index].step in _AFTER_ARRIVAL:
                microbatch = link.open[index]
                microbatch.step, job = _AFTER_ARRIVAL[microbatch.step]
                self._outputs.append(machine.ReceiveInto(number, microbatch.slot))
                self._jobs.waiting[job].append(microbatch)
            case wire.Dropped(index, reason, is_untouched) if index in link.open:
                self._hop_dropped(link.open[index], link, reason, is_untouched)
            case wire.Settled(index, is_kept) if index in link.open:
                microbatch = link.open[index]
                self._leave(microbatch.inward)
                microbatch.inward = None
                if is_kept and microbatch.step is LinkStep.DONE:
                    self._end(microbatch, is_kept=True)
                elif not (is_kept and link.is_return):  # the origin decides by itself
                    self._drop(microbatch, "dropped on its way")

    def _arrive(self, number: int, link: MicrobatchLink, forward: wire.Forward) -> None:
        index = link.num_forwarded
        link.num_forwarded += 1
        problem = self._problem(forward, link)
        if problem:
            self.counts.refused += 1
            is_untouched = problem != AVOIDED_ORIGIN  # other nodes of this stage would refuse it as well
            self._outputs.append(machine.Send(number, wire.Dropped(index, problem, is_untouched)))
            return
        if link.is_return:
            microbatch = self._microbatches.by_ticket[forward.ticket]
            microbatch.step = LinkStep.HOME_COMING
        else:
            seconds = min(forward.seconds_left, self._config.microbatch_seconds)
            self._schedule.note_arrival(self._config.microbatch_seconds - seconds, self._now)
            deadline = self._now + seconds + GRACE_SECONDS
            microbatch = self._microbatches.add(forward.ticket, forward.origin, deadline, LinkStep.COMING)
            microbatch.is_held_out = forward.is_held_out
        link.open[index] = microbatch
        microbatch.inward, microbatch.sender = (number, index), link.peer

    def _problem(self, forward: wire.Forward, link: MicrobatchLink) -> str:
        """Return why a microbatch cannot be taken; an empty string if it can."""
        known = self._microbatches.by_ticket.get(forward.ticket)
        if link.is_return:
            if known is None or known.origin != self._author:
                return "it is not mine"
            return "" if known.step is LinkStep.OUT else "it has come already"
        if abs(forward.round - self._schedule.round) > MAX_ROUNDS_APART:
            return f"of round {forward.round}, this is round {self._schedule.round}"
        if known is not None:
            return "it is here already"
        if self._avoidance.is_avoided(forward.origin, self._now):
            return AVOIDED_ORIGIN
        return "" if self._microbatches.free_slots else "no slot is free"

    def _hop_dropped(self, microbatch: Microbatch, link: MicrobatchLink, reason: str, is_untouched: bool) -> None:
        self._leave(microbatch.onward)
        microbatch.onward = None
        if is_untouched and not link.is_return:
            link.wait_until = self._now + RETRY_INTERVAL
            self._lose_hop(microbatch, link.peer, reason)
        else:
            self._note_end(microbatch, link.peer, is_kept=False)
            self._drop(microbatch, reason)

    def _be_told(self, peer: bytes, message: wire.Question | wire.Answer) -> None:
        """Answer a node that has lost its upstream hop, or take an origin's answer.

        Its microbatch is dropped unless its gradient is here already. The lost hop may have passed the gradient on
        before it died. If it has not, the search for another hop is in vain, and whole steps wait.
        """
        microbatch = self._microbatches.by_ticket.get(message.ticket)
        if isinstance(message, wire.Question):
            if microbatch is not None and microbatch.step is LinkStep.HOME_OUT:
                self._drop(microbatch, "its way back was lost")
            outcome = self._microbatches.outcome(message.ticket)
            self._outputs.append(machine.Tell(peer, wire.Answer(message.ticket, outcome)))
        elif microbatch is None or microbatch.step is not LinkStep.DONE or microbatch.origin != peer:
            return
        elif message.is_kept is None:
            microbatch.ask_at = self._now + ASK_INTERVAL
        elif message.is_kept:
            self._end(microbatch, is_kept=True)
        else:
            self._drop(microbatch, "dropped by its origin")

    # Routes

    def _route(self) -> None:
        for microbatch in self._microbatches.at(LinkStep.ROUTING):
            links = self._links
            if self._is_last:
                links = {number: link for number, link in links.items() if link.peer == microbatch.origin}
            number = choose_hop(links, microbatch, self._now, self._rng)
            if number is None:
                continue
            link = links[number]
            microbatch.onward, microbatch.step = (number, link.num_forwarded), LinkStep.OUT
            microbatch.sent_at = self._now
            link.open[link.num_forwarded] = microbatch
            link.num_forwarded += 1
            seconds_left = max(0.0, microbatch.deadline - self._now)
            forward = wire.Forward(
                microbatch.ticket, microbatch.origin, self._schedule.round, seconds_left, microbatch.is_held_out
            )
            self._outputs.append(machine.Send(number, forward, microbatch.slot))

    def _lose_hop(self, microbatch: Microbatch, peer: bytes, reason: str) -> None:
        """Seek another next hop, if no gradient has come back yet."""
        microbatch.tried.append(peer)
        is_ahead = microbatch.step is LinkStep.OUT or (microbatch.step is LinkStep.RETURNING and self._stage > 0)
        if is_ahead and not self._is_last and len(microbatch.tried) < MAX_ATTEMPTS:
            microbatch.step = LinkStep.ROUTING
            self.counts.rerouted += 1
        else:
            self._drop(microbatch, reason)

    # The trainer

    def _give_work(self) -> None:
        while self._schedule.is_open and len(self._jobs.given) < MAX_JOBS:
            following = self._jobs.take(may_begin=self._schedule.may_begin(self._now) is not None)
            if following is not None:
                self._work(*following)
            elif self._can_draw() and (self._held_out.waiting or self._schedule.may_begin(self._now)):
                ticket = self._rng.randbytes(wire.TICKET_BYTES)
                deadline = self._now + self._config.microbatch_seconds
                microbatch = self._microbatches.add(ticket, self._author, deadline, LinkStep.QUEUED)
                if self._held_out.waiting:
                    microbatch.is_held_out, microbatch.number = True, self._held_out.waiting.popleft()
                self._work("draw", microbatch)
            else:
                return

    def _can_draw(self) -> bool:
        """Return whether a drawn microbatch has a slot and a link with credit."""
        if self._stage or not self._microbatches.free_slots or self._now < self._draw_after:
            return False
        links = self._links.values()
        num_credits = sum(link.free for link in links if link.is_upstream and link.wait_until <= self._now)
        return num_credits > len(self._microbatches.at(LinkStep.STARTING, LinkStep.ROUTING))

    def _work(self, job: Job, microbatch: Microbatch) -> None:
        if job in ("draw", "forward"):
            if not microbatch.is_held_out:
                microbatch.inner_step = self._schedule.begin(self._now)
                self.counts.begun += 1
            microbatch.step, microbatch.has_begun, microbatch.begun_at = LinkStep.STARTING, True, self._now
        self._jobs.given.append((job, microbatch))
        is_following = microbatch.inner_step is self._schedule.following
        sender = microbatch.sender if job in JUDGED else b""
        self._outputs.append(
            messages.Work(job, microbatch.slot, is_following, microbatch.is_held_out, microbatch.number, sender)
        )

    def _worked(self, event: messages.Worked) -> None:
        job, microbatch = self._jobs.given.popleft()
        problem = event.problem
        if problem and job in ("draw", "forward"):
            microbatch.has_begun = False  # the trainer holds nothing of it
            self._draw_after = self._now + DRAW_INTERVAL
            if job == "draw" and microbatch.is_held_out:  # there is no such text: the trainer reports it in the end
                self._held_out.note_missing(microbatch.number)
        if microbatch.is_kept is not None:  # dropped during the job
            self._settle(microbatch)
        elif problem:
            self._drop(microbatch, problem)
        elif job in ("draw", "forward"):
            microbatch.step = LinkStep.ROUTING
            if self._is_last:  # its origin may have no link yet
                self._change_links_at = self._now
        elif job == "tail" and microbatch.is_held_out:
            self._held_out.note_measured(microbatch.number)
            self._end(microbatch, is_kept=False)
        elif job == "tail":
            microbatch.step = LinkStep.HOME_OUT
            self._send_back(microbatch)
        elif microbatch.origin == self._author:
            self._end(microbatch, is_kept=True)
        else:
            microbatch.step = LinkStep.DONE
            microbatch.ask_at = microbatch.deadline - GRACE_SECONDS
            self._send_back(microbatch)
        if job in JUDGED:
            seconds = self._avoidance.note_judged(microbatch.sender, event.is_outlier, self._now)
            self._avoid(microbatch.sender, problem, seconds)

    def _send_back(self, microbatch: Microbatch) -> None:
        assert microbatch.inward is not None, "who has lost the way back is dropped"
        link, index = microbatch.inward
        self._outputs.append(machine.Send(link, wire.Gradient(index), microbatch.slot))

    # The end of a microbatch

    def _note_end(self, microbatch: Microbatch, peer: bytes, *, is_kept: bool) -> None:
        """Note the outcome of a microbatch for a peer on its route."""
        if not microbatch.is_held_out:
            self._avoid(peer, LOSES_ALL, self._avoidance.note_end(peer, is_kept, self._now))

    def _avoid(self, peer: bytes, reason: str, seconds: float | None) -> None:
        """Report a peer that is avoided from now on; its links are closed after each event."""
        if seconds is not None:
            self._change_links_at = self._now
            self._outputs.append(machine.Avoided(peer, reason, seconds))

    def _drop(self, microbatch: Microbatch, reason: str) -> None:
        """Drop a microbatch at all stages: notify the nodes that do not know yet, and take out its gradient."""
        if microbatch.is_kept is not None:
            return
        reason = reason.encode("ascii", "replace").decode()[: wire.MAX_REASON_CHARS]
        if not microbatch.is_held_out:
            self.counts.dropped += 1
            self.counts.note(reason)
            self.counts.taken_out += microbatch.step in SUMMED
        if microbatch.inward is not None:
            link, index = microbatch.inward
            self._outputs.append(machine.Send(link, wire.Dropped(index, reason, microbatch.step in UNTOUCHED)))
        self._end(microbatch, is_kept=False)

    def _end(self, microbatch: Microbatch, *, is_kept: bool) -> None:
        microbatch.is_kept, microbatch.step = is_kept, LinkStep.ENDED
        microbatch.deadline = microbatch.ask_at = math.inf
        self.counts.kept += is_kept
        if is_kept:
            self._schedule.durations.append(self._now - microbatch.begun_at)
        if microbatch.onward is not None and microbatch.onward[0] in self._links:
            number, index = microbatch.onward
            self._outputs.append(machine.Send(number, wire.Settled(index, is_kept)))
        for hop in (microbatch.onward, microbatch.inward if self._stage else None):
            if hop is not None and hop[0] in self._links and not self._schedule.is_draining_over(self._now):
                self._note_end(microbatch, self._links[hop[0]].peer, is_kept=is_kept)
        self._leave(microbatch.onward)
        self._leave(microbatch.inward)
        microbatch.onward = microbatch.inward = None
        if microbatch.origin == self._author:
            self._microbatches.outcomes[microbatch.ticket] = is_kept
            if microbatch.is_held_out and self._held_out.note_end(microbatch.number):
                self._outputs.append(self._held_out.validate)
        self._jobs.discard(microbatch)
        if all(given is not microbatch for _, given in self._jobs.given):
            self._settle(microbatch)

    def _settle(self, microbatch: Microbatch) -> None:
        """Let the trainer forget an ended microbatch, and free its slot: the trainer obeys in order."""
        if microbatch.has_begun:
            self._outputs.append(messages.Settle(microbatch.slot, bool(microbatch.is_kept)))
        self._microbatches.release(microbatch)
        if microbatch.inner_step is not None:
            microbatch.inner_step.num_open -= 1
            microbatch.inner_step.num_kept += microbatch.has_begun and bool(microbatch.is_kept)

    def _expire(self) -> None:
        is_drained = self._schedule.is_draining_over(self._now)
        # The origin decides about a microbatch that has gone back; its own round ends as well.
        is_long_drained = self._schedule.is_draining_over(self._now - GRACE_SECONDS)
        for microbatch in list(self._microbatches.by_ticket.values()):
            is_of_round = microbatch.has_begun and self._schedule.is_of_round(microbatch.inner_step)
            if self._now >= microbatch.deadline:
                if microbatch.onward is not None and microbatch.step is LinkStep.OUT:
                    number = microbatch.onward[0]
                    if self._links[number].heard_at < microbatch.sent_at:  # it is frozen, and others reroute
                        self._leave(microbatch.onward)
                        microbatch.onward = None
                        self._hang_up(number)
                self._drop(microbatch, "out of time")
            elif is_drained and is_of_round and (microbatch.step is not LinkStep.DONE or is_long_drained):
                self._drop(microbatch, "the round is over")
            elif self._now >= microbatch.ask_at:
                microbatch.ask_at = self._now + ASK_INTERVAL
                self._outputs.append(machine.Tell(microbatch.origin, wire.Question(microbatch.ticket)))

    def _next_deadline(self) -> float:
        """Return when something is next due or can be tried again; everything due by now is done."""
        times = [
            self._draw_after,
            *self._schedule.deadlines,
            self._schedule.drain_until + GRACE_SECONDS,
            self._change_links_at,
        ]
        times += [link.wait_until for link in self._links.values()]
        for microbatch in self._microbatches.by_ticket.values():
            times += (microbatch.deadline, microbatch.ask_at)
        return min((at for at in times if at > self._now), default=math.inf)

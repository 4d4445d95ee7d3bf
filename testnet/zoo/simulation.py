"""Hostile members in a simulated run: real replicas in one process, paired at random, some of which lie.

Honest members screen as a daemon's trainer does (`farandole.training.engine.replica`). As in pairing, they meet peers
last with which an exchange failed, and publish whom they suspect. An exchange commits where both ends accept; hostile
members accept everything, and suspect every honest member. Where exchanges overlap with the next round, they end in its
middle (`LATE_SHARE`). The main figure is the honest members' loss on held-out text, compared with the loss of the
honest members alone, with the same seeds.
"""

from __future__ import annotations

import copy
import itertools
import random
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from farandole.protocol.rounds.pairing_order import PUT_OFF, PeerOrder
from farandole.protocol.run.manifest import DataConfig, Manifest
from farandole.protocol.run.rules import OPTIMIZER_VECTORS
from farandole.protocol.state.believing import OwnSuspects, is_suspected
from farandole.protocol.state.entries import PARTNER_BYTES, Suspects
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.data.batches import Batches
from farandole.training.data.dataset import NOTHING, Bring
from farandole.training.engine.learner import Learner, build_learner
from farandole.training.model.model import language_loss
from farandole.training.outer.codec import FORMS, Form
from farandole.training.outer.contribution import JUDGED_TOKENS, Exam
from farandole.training.screening.rule import Encounter, Refuse

from ..methods.compare import documents_by_kind
from .gradient_attacks import Common, Insight
from .member_attacks import ATTACKS, MOMENTA, POISONS, AttackView, forge, forge_momentum, trigger_success
from .optimised import Policy

# Held-out batches for the figure at the end, on which no member judges.
VALIDATION = range(100, 132)
# Where members are away: every this many rounds one more goes, for at most this many rounds.
AWAY_EVERY, MAX_AWAY = 4, 3
# Share of a round's inner steps after which the exchange of the round before ends, where both overlap.
LATE_SHARE = 0.5
# Of whole files, where members' texts differ: so each kind has some.
HELD_OUT_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class HostileRun:
    """The parameters of a simulated run."""

    manifest: Manifest
    attack: str | Policy = ""
    """A name of `ATTACKS`, or the numbers of an attacker that has searched; empty: all members are honest."""
    honest: int = 6
    hostile: int = 0
    rounds: int = 20
    steps: int = 10
    slowest: int = 10
    """Inner steps of the slowest member; the others' are evenly spaced between."""
    are_away: bool = False
    """Whether honest members are sometimes away, and return unchanged."""
    joins_at: int = 0
    """Round in which the last of the honest members joins; 0: all are there from the start."""
    newcomers: int = 1
    """Number of honest members that join, one in each round up to that of the last."""
    lag: int = 0
    """Age of the weights that a newcomer gets from another member, in rounds."""
    texts_differ: bool = False
    """Whether each member has a kind of text of its own (`documents_by_kind`), instead of the manifest's."""
    windows: int = 0
    """Windows of text that members judge on, as on slow machines; 0: as many as there are."""
    claimed_tokens: int = 10**12
    """Number of tokens that hostile members claim to have trained on."""
    seed: int = 0

    def joining_round(self, index: int) -> int:
        """Return the round in which a member joins; 0 for those that are there from the start."""
        is_newcomer = self.joins_at > 0 and self.honest - self.newcomers <= index < self.honest
        return max(self.joins_at - (self.honest - 1 - index), 0) if is_newcomer else 0


@dataclass
class HostileOutcome:
    """The result of a simulated run."""

    losses: list[float] = field(default_factory=list)
    """Loss of each honest member, in nats per token."""
    honest_exchanges: int = 0
    honest_refused: int = 0
    honest_clipped: int = 0
    hostile_exchanges: int = 0
    hostile_refused: int = 0
    hostile_clipped: int = 0
    triggered: float = 0.0
    """Share of held-out sequences in which honest members' models predict a backdoor's payload."""

    spread: float = 0.0
    """The largest distance between two honest members' slow weights, relative to their norm."""
    merged: float = 0.0
    """Loss of the mean of the honest members' slow weights, in nats per token."""
    travelled: float = 0.0
    """How far that mean is from the initial weights, a norm."""

    @property
    def loss(self) -> float:
        """Return the mean over honest members."""
        return sum(self.losses) / len(self.losses)


class _Member:
    def __init__(self, run: HostileRun, index: int, bring: Bring = NOTHING) -> None:
        self.key = bytes((index + 1,)) * 32
        self.is_hostile = index >= run.honest
        share = index / max(run.honest + run.hostile - 1, 1)
        self.steps = round((1 - share) * run.steps + share * min(run.slowest, run.steps))
        self.late_steps = round(LATE_SHARE * self.steps) if run.manifest.rounds.overlap else 0
        run_id = run.seed.to_bytes(32, "little")
        self.learner: Learner = build_learner(
            run.manifest, run_id=run_id, author=self.key, settings=TrainerSettings(device="cpu"), bring=bring
        )
        # However busy this machine is, the run says what there is time for.
        size = JUDGED_TOKENS // run.windows if run.windows else run.manifest.model.context
        self.learner.round_end.partner.exam = Exam(size, shares_text=not run.texts_differ, clock=lambda: 0.0)
        if self.is_hostile:
            self.learner.loss = POISONS.get(str(run.attack), self.learner.loss)
        self.initial = self.learner.round_end.outer.slow.clone()
        self.memory = bytearray(self.learner.round_end.contribution_bytes)
        self.contribution = b""
        self.sent: Tensor = self.initial  # (n,), before the codec
        self.chance = 1.0
        self.order = PeerOrder(self.key)
        self.partners: set[bytes] = set()  # of committed exchanges
        self.suspects = OwnSuspects()
        self.back_at = run.joining_round(index)

    def learn(self, steps: int) -> None:
        for _ in range(steps):
            self.learner.learn()

    def contribute(self, fragment: int) -> None:
        size, _ = self.learner.round_end.contribute(self.memory, fragment)
        self.contribution = bytes(memoryview(self.memory)[:size])

    def suspects_as_told(self, others: Sequence[_Member]) -> Suspects:
        """Return the suspects that the member publishes: a hostile member suspects all honest ones."""
        if not self.is_hostile:
            return self.suspects.entry
        return Suspects(tuple(other.key[:PARTNER_BYTES] for other in others if not other.is_hostile))

    def puts_off(self, other: _Member) -> bool:
        return not self.is_hostile and self.order.tier(other.key) >= PUT_OFF


def play(run: HostileRun) -> HostileOutcome:
    """Play the run; equal arguments give equal outcomes on machines of one class."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return _Play(run, Path(folder)).play()


class _Play:
    """The members of a run, and what becomes of them."""

    def __init__(self, run: HostileRun, folder: Path) -> None:
        brings = [NOTHING] * (run.honest + run.hostile)
        if run.texts_differ:
            data = DataConfig(source="text", held_out=HELD_OUT_SHARE)
            run = replace(run, manifest=msgspec.structs.replace(run.manifest, data=data))
            stdlib = Path(sysconfig.get_path("stdlib"))
            brings = [Bring(tuple(stdlib.joinpath(kind).rglob("*.py"))) for kind in documents_by_kind(len(brings))]
        self._run = run
        self._folder = folder
        self._rng = random.Random(f"hostile {run.seed}")
        self._generator = torch.Generator().manual_seed(run.seed)
        self._members = [_Member(run, index, bring) for index, bring in enumerate(brings)]
        self._outcome = HostileOutcome()
        self._common = Common()

    def play(self) -> HostileOutcome:
        run, members, rng, outcome = self._run, self._members, self._rng, self._outcome
        meet_ended: Callable[[], None] | None = None  # the exchanges of the round before, if they are under way
        for round_index in range(run.rounds):
            if run.are_away and round_index % AWAY_EVERY == AWAY_EVERY - 1:
                members[rng.randrange(run.honest)].back_at = round_index + rng.randint(1, MAX_AWAY)
            present = [member for member in members if member.back_at <= round_index]
            self._hand_weights_over(round_index)
            for member in present:
                member.learn(member.late_steps)
            if meet_ended is not None:
                meet_ended()
            for member in present:
                member.learn(member.steps - member.late_steps)
            num_partners = run.manifest.rounds.partners
            for meeting in range(round_index * num_partners, (round_index + 1) * num_partners):
                for member in present:
                    member.sent = member.learner.round_end.fast_weights()
                    member.chance = rng.random()
                    member.contribute(round_index % run.manifest.outer.fragments)
                meet_ended = partial(self._meet_all, present, meeting)
                if not run.manifest.rounds.overlap:
                    meet_ended()
                    meet_ended = None
        if meet_ended is not None:
            meet_ended()
        learners = [member.learner for member in members if not member.is_hostile]
        texts = [learner.sampler for learner in learners]
        outcome.losses = [unseen_loss(learner, texts) for learner in learners]
        slow = [learner.round_end.outer.slow.clone() for learner in learners]
        pairs = itertools.combinations(slow, 2)
        apart = (float((one - other).norm() / max(one.norm(), other.norm())) for one, other in pairs)
        outcome.spread = max(apart, default=0.0)
        outcome.triggered = fmean(
            trigger_success(learner.replica.module, torch.as_tensor(learner.sampler.held_out_batch(0))[:, :-1])
            for learner in learners
        )
        mean = torch.stack(slow).mean(0)
        outcome.travelled = float((mean - members[0].initial).norm())
        learners[0].round_end.weights.flat.copy_(mean)
        outcome.merged = unseen_loss(learners[0], texts)
        return outcome

    def _meet_all(self, present: list[_Member], meeting: int) -> None:
        """Pair the members of a round, and have each pair exchange its contributions."""
        honest = [member.sent for member in present if not member.is_hostile]
        for pair in _pairs(present, meeting, self._rng):
            self._meet(pair, meeting, honest)

    def _hand_weights_over(self, round_index: int) -> None:
        """Save weights for the members that join later, and load them where they join now.

        A newcomer gets no means of the inner optimizer, as in a run.
        """
        run, members = self._run, self._members
        for index in range(run.honest):
            joins_at, path = run.joining_round(index), self._folder / str(index)
            if joins_at and round_index == max(joins_at - run.lag, 0):
                whole = self._folder / f"{index} with means"
                members[index % (run.honest - run.newcomers)].learner.checkpoint.save(whole)
                with safe_open(whole, framework="pt") as file:
                    metadata = file.metadata()
                tensors = load_file(whole).items()
                kept = {name: tensor for name, tensor in tensors if name.partition("/")[0] not in OPTIMIZER_VECTORS}
                save_file(kept, path, metadata)
            if 0 < round_index == joins_at:
                members[index].learner.checkpoint.load(path)
                if run.lag:
                    members[index].learner.catch_up(round_index * run.manifest.rounds.partners)

    def _meet(self, pair: list[_Member], round_index: int, honest: list[Tensor]) -> None:
        run, outcome = self._run, self._outcome
        if len(pair) == 1:
            pair[0].learner.round_end.apply(None)
            return
        takes_steps = run.manifest.rounds.takes_steps(round_index)
        claims = [
            run.claimed_tokens if each.is_hostile else each.learner.round_end.claim(takes_steps=takes_steps)
            for each in pair
        ]
        tokens = claims if takes_steps else [min(claim, 1) for claim in claims]  # as in a trainer
        sent = [each.contribution for each in pair]
        encounters = []
        for index, member in enumerate(pair):
            other = pair[1 - index]
            believed = [each for each in self._members if each.key in member.partners and each is not other]
            told = [each.suspects_as_told(self._members) for each in believed]
            suspected = is_suspected(other.key, told, len(believed))
            encounters.append(Encounter(other.key, tokens[index], tokens[1 - index], member.chance, suspected))
        for index, member in enumerate(pair):
            if member.is_hostile:
                other, form = pair[1 - index], FORMS[run.manifest.outer.codec]
                slow = member.learner.round_end.outer.slow.clone()
                taken = partial(_taken, other, encounters[1 - index], form)
                insight = Insight(member.learner, taken, self._generator, self._common)
                view = AttackView(member.sent, slow, member.initial, other.sent, honest, self._generator, insight)
                attack = run.attack.contribution if isinstance(run.attack, Policy) else ATTACKS[run.attack]
                sent[index] = forge(attack(view), form) + _momentum_of(run.attack, member, other)
        are_accepting, does_count = True, [True, True]
        for index, member in enumerate(pair):
            other = pair[1 - index]
            if member.is_hostile:
                continue
            verdict = member.learner.round_end.screen(sent[1 - index], encounters[index])
            member.suspects.note(other.key, is_suspect=verdict.is_suspect)
            is_refused = isinstance(verdict, Refuse)
            clip = 0.0 if isinstance(verdict, Refuse) else verdict.clip
            is_clipped, does_count[index] = not is_refused and clip < 1.0, clip > 0.0
            are_accepting = are_accepting and not is_refused
            if other.is_hostile:
                outcome.hostile_exchanges += 1
                outcome.hostile_refused += is_refused
                outcome.hostile_clipped += is_clipped
            else:
                outcome.honest_exchanges += 1
                outcome.honest_refused += is_refused
                outcome.honest_clipped += is_clipped
        for index, member in enumerate(pair):
            if are_accepting:
                member.partners.add(pair[1 - index].key)
            if are_accepting and does_count[index]:
                member.order.note_success(pair[1 - index].key)
            else:
                member.order.note_failure(pair[1 - index].key)
            member.learner.round_end.apply(
                sent[1 - index] if are_accepting else None, encounters[index], own_first=index == 0
            )


@torch.no_grad()
def unseen_loss(learner: Learner, texts: Sequence[Batches]) -> float:
    """Return the loss of a learner's weights on text that no member judges on, in nats per token.

    The batches are of all ``texts`` in turn: where members' texts differ, each must know the others' too.
    """
    drawn = zip(itertools.cycle(texts), VALIDATION)
    tokens = torch.cat([torch.as_tensor(text.held_out_batch(index)) for text, index in drawn])
    return float(language_loss(learner.replica.module, tokens))


def _pairs(members: list[_Member], round_index: int, rng: random.Random) -> Iterator[list[_Member]]:
    """Pair each member with the first in random order that neither of them puts off, else with the first."""
    for member in members:
        member.order.begin(round_index)
    free = rng.sample(members, len(members))
    while free:
        member = free.pop()
        good = (other for other in free if not member.puts_off(other) and not other.puts_off(member))
        other = next(good, free[0] if free else None)
        if other is None:
            yield [member]
            continue
        free.remove(other)
        yield sorted((member, other), key=lambda each: each.key)


def _taken(victim: _Member, encounter: Encounter, form: Form, values: Tensor) -> Tensor:
    """Return what a victim would have after it has judged these values (n,), and leave it as it is."""
    round_end = victim.learner.round_end
    before = copy.deepcopy(round_end.partner.histories)
    forged = forge(values, form) + _momentum_of("", victim, victim)
    verdict = round_end.screen(forged, replace(encounter, chance=abs(float(values[0])) % 1.0))
    round_end.partner.histories = before
    return victim.sent if isinstance(verdict, Refuse) else victim.sent + verdict.shares[1] * (values - victim.sent)


def _momentum_of(attack: str | Policy, member: _Member, victim: _Member) -> bytes:
    """Return the wire bytes of what a member sends as its momentum: with most attacks, what an honest one does."""
    name, round_end = str(attack), member.learner.round_end
    ended = (victim if name in MOMENTA else member).learner.round_end.ended
    assert ended is not None
    return forge_momentum(name, round_end, ended.contribution.momentum)

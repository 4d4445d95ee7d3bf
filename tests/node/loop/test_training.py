"""The training loop with a trainer that a test controls."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.bulk.exchange_service import Judge
from farandole.node.bulk.pipe import Outgoing
from farandole.node.loop import training as training_module
from farandole.node.loop.rest_service import BY_HAND, Rest
from farandole.node.loop.training import TRAFFIC_INTERVAL, Training
from farandole.node.status.journal import Journal
from farandole.node.status.round_log import RoundRecord
from farandole.node.trainer.channel import SharedCounter, counted_size
from farandole.node.trainer.trainer import TrainerError
from farandole.protocol.exchange.exchange import Offer
from farandole.protocol.rounds import pairing_events as pairing
from farandole.protocol.rounds.pairing import MAX_ROUNDS_BEHIND, Pairing
from farandole.protocol.rounds.pairing_events import ExchangeEnded, StartExchange
from farandole.protocol.rounds.pairing_messages import Agree, Propose, Ready, decode_message, encode_message
from farandole.protocol.rounds.trainer_rounds import NEWS_SECONDS, LoopConfig
from farandole.protocol.rounds.training_events import Signal
from farandole.protocol.rounds.training_loop import EXCHANGE_GRACE, GIVE_UP_GRACE, REST_TIMEOUT, TrainingLoop
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.rules import RoundConfig
from farandole.protocol.state.node_state import NodeState
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.supervisor import MAX_CRASHES, REST_SECONDS, RESTART_DELAYS, Supervisor
from farandole.protocol.wire.identity import peer_id_of

from ..small_runs import MODEL

SIZE = 12_000_000
PREPARED = messages.Prepared("cpu", 1, SIZE, b"l" * 32, 0, 0, 0)
ALICE, BOB, CAROL = (letter * 32 for letter in (b"a", b"b", b"c"))
TRAIN, STEP, LAST_SAVE = messages.Train, messages.TakeOuterStep, messages.Save(is_last=True)
FOLLOWED = partial(messages.Train, is_followed=True)
EXCHANGE_SECONDS = 5.0
CHECKPOINT_SECONDS = 1_000.0


def with_weights_of(round_index: int) -> messages.Prepared:
    return msgspec.structs.replace(PREPARED, round=round_index)


def contributed(round_index: int) -> messages.Contributed:
    return messages.Contributed(round_index, SIZE, 8, 8, 1, 1, 8, 2.0, 1.0, 0)


def saved(problem: str = "") -> messages.Saved:
    return messages.Saved(0, 0, 0, "checkpoint", 4, problem=problem)


class FakeTrainer:
    """Keeps its commands, and reports what the test puts into `reports`."""

    def __init__(self, prepared: messages.Prepared, pid: int) -> None:
        self.prepared, self.pid = prepared, pid
        self.outgoing, self.incoming = bytearray(counted_size(SIZE)), bytearray(counted_size(SIZE))
        self.commands: list[messages.Command] = []
        self.reports, self._reported = trio.open_memory_channel[messages.Report | TrainerError](100)

    async def send(self, *commands: messages.Command) -> None:
        for command in commands:
            if not isinstance(command, messages.Ping):
                self.commands.append(command)
            else:
                self.reports.send_nowait(messages.Pong())

    async def condemn(self, reason: str) -> None:
        self.reports.send_nowait(TrainerError(reason))

    async def receive(self) -> messages.Report:
        report = await self._reported.receive()
        if isinstance(report, TrainerError):
            raise report
        return report


def with_rounds(*rounds: RoundConfig) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("story", rounds, indirect=True)


class Story:
    """A node without peers, its rounds, and every trainer that it has started."""

    def __init__(self, nursery: trio.Nursery, rounds: RoundConfig) -> None:
        self._nursery = nursery
        self.trainers: list[FakeTrainer] = []
        self.prepared, self.preparing_seconds = PREPARED, 0.0
        self.others_round = 0
        self.traffic = 1e9  # bytes of an exchange that are left
        self.rounds: list[RoundRecord] = []
        self.saved: list[messages.Saved] = []
        self.journal = Journal(lambda text: None, keep_round=self.rounds.append)
        self.peers_that_answer: set[bytes] = set()
        self.exchanges: list[StartExchange] = []
        self.exchange_seconds = EXCHANGE_SECONDS
        self.is_committed = self.has_left = False
        self.partners: list[bytes] = []
        self.suspicions: list[tuple[object, ...]] = []
        self.num_cancelled = 0
        self.given_up = trio.Event()
        fake: Any = SimpleNamespace(
            set_receiver=lambda *args: None,
            send_nowait=self.deliver,
            run=self.exchange,
            give_up=lambda reason: self.given_up.set(),
            may_spend=lambda num_bytes: num_bytes <= self.traffic,
            is_suspected=lambda peer: False,
            current_round=lambda: self.others_round,
            partners_round=lambda: self.others_round,
            note_saved=self.saved.append,
            partners=SimpleNamespace(note=self.partners.append),
            announcer=SimpleNamespace(note_suspicion=lambda *noted: self.suspicions.append(noted)),
        )
        manifest = Manifest("tiny", MODEL, rounds=rounds)
        self.pairing = Pairing(ALICE, rounds, random.Random(1))
        self.rest = Rest()
        config = LoopConfig(b"r" * 32, manifest, 3 if rounds.overlap else None, CHECKPOINT_SECONDS, 0, 30.0)
        loop = TrainingLoop(config, self.pairing, Supervisor(manifest.inner.batch_size))
        self.training = Training(loop, fake, fake, self.journal, self.rest, fake, fake, fake, trio.Event())

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[-1]

    @property
    def state(self) -> NodeState:
        return self.journal.state

    @property
    def at(self) -> tuple[str, str]:
        return self.state.phase, self.state.phase_detail

    def told(self, *kinds: type[messages.Command]) -> list[Any]:
        """Return the trainer's commands of these kinds, or all but those to save."""
        all_kinds = kinds or {type(command) for command in self.trainer.commands} - {messages.Save}
        return [command for command in self.trainer.commands if type(command) in all_kinds]

    # What the loop uses

    async def prepare(self) -> messages.Prepare:
        await trio.lowlevel.checkpoint()
        return messages.Prepare(b"r" * 32, ALICE, b"", messages.TrainerSettings())

    @asynccontextmanager
    async def open_trainer(
        self, prepare: object, on_preparing: object, on_started: Callable[[int], None]
    ) -> AsyncIterator[FakeTrainer]:
        self.trainers.append(FakeTrainer(self.prepared, len(self.trainers) + 1))
        on_started(self.trainer.pid)
        await trio.sleep(self.preparing_seconds)
        yield self.trainer

    def deliver(self, peer: bytes, protocol: str, payload: bytes) -> None:
        """Deliver a message, as a messenger with too many streams: it reports the message lost, but for some peers."""
        message = decode_message(payload)
        if peer not in self.peers_that_answer:
            self.training.handle(pairing.PeerLost(peer))
        elif isinstance(message, Propose):
            for answer in (Agree(message.session, 0.0), Ready(message.session)):
                self.training.handle(pairing.MessageReceived(peer, encode_message(answer)))

    async def exchange(
        self,
        start: StartExchange,
        offer: Offer,
        outgoing: Outgoing,
        incoming: memoryview,
        judge: Judge,
        on_advance: Callable[[int], None],
    ) -> ExchangeEnded:
        """Run an exchange that fails after a while, or is committed if the test says so."""
        self.exchanges.append(start)
        self.outgoing, self.judge, self.on_advance = outgoing, judge, on_advance
        try:
            with trio.move_on_after(self.exchange_seconds):
                await self.given_up.wait()
        except trio.Cancelled:
            self.num_cancelled += 1
            raise
        return ExchangeEnded(
            start.session, start.peer, self.is_committed, not self.is_committed, round=start.round, seconds=1.0
        )

    # What happens

    async def goes_on(self) -> None:
        await trio.testing.wait_all_tasks_blocked()

    async def begin(self, task: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(task)
        await self.goes_on()

    async def report(self, *reports: messages.Report | TrainerError) -> None:
        for report in reports:
            self.trainer.reports.send_nowait(report)
        await self.goes_on()

    async def play_round(self) -> None:
        await self.report(contributed(self.state.round), messages.OuterStepTaken(self.state.round))

    def know(self, *peers: bytes) -> None:
        """Know these peers, all of which answer."""
        self.peers_that_answer = set(peers)
        self.training.handle(pairing.PeersChanged(frozenset(peers)))

    async def meet(self, *peers: bytes) -> None:
        """Begin an exchange with one of these peers when round 0's contribution is ready; it answers nothing more."""
        self.know(*peers)
        await self.report(contributed(0))
        self.peers_that_answer -= {self.exchanges[0].peer}
        assert len(self.exchanges) == 1

    async def set_rest(self, words: str, reason: str = BY_HAND) -> None:
        """Begin to rest, or rest no more (empty ``words``)."""
        self.rest.set(reason, words)
        await self.goes_on()

    async def leave(self) -> None:
        await self.training.leave()
        self.has_left = True


@pytest.fixture
async def story(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Story:
    """A test may change a run's rounds (`with_rounds`)."""
    story = Story(nursery, getattr(request, "param", RoundConfig()))
    monkeypatch.setattr(training_module, "open_trainer", story.open_trainer)
    await story.begin(lambda: story.training.run(story.prepare))
    return story


async def test_a_round_for_which_there_is_no_traffic_is_not_exchanged(story: Story, clock: MockClock) -> None:
    story.know(BOB)
    story.traffic = 2 * SIZE - 1
    await trio.sleep(2 * TRAFFIC_INTERVAL)
    await story.play_round()
    assert not story.exchanges
    assert story.journal.history.recent_exchanges[-1].verdict == "alone: this node saves its traffic"
    story.traffic = 2 * SIZE
    await trio.sleep(2 * TRAFFIC_INTERVAL)
    await story.report(contributed(1))
    assert len(story.exchanges) == 1


@pytest.mark.parametrize("is_due", [False, True])
async def test_what_was_never_saved_is_saved_and_a_save_that_is_due_while_one_is_written_comes_a_round_later(
    story: Story, clock: MockClock, is_due: bool
) -> None:
    for _ in range(2):
        await story.play_round()
        await trio.sleep(is_due * CHECKPOINT_SECONDS)
    assert len(story.told(messages.Save)) == 1
    for _ in range(2):
        await story.report(saved())
        await story.play_round()
        assert len(story.told(messages.Save)) == 1 + is_due


async def test_what_a_trainer_goes_on_from_is_told_as_if_it_had_saved_it(story: Story, clock: MockClock) -> None:
    story.prepared = msgspec.structs.replace(PREPARED, round=7, resumed=saved(), problem="round 8 is damaged")
    await story.report(TrainerError("the disk went away"))
    await trio.sleep(RESTART_DELAYS[0] + 1)
    assert (len(story.trainers), story.saved) == (2, [saved()])
    assert story.journal.warnings[-1] == "going on with an older checkpoint: round 8 is damaged"


@pytest.mark.parametrize("rests", [False, True])
async def test_who_leaves_waits_for_the_checkpoint_of_its_leaving_or_of_its_rest(story: Story, rests: bool) -> None:
    if rests:
        await story.set_rest("the owner plays")
    else:
        story.training.handle(Signal.SAVE)
    await story.begin(story.leave)
    for _ in range(1 if rests else 2):
        assert not story.has_left
        await story.report(saved())
    assert story.has_left
    assert story.trainer.commands[-1] == LAST_SAVE
    assert len(story.told(messages.Save)) == (1 if rests else 2)


async def test_a_rest_waits_for_no_exchange_and_loses_no_round_that_is_over(story: Story, clock: MockClock) -> None:
    story.exchange_seconds = 10 * REST_TIMEOUT
    await story.meet(BOB)
    began_at = trio.current_time()
    await story.set_rest("the owner plays")
    assert story.given_up.is_set()
    assert LAST_SAVE in story.trainer.commands
    await story.report(saved())
    assert (story.state.phase, story.saved, trio.current_time()) == ("paused", [saved()], began_at)


async def test_who_resumes_while_the_trainer_still_saves_trains_again(story: Story) -> None:
    await story.set_rest("the owner plays")
    await story.set_rest("")
    await story.report(saved())
    await story.play_round()
    assert (len(story.trainers), story.at[0], story.state.round) == (2, "training", 1)


async def test_a_reason_to_rest_that_comes_as_another_goes_is_kept(story: Story) -> None:
    """The order in which trio wakes the waiting tasks does not matter."""

    async def replace_reason() -> None:
        await story.rest.changed.park()
        story.rest.set("quiet hours", "until 07:00")

    for _ in range(40):
        for words in ("the owner plays", ""):
            await story.set_rest(words)
            if story.state.phase != "paused":
                await story.report(saved())
            if words:
                await story.begin(replace_reason)
        assert story.at[0] == "paused"
        await story.set_rest("", "quiet hours")
        assert story.at[0] == "training"


async def test_a_trainer_that_dies_again_and_again_rests_until_its_owner_tries(story: Story, clock: MockClock) -> None:
    for _ in range(MAX_CRASHES):
        await story.report(TrainerError("killed by signal 11"))
        await trio.sleep(1.1 * RESTART_DELAYS[-1])
    assert (len(story.trainers), story.state.phase, story.pairing.state) == (MAX_CRASHES, "failed", pairing.State.AWAY)
    assert "signal 11" in story.state.phase_detail
    await trio.sleep(REST_SECONDS)
    assert len(story.trainers) == MAX_CRASHES + 1
    for _ in range(MAX_CRASHES):
        await story.report(TrainerError("no driver"))
        await trio.sleep(RESTART_DELAYS[-1] + 1)
    await story.set_rest("the owner mends the driver")
    resumed_at = trio.current_time()
    await story.set_rest("")
    assert (len(story.trainers), trio.current_time()) == (2 * MAX_CRASHES + 1, resumed_at)


async def test_who_rests_when_the_trainer_is_only_starting_starts_none(story: Story) -> None:
    story.preparing_seconds = math.inf
    story.training.handle(Signal.RESTART)
    await story.goes_on()
    assert [story.state.trainer_pid] == [2]  # its use of the machine does not count as another program's
    await story.set_rest("the owner plays")
    assert (story.state.phase, story.state.trainer_pid) == ("paused", None)


async def test_who_slept_takes_newer_weights_and_who_is_slow_does_not(story: Story, clock: MockClock) -> None:
    for _ in range(3 * MAX_ROUNDS_BEHIND):
        story.others_round += 3
        await trio.sleep(NEWS_SECONDS)
        await story.play_round()
    assert len(story.trainers) == 1
    story.others_round += MAX_ROUNDS_BEHIND + 2
    story.prepared = with_weights_of(story.others_round - 2)
    await story.play_round()
    assert (len(story.trainers), story.state.round) == (2, story.others_round)


async def test_a_round_that_others_claim_is_taken_up_with_weights_of_it_alone(story: Story, clock: MockClock) -> None:
    await story.play_round()
    story.prepared = with_weights_of(1)
    story.others_round = 100_000
    await story.play_round()
    assert (len(story.trainers), story.state.round) == (2, 1)
    for story.others_round in (0, 100_000):  # first none of them is believed any more
        await story.play_round()
        assert len(story.trainers) == 2, "that was looked into when this trainer began"


async def test_who_slept_and_learns_bit_by_bit_how_long_takes_newer_weights_too(story: Story, clock: MockClock) -> None:
    await story.play_round()
    for _ in range(2):
        story.others_round += MAX_ROUNDS_BEHIND // 2 + 3
        story.prepared = with_weights_of(story.others_round)
        await trio.sleep(NEWS_SECONDS / 10)
        await story.play_round()
    assert (len(story.trainers), story.state.round) == (2, story.others_round)


@with_rounds(RoundConfig(overlap=True))
async def test_the_next_round_begins_before_the_outer_step(story: Story) -> None:
    await story.report(contributed(0))
    assert story.told() == [FOLLOWED(0, 0), FOLLOWED(1, 0), STEP(0)]
    assert story.pairing.round == story.state.round == 1
    await story.report(messages.OuterStepTaken(0, late_steps=7), contributed(1))
    assert story.told()[3:] == [TRAIN(2, 0), STEP(1)]
    assert story.rounds[0].late_steps == 7
    await story.report(messages.OuterStepTaken(1), contributed(2))
    assert story.told()[5:] == [STEP(2)]  # no round is left to overlap with
    await story.report(messages.OuterStepTaken(2))
    assert story.state.phase == "finished"


@with_rounds(RoundConfig(overlap=True))
async def test_an_overlapped_exchange_that_fails_leaves_the_next_round_alone(story: Story, clock: MockClock) -> None:
    story.exchange_seconds = 6 * EXCHANGE_SECONDS
    await story.meet(BOB)
    assert story.told() == [FOLLOWED(0, 0), FOLLOWED(1, 0)]
    assert story.pairing.round == 0, "a partner that never exchanged may not offer anything"
    await trio.sleep(4 * EXCHANGE_SECONDS)
    assert story.pairing.round == 1  # the next partner is sought while the exchange goes on
    assert story.pairing.state is pairing.State.SEEKING
    await trio.sleep(4 * EXCHANGE_SECONDS)
    assert [start.round for start in story.exchanges] == [0]
    assert story.told()[2:] == [STEP(0)]
    assert story.pairing.round == 1
    assert story.journal.history.exchanges_failed == 1


async def test_what_is_encoded_is_sent_and_what_comes_is_taken_in(story: Story, clock: MockClock) -> None:
    await story.meet(BOB)
    assert story.outgoing.num_ready == 0
    encoded, arrived = SharedCounter(story.trainer.outgoing), SharedCounter(story.trainer.incoming)
    encoded.store(7, SIZE)
    assert story.outgoing.num_ready == 0, "that was another round's"
    encoded.store(0, 5)
    assert (story.outgoing.num_ready, story.outgoing.digest) == (5, None)
    await story.report(messages.Encoded(0, b"h" * 32))
    assert (story.outgoing.num_ready, story.outgoing.digest) == (SIZE, b"h" * 32)
    for num_received in range(0, SIZE + 1, SIZE // 10):
        story.on_advance(num_received)
        assert arrived.read() == (1, num_received)
    await trio.sleep(2 * EXCHANGE_SECONDS)
    assert story.told() == [TRAIN(0, 0), STEP(0)]


@with_rounds(RoundConfig(), RoundConfig(overlap=True))
async def test_a_trainer_that_dies_while_it_encodes_ends_the_exchange(story: Story, clock: MockClock) -> None:
    await story.meet(BOB)
    SharedCounter(story.trainer.outgoing).store(0, 5)
    await story.report(TrainerError("killed"))
    assert story.num_cancelled == 1
    assert not story.told(STEP)
    await trio.sleep(2 * RESTART_DELAYS[0])
    assert (len(story.trainers), story.told()) == (2, story.told(TRAIN)), "from the last checkpoint"
    assert [train.round for train in story.told(TRAIN)] == [0]


async def test_a_trainer_that_was_replaced_is_dead_no_more(story: Story, clock: MockClock) -> None:
    async def die() -> None:
        await story.report(TrainerError("killed"))
        assert (story.state.phase, story.state.is_trainer_dead) == ("preparing", True)

    await die()
    await trio.sleep(RESTART_DELAYS[0] + 1)
    assert (story.state.trainer_restarts, story.state.is_trainer_dead) == (1, False)
    await die()
    await story.set_rest("the owner plays")
    assert not story.state.is_trainer_dead


async def test_an_exchange_that_breaks_is_followed_by_one_with_another(story: Story, clock: MockClock) -> None:
    await story.meet(BOB, CAROL)
    await trio.sleep(1.5 * EXCHANGE_SECONDS)
    story.is_committed = True
    await trio.sleep(EXCHANGE_SECONDS)
    first, second = story.exchanges
    assert {first.peer, second.peer} == {BOB, CAROL}
    assert (first.round, first.deadline) == (second.round, second.deadline)
    assert story.told(STEP) == [STEP(0, second.peer, 0, 0)]
    assert SharedCounter(story.trainer.incoming).read() == (2, 0), "what the first sent is not taken for the second's"
    history = story.journal.history
    assert (history.exchanges_failed, history.exchanges_ok, history.exchanges_alone) == (1, 1, 0)
    await story.report(messages.OuterStepTaken(0))
    (record,) = story.rounds
    assert (record.partner, record.failed_partner) == (peer_id_of(second.peer), peer_id_of(first.peer))


async def test_the_verdict_of_an_exchange_that_broke_is_not_the_next_ones(story: Story, clock: MockClock) -> None:
    await story.meet(BOB, CAROL)
    await trio.sleep(EXCHANGE_SECONDS / 2)
    verdicts: list[str | None] = []

    async def screen() -> None:
        verdicts.append(await story.judge(SIZE, 0))

    with trio.move_on_after(0.1):
        await screen()
    await trio.sleep(EXCHANGE_SECONDS)
    assert len(story.exchanges) == 2
    await story.begin(screen)
    first, second = story.told(messages.Screen)
    await story.report(messages.Screened("not finite", first.number))
    assert not verdicts
    await story.report(messages.Screened("", second.number))
    assert verdicts == [None]


@pytest.mark.parametrize("seconds", [2.0, 4.0, 2 * RoundConfig().exchange_seconds])
async def test_a_contribution_that_came_too_late_to_be_judged_in_the_exchange_is_judged_after_it(
    story: Story, clock: MockClock, seconds: float
) -> None:
    """A liar chooses when its last byte comes: what is wrong with it is found, unless the trainer has other work."""
    story.is_committed, story.exchange_seconds = True, 3.0
    await story.meet(BOB)

    async def screen() -> None:
        with trio.move_on_after(3.0):
            assert await story.judge(SIZE, 0) is None

    await story.begin(screen)
    (command,) = story.told(messages.Screen)
    assert command.seconds == RoundConfig().exchange_seconds, "whenever the contribution came"
    await trio.sleep(seconds)
    await story.report(messages.Screened("", 1, clip=0.0, remark="worse", is_suspect=True))
    await trio.sleep(EXCHANGE_SECONDS)
    ended, has_answered = story.journal.history.recent_exchanges[-1], seconds < command.seconds
    assert (ended.verdict, ended.clip) == ("committed", 0.0 if has_answered else 1.0)
    assert bool(ended.late_seconds) == (not has_answered)
    assert (story.suspicions, story.partners) == ([(BOB, True)], [] if has_answered else [BOB])


@pytest.mark.parametrize("seconds", [EXCHANGE_GRACE / 2, 2 * EXCHANGE_GRACE])
async def test_who_leaves_waits_a_little_for_its_exchange(story: Story, clock: MockClock, seconds: float) -> None:
    story.exchange_seconds = seconds
    await story.meet(BOB)
    story.is_committed = seconds < EXCHANGE_GRACE
    left_at = trio.current_time()
    await story.begin(story.leave)
    await trio.sleep(EXCHANGE_GRACE + GIVE_UP_GRACE)
    if story.is_committed:
        assert story.trainer.commands[-2:] == [STEP(0, BOB, 0, 0), LAST_SAVE]
        await story.report(messages.OuterStepTaken(0))
    else:
        assert story.given_up.is_set()
        assert story.trainer.commands[-1] == LAST_SAVE
    await story.report(saved())
    assert story.has_left
    assert trio.current_time() - left_at < 2 * EXCHANGE_GRACE
    assert TRAIN(1, 0) not in story.trainer.commands

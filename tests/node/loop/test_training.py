"""The training loop with a trainer that a test controls."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from farandole.node.base.system.memory import SharedCounter, counted_size
from farandole.node.bulk.exchange_service import Judge
from farandole.node.bulk.pipe import Outgoing
from farandole.node.loop import training as training_module
from farandole.node.loop.rest_service import BY_HAND, Rest
from farandole.node.loop.training import TRAFFIC_INTERVAL, Parts, Training
from farandole.node.status.journal import Journal
from farandole.node.status.round_log import RoundRecord
from farandole.node.trainer.trainer import TrainerError
from farandole.protocol.exchange.exchange import Offer
from farandole.protocol.rounds.pairing import MAX_ROUNDS_BEHIND, MIN_RETRY, Pairing
from farandole.protocol.rounds.pairing_events import (
    ExchangeEnded,
    MessageReceived,
    PeerLost,
    PeersChanged,
    StartExchange,
    State,
)
from farandole.protocol.rounds.pairing_messages import Agree, Propose, Ready, decode_message, encode_message
from farandole.protocol.rounds.trainer_rounds import NEWS_SECONDS, LoopConfig
from farandole.protocol.rounds.training_events import Signal
from farandole.protocol.rounds.training_loop import (
    EXCHANGE_GRACE,
    GIVE_UP_GRACE,
    REST_TIMEOUT,
    TrainingLoop,
)
from farandole.protocol.run.manifest import Manifest, ModelConfig, RoundConfig
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.supervisor import MAX_CRASHES, REST_SECONDS, RESTART_DELAYS, WATCH_INTERVAL, Supervisor
from farandole.protocol.wire.identity import peer_id_of

SIZE = 12_000_000
MODEL = ModelConfig(num_layers=1, width=16, num_heads=2, hidden=32, context=16, vocabulary=256)
PREPARE = messages.Prepare(b"r" * 32, b"a" * 32, b"", messages.TrainerSettings())
PREPARED = messages.Prepared("cpu", 1, SIZE, b"l" * 32, 0, 0, 0)


EXCHANGE_SECONDS = 5.0
HUNG_SECONDS = 30.0


def with_weights_of(round_index: int) -> messages.Prepared:
    return msgspec.structs.replace(PREPARED, round=round_index)


def contributed(round_index: int) -> messages.Contributed:
    return messages.Contributed(round_index, SIZE, 8, 8, 1, 1, 8, 2.0, 1.0, 0, 0.5)


class FakeTrainer:
    """Keeps its commands, and reports what the test puts into `reports`."""

    def __init__(self, prepared: messages.Prepared) -> None:
        self.prepared, self.pid = prepared, 1
        self.outgoing, self.incoming = bytearray(counted_size(SIZE)), bytearray(counted_size(SIZE))
        self.commands: list[messages.Command] = []
        self.hangs = False
        self.num_pongs = 0
        self.reports, self._reported = trio.open_memory_channel[messages.Report | TrainerError](100)

    def tell(self, command: messages.Command) -> None:
        if not isinstance(command, messages.Ping):
            self.commands.append(command)
        elif not self.hangs:
            self.reports.send_nowait(messages.Pong())
            self.num_pongs += 1

    async def write(self) -> None:
        await trio.sleep_forever()

    async def condemn(self, reason: str) -> None:
        await self.report(TrainerError(reason))

    async def receive(self) -> messages.Report:
        report = await self._reported.receive()
        if isinstance(report, TrainerError):
            raise report
        return report

    async def report(self, *reports: messages.Report | TrainerError) -> None:
        for report in reports:
            self.reports.send_nowait(report)
        await trio.testing.wait_all_tasks_blocked()

    def num_saves(self) -> int:
        return sum(isinstance(command, messages.Save) for command in self.commands)


class Story:
    """A node without peers, its rounds, and every trainer that it has started."""

    def __init__(self, rounds: RoundConfig, max_rounds: int | None = None, checkpoint_seconds: float = 1e9) -> None:
        self.trainers: list[FakeTrainer] = []
        self.others_round = 0
        self.traffic = 1e9  # bytes of an exchange that are left
        self.rounds: list[RoundRecord] = []
        self.journal = Journal(say=lambda text: None, tell_round=self.rounds.append)
        self.peers_that_answer: set[bytes] = set()
        self.proposed_to: list[bytes] = []
        self.has_left = False
        fake: Any = SimpleNamespace(
            set_receiver=lambda *args: None,
            send_nowait=self.deliver,
            run=self.exchange,
            give_up=self.give_up,
            may_spend=lambda num_bytes: num_bytes <= self.traffic,
            is_suspected=lambda peer: False,
            current_round=lambda: self.others_round,
            partners_round=lambda: self.others_round,
            note_saved=lambda saved: self.saved.append(saved),
            partners=SimpleNamespace(note=lambda peer: None),
            announcer=SimpleNamespace(note_suspicion=lambda peer, is_suspect: None),
        )
        self.exchanges: list[StartExchange] = []
        self.outgoing: Outgoing
        self.judge: Judge
        self.num_cancelled = 0
        self.exchange_seconds = EXCHANGE_SECONDS
        self.given_up = trio.Event()
        self.prepared = PREPARED
        self.saved: list[messages.Saved] = []
        self.is_committed = False
        manifest = Manifest("tiny", MODEL, rounds=rounds)
        self.pairing = Pairing(b"a" * 32, manifest.rounds, random.Random(1))
        self.batch_size = manifest.inner.batch_size
        self.supervisor = Supervisor(self.batch_size)
        self.rest = Rest()
        self.config = LoopConfig(b"r" * 32, manifest, max_rounds, checkpoint_seconds, 0, HUNG_SECONDS)
        self.training = Training(
            TrainingLoop(self.config, self.pairing, self.supervisor),
            fake,
            fake,
            self.journal,
            self.rest,
            Parts(fake, fake, fake, trio.Event()),
        )

    async def prepare(self) -> messages.Prepare:
        await trio.lowlevel.checkpoint()
        return PREPARE

    @asynccontextmanager
    async def open_trainer(
        self, prepare: object, log: object, on_preparing: object, on_started: Callable[[int], None]
    ) -> AsyncIterator[FakeTrainer]:
        self.trainers.append(FakeTrainer(self.prepared))
        on_started(self.trainers[-1].pid)
        yield self.trainers[-1]

    @property
    def phase(self) -> str:
        return self.journal.state.phase

    def deliver(self, peer: bytes, protocol: str, payload: bytes) -> None:
        """Deliver a message, as a messenger with too many streams: it reports the message lost, but for some peers."""
        if isinstance(decode_message(payload), Propose):
            self.proposed_to.append(peer)
        if peer not in self.peers_that_answer:
            self.training.handle(PeerLost(peer))
            return
        message = decode_message(payload)
        if isinstance(message, Propose):
            for answer in (Agree(message.session, 0.0), Ready(message.session)):
                self.training.handle(MessageReceived(peer, encode_message(answer)))

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
        is_broken = not self.is_committed
        return ExchangeEnded(
            start.session, start.peer, self.is_committed, is_broken, round=start.round, seconds=1.0, path="stream"
        )

    def give_up(self, reason: str) -> None:
        self.given_up.set()

    async def meet(self, peer: bytes) -> None:
        """Begin the exchange with this peer when round 0's contribution is ready; the peer answers nothing more."""
        self.know(peer)
        await self.trainers[-1].report(contributed(0))
        self.peers_that_answer = set()
        assert len(self.exchanges) == 1

    async def set_rest(self, words: str, reason: str = BY_HAND) -> None:
        """Begin to rest, or rest no more (empty ``words``), and let the loop go on."""
        self.rest.set(reason, words)
        await trio.testing.wait_all_tasks_blocked()

    def know(self, *peers: bytes) -> None:
        """Know these peers, all of which answer."""
        self.peers_that_answer = set(peers)
        self.training.handle(PeersChanged(frozenset(peers)))

    async def leave(self) -> None:
        await self.training.leave()
        self.has_left = True

    async def play_round(self) -> None:
        index = self.journal.state.round
        await self.trainers[-1].report(contributed(index), messages.OuterStepTaken(index))


@pytest.fixture
def rounds_config() -> RoundConfig:
    return RoundConfig()


@pytest.fixture
def checkpoint_seconds() -> float:
    return 1e9


@pytest.fixture
async def story(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, rounds_config: RoundConfig, checkpoint_seconds: float
) -> Story:
    story = Story(rounds_config, 3 if rounds_config.overlap else None, checkpoint_seconds)
    monkeypatch.setattr(training_module, "open_trainer", story.open_trainer)
    nursery.start_soon(story.training.run, story.prepare)
    await trio.testing.wait_all_tasks_blocked()
    return story


async def test_a_message_that_is_lost_at_once_leaves_the_right_timer(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    story.training.handle(PeersChanged(frozenset({b"b" * 32})))
    await story.trainers[0].report(contributed(0))
    assert story.proposed_to == [b"b" * 32]
    await trio.sleep(1.1 * MIN_RETRY)
    assert story.proposed_to == 2 * [b"b" * 32]


def saved(problem: str = "") -> messages.Saved:
    return messages.Saved(0, 0, 0, "checkpoint", 4, problem=problem)


async def test_a_round_for_which_there_is_no_traffic_is_not_exchanged(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    story.know(b"b" * 32)
    story.traffic = 2 * SIZE - 1
    await trio.sleep(2 * TRAFFIC_INTERVAL)
    await story.play_round()
    assert not story.exchanges
    assert story.journal.history.recent_exchanges[-1].verdict == "alone: this node saves its traffic"

    story.traffic = 2 * SIZE
    await trio.sleep(2 * TRAFFIC_INTERVAL)
    await story.trainers[-1].report(contributed(1))
    assert len(story.exchanges) == 1


async def test_what_the_loop_publishes_leaves_the_rest_of_the_state_alone(story: Story) -> None:
    story.journal.update(stage=3, isolation="cut off")
    await story.play_round()
    state = story.journal.state
    assert (state.trainer_pid, state.phase, state.stage, state.isolation) == (1, "training", 3, "cut off")
    assert (state.round, state.tokens) == (1, 8)
    assert state.round_since > 0


async def test_a_thousand_newcomers_ask_for_one_checkpoint(story: Story) -> None:
    (trainer,) = story.trainers
    for _ in range(1_000):
        story.training.handle(Signal.SAVE)
    await trio.testing.wait_all_tasks_blocked()
    assert trainer.num_saves() == 1
    await trainer.report(saved("the disk is full"))
    story.training.handle(Signal.SAVE)
    await trio.testing.wait_all_tasks_blocked()
    assert trainer.num_saves() == 2


@pytest.mark.parametrize("rounds_config", [RoundConfig(round_seconds=60.0, exchange_seconds=20.0)])
async def test_an_owner_is_told_once_that_its_steps_are_too_long_for_the_runs_exchanges(story: Story) -> None:
    fast = msgspec.structs.replace(contributed(0), inner_steps_this_round=3, busy_seconds=15.0)
    slow = msgspec.structs.replace(contributed(1), inner_steps_this_round=3, busy_seconds=15.5)
    await story.trainers[-1].report(fast, messages.OuterStepTaken(0))
    assert not any("inner step" in warning for warning in story.journal.warnings)
    await story.trainers[-1].report(slow, messages.OuterStepTaken(1), msgspec.structs.replace(slow, round=2))
    [warning] = (warning for warning in story.journal.warnings if "inner step" in warning)
    assert "partner waits 5.0 s" in warning


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9])
async def test_what_was_never_saved_is_saved_and_a_save_that_is_due_while_one_is_written_comes_after_it(
    story: Story, checkpoint_seconds: float
) -> None:
    (trainer,) = story.trainers
    await story.play_round()
    await story.play_round()
    assert trainer.num_saves() == 1
    for _ in range(2):
        await trainer.report(saved())
        assert trainer.num_saves() == (2 if checkpoint_seconds == 0.0 else 1)


async def test_what_a_trainer_goes_on_from_is_told_as_if_it_had_saved_it(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    story.prepared = msgspec.structs.replace(PREPARED, round=7, resumed=saved(), problem="round 8 is damaged")
    await story.trainers[0].report(TrainerError("the disk went away"))
    await trio.sleep(RESTART_DELAYS[0] + 1)
    assert len(story.trainers) == 2
    assert story.saved == [saved()]
    assert story.journal.warnings[-1] == "going on with an older checkpoint: round 8 is damaged"


async def test_who_leaves_waits_for_the_checkpoint_of_its_leaving(story: Story, nursery: trio.Nursery) -> None:
    (trainer,) = story.trainers
    story.training.handle(Signal.SAVE)
    nursery.start_soon(story.leave)
    await trio.testing.wait_all_tasks_blocked()
    assert trainer.num_saves() == 2
    await trainer.report(saved())
    assert not story.has_left
    await trainer.report(saved())
    assert story.has_left
    assert trainer.commands[-1] == messages.Save(is_last=True)


async def test_who_rests_saves_and_has_no_trainer_until_the_rest_is_over(story: Story) -> None:
    (trainer,) = story.trainers
    await story.play_round()
    await trainer.report(saved())
    await story.set_rest("the owner plays")
    assert trainer.commands[-1] == messages.Save(is_last=True)
    await trainer.report(saved())
    assert (story.journal.state.phase, story.journal.state.phase_detail, story.journal.state.trainer_pid) == (
        "paused",
        "the owner plays",
        None,
    )
    assert story.pairing.state is State.AWAY

    story.rest.set("quiet hours", "until 07:00")
    await story.set_rest("")
    assert (story.journal.state.phase_detail, len(story.trainers)) == ("until 07:00", 1)

    story.others_round = 9
    await story.set_rest("", "quiet hours")
    assert len(story.trainers) == 2
    assert story.journal.state.round == 9
    assert story.journal.state.phase == "training"


async def test_who_wants_his_machine_back_does_not_wait_for_a_large_save(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    story.rest.set(BY_HAND, "the owner plays")
    await trio.sleep(REST_TIMEOUT + 1)
    assert story.journal.state.phase == "paused"
    await story.set_rest("")
    assert len(story.trainers) == 2


async def test_who_leaves_while_the_rest_begins_is_gone_with_its_checkpoint(
    story: Story, nursery: trio.Nursery
) -> None:
    (trainer,) = story.trainers
    await story.set_rest("the owner plays")
    nursery.start_soon(story.leave)
    await trio.testing.wait_all_tasks_blocked()
    assert not story.has_left
    await trainer.report(saved())
    assert story.has_left
    assert trainer.num_saves() == 1


async def test_who_wants_his_machine_back_does_not_wait_for_an_exchange_and_loses_no_round_that_is_over(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    (trainer,) = story.trainers
    story.know(BOB)
    story.exchange_seconds = 10 * REST_TIMEOUT
    await trainer.report(contributed(0))
    began_at = trio.current_time()
    await story.set_rest("the owner plays")
    assert story.given_up.is_set()
    assert messages.Save(is_last=True) in trainer.commands
    await trainer.report(saved())
    assert (story.phase, story.saved, trio.current_time()) == ("paused", [saved()], began_at)


async def test_who_resumes_while_the_trainer_still_saves_trains_again(story: Story) -> None:
    (trainer,) = story.trainers
    await story.set_rest("the owner plays")
    await story.set_rest("")
    await trainer.report(saved())
    assert len(story.trainers) == 2
    assert story.phase == "training"
    await story.play_round()
    assert story.journal.state.round == 1


async def test_a_reason_to_rest_that_comes_as_another_goes_is_kept(story: Story, nursery: trio.Nursery) -> None:
    """The order in which trio wakes the waiting tasks does not matter."""

    async def replace_reason() -> None:
        await story.rest.changed()
        story.rest.set("quiet hours", "until 07:00")

    for _ in range(40):
        await story.set_rest("the owner plays")
        if story.phase != "paused":
            await story.trainers[-1].report(saved())
        nursery.start_soon(replace_reason)
        await trio.testing.wait_all_tasks_blocked()
        await story.set_rest("")
        if story.phase != "paused":
            await story.trainers[-1].report(saved())
        assert story.phase == "paused"
        await story.set_rest("", "quiet hours")
        assert story.phase == "training"


async def test_a_trainer_that_dies_again_and_again_leaves_the_node_at_rest_until_its_owner_tries_at_once(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    for _ in range(MAX_CRASHES):
        await story.trainers[-1].report(TrainerError("killed by signal 11"))
        await trio.sleep(1.1 * RESTART_DELAYS[-1])
    assert (len(story.trainers), story.phase, story.pairing.state) == (MAX_CRASHES, "failed", State.AWAY)
    assert "signal 11" in story.journal.state.phase_detail
    await trio.sleep(REST_SECONDS)
    assert len(story.trainers) == MAX_CRASHES + 1
    for _ in range(MAX_CRASHES):
        await story.trainers[-1].report(TrainerError("no driver"))
        await trio.sleep(RESTART_DELAYS[-1] + 1)
    await story.set_rest("the owner mends the driver")
    assert story.phase == "paused"
    resumed_at = trio.current_time()
    await story.set_rest("")
    assert (len(story.trainers), trio.current_time()) == (2 * MAX_CRASHES + 1, resumed_at)


async def test_who_rests_when_the_trainer_is_only_starting_starts_none(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def never_ready(
        prepare: object, log: object, on_preparing: object, on_started: Callable[[int], None]
    ) -> AsyncIterator[FakeTrainer]:
        on_started(42)
        await trio.sleep_forever()
        yield story.trainers[0]

    monkeypatch.setattr(training_module, "open_trainer", never_ready)
    story.training.handle(Signal.RESTART)
    await trio.testing.wait_all_tasks_blocked()
    assert [story.journal.state.trainer_pid] == [42]  # its use of the machine does not count as another program's
    await story.set_rest("the owner plays")
    assert (story.phase, story.journal.state.trainer_pid) == ("paused", None)


async def test_who_slept_takes_newer_weights_and_who_is_slow_does_not(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    for _ in range(3 * MAX_ROUNDS_BEHIND):
        story.others_round += 3
        await trio.sleep(NEWS_SECONDS)
        await story.play_round()
    assert len(story.trainers) == 1
    story.others_round += MAX_ROUNDS_BEHIND + 2
    story.prepared = with_weights_of(story.others_round - 2)
    await story.play_round()
    assert len(story.trainers) == 2
    assert story.journal.state.round == story.others_round


async def test_a_round_that_others_claim_is_taken_up_only_with_weights_of_about_that_round(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    await story.play_round()
    story.others_round = 100_000
    story.prepared = with_weights_of(1)
    await story.play_round()
    assert len(story.trainers) == 2
    assert story.journal.state.round == 1
    story.others_round = 0  # none of them is believed any more
    await story.play_round()
    assert len(story.trainers) == 2
    story.others_round = 100_000
    await story.play_round()
    assert len(story.trainers) == 2, "that was looked into when this trainer began"


async def test_who_slept_and_learns_bit_by_bit_how_long_takes_newer_weights_too(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    await story.play_round()
    for _ in range(2):
        story.others_round += MAX_ROUNDS_BEHIND // 2 + 3
        story.prepared = with_weights_of(story.others_round)
        await trio.sleep(NEWS_SECONDS / 10)
        await story.play_round()
    assert len(story.trainers) == 2
    assert story.journal.state.round == story.others_round


OVERLAPPED = RoundConfig(overlap=True)
TRAIN, ALONE = messages.Train, messages.TakeOuterStep


def without_saves(trainer: FakeTrainer) -> list[messages.Command]:
    return [command for command in trainer.commands if not isinstance(command, messages.Save)]


@pytest.mark.parametrize("rounds_config", [OVERLAPPED])
async def test_the_next_round_begins_before_the_outer_step(story: Story) -> None:
    (trainer,) = story.trainers
    await trainer.report(contributed(0))
    assert without_saves(trainer) == [TRAIN(0, 0), TRAIN(1, 0), ALONE(0)]
    assert story.pairing.round == story.journal.state.round == 1
    await trainer.report(messages.OuterStepTaken(0, late_steps=7), contributed(1))
    assert without_saves(trainer)[3:] == [TRAIN(2, 0), ALONE(1)]
    assert story.journal.state.late_steps == 7
    await trainer.report(messages.OuterStepTaken(1), contributed(2))
    assert without_saves(trainer)[5:] == [ALONE(2)]  # no round is left to overlap with
    await trainer.report(messages.OuterStepTaken(2))
    assert story.journal.state.phase == "finished"


@pytest.mark.parametrize("rounds_config", [OVERLAPPED])
async def test_an_overlapped_exchange_that_fails_leaves_the_next_round_alone(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    (trainer,) = story.trainers
    await story.meet(BOB)
    commands = [TRAIN(0, 0), TRAIN(1, 0)]
    assert without_saves(trainer) == commands
    assert story.pairing.round == 1  # the next partner is sought while the exchange goes on
    assert story.pairing.state is State.SEEKING
    await trio.sleep(2 * EXCHANGE_SECONDS)
    assert [start.round for start in story.exchanges] == [0]
    assert without_saves(trainer) == [*commands, ALONE(0)]
    assert story.pairing.round == 1
    assert story.journal.history.exchanges_failed == 1


async def test_what_is_encoded_is_sent_and_what_comes_is_taken_in(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    (trainer,) = story.trainers
    await story.meet(BOB)
    assert story.outgoing.num_ready == 0
    encoded, arrived = SharedCounter(trainer.outgoing), SharedCounter(trainer.incoming)
    encoded.store(7, SIZE)
    assert story.outgoing.num_ready == 0, "that was another round's"
    encoded.store(0, 5)
    assert (story.outgoing.num_ready, story.outgoing.digest) == (5, None)
    await trainer.report(messages.Encoded(0, b"h" * 32))
    assert (story.outgoing.num_ready, story.outgoing.digest) == (SIZE, b"h" * 32)
    for num_received in range(0, SIZE + 1, SIZE // 10):
        story.on_advance(num_received)
        assert arrived.read() == (1, num_received)
    await trio.sleep(2 * EXCHANGE_SECONDS)
    assert without_saves(trainer) == [TRAIN(0, 0), ALONE(0)]


@pytest.mark.parametrize("rounds_config", [RoundConfig(), OVERLAPPED])
async def test_a_trainer_that_dies_while_it_encodes_ends_the_exchange(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    (trainer,) = story.trainers
    await story.meet(BOB)
    SharedCounter(trainer.outgoing).store(0, 5)
    await trainer.report(TrainerError("killed"))
    assert story.num_cancelled == 1
    assert not any(isinstance(command, messages.TakeOuterStep) for command in trainer.commands)
    await trio.sleep(2 * RESTART_DELAYS[0])
    assert len(story.trainers) == 2
    assert story.trainers[1].commands == [TRAIN(0, 0)], "from the last checkpoint"


async def test_a_trainer_without_memory_is_followed_by_one_that_takes_less_at_a_time(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    await story.trainers[0].report(TrainerError("out of memory", "memory"))
    await trio.sleep(2 * RESTART_DELAYS[0])
    assert len(story.trainers) == 2
    assert story.supervisor.microbatch == story.batch_size // 2


async def test_a_trainer_that_was_replaced_is_dead_no_more(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    async def die() -> None:
        await story.trainers[-1].report(TrainerError("killed"))
        assert (story.journal.state.phase, story.journal.state.is_trainer_dead) == ("preparing", True)

    await die()
    await trio.sleep(RESTART_DELAYS[0] + 1)
    assert (story.journal.state.trainer_restarts, story.journal.state.is_trainer_dead) == (1, False)
    await die()
    await story.set_rest("the owner plays")
    assert not story.journal.state.is_trainer_dead


BOB, CAROL = b"b" * 32, b"c" * 32


async def test_an_exchange_that_breaks_is_followed_by_one_with_another_and_one_outer_step(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    (trainer,) = story.trainers
    story.know(BOB, CAROL)
    await trainer.report(contributed(0))
    await trio.sleep(EXCHANGE_SECONDS / 2)
    story.peers_that_answer -= {story.exchanges[0].peer}
    await trio.sleep(EXCHANGE_SECONDS)
    story.is_committed = True
    await trio.sleep(EXCHANGE_SECONDS)
    first, second = story.exchanges
    assert {first.peer, second.peer} == {BOB, CAROL}
    assert (first.round, first.deadline) == (second.round, second.deadline)
    steps = [command for command in trainer.commands if isinstance(command, messages.TakeOuterStep)]
    assert steps == [messages.TakeOuterStep(0, second.peer, 0, 0)]
    assert SharedCounter(trainer.incoming).read() == (2, 0), "what the first one sent is not taken for the second's"
    assert (
        story.journal.history.exchanges_failed,
        story.journal.history.exchanges_ok,
        story.journal.history.exchanges_alone,
    ) == (1, 1, 0)
    await trainer.report(messages.OuterStepTaken(0))
    (record,) = story.rounds
    assert (record.partner, record.failed_partner) == (peer_id_of(second.peer), peer_id_of(first.peer))


async def test_the_verdict_of_an_exchange_that_broke_is_not_taken_for_the_next_ones(
    story: Story, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    (trainer,) = story.trainers
    story.know(BOB, CAROL)
    await trainer.report(contributed(0))
    await trio.sleep(EXCHANGE_SECONDS / 2)
    verdicts: list[str | None] = []

    async def screen() -> None:
        verdicts.append(await story.judge(SIZE, 0, trio.current_time() + 1.0))

    with trio.move_on_after(0.1):
        await screen()
    story.peers_that_answer -= {story.exchanges[0].peer}
    await trio.sleep(EXCHANGE_SECONDS)
    assert len(story.exchanges) == 2
    nursery.start_soon(screen)
    await trio.testing.wait_all_tasks_blocked()
    first, second = [command for command in trainer.commands if isinstance(command, messages.Screen)]
    await trainer.report(messages.Screened("not finite", first.number))
    assert not verdicts
    await trainer.report(messages.Screened("", second.number))
    assert verdicts == [None]


@pytest.mark.parametrize("answers", [True, False])
async def test_a_trainer_that_judges_too_slowly_costs_no_exchange_and_is_reported(
    story: Story, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, answers: bool
) -> None:
    """It reports the seconds that it would take, or is in the middle of other work."""
    (trainer,) = story.trainers
    story.is_committed = True
    await story.meet(BOB)
    late = messages.Screened("", 1, clip=0.5, late_seconds=4.0)

    async def screen() -> None:
        with trio.move_on_after(3.0):
            assert await story.judge(SIZE, 0, trio.current_time() + 3.0) is None

    nursery.start_soon(screen)
    await trio.testing.wait_all_tasks_blocked()
    (command,) = (command for command in trainer.commands if isinstance(command, messages.Screen))
    assert command.by < math.inf
    if answers:
        await trainer.report(late)
    await trio.sleep(EXCHANGE_SECONDS + 1.0)
    ended = story.journal.history.recent_exchanges[-1]
    assert (ended.verdict, ended.clip) == ("committed", 0.5)
    assert ended.late_seconds == pytest.approx(4.0 if answers else 3.0)


async def test_a_trainer_that_hangs_is_followed_by_another(
    story: Story, autojump_clock: trio.testing.MockClock
) -> None:
    (trainer,) = story.trainers
    await trio.sleep(10 * HUNG_SECONDS)
    assert trainer.num_pongs > 10
    assert len(story.trainers) == 1
    trainer.hangs = True
    await trio.sleep(HUNG_SECONDS + 2 * RESTART_DELAYS[0] + 2 * WATCH_INTERVAL)
    assert len(story.trainers) == 2
    assert "no sign of life for 30 s" in story.journal.warnings[-1]


@pytest.mark.parametrize("seconds", [EXCHANGE_GRACE / 2, 2 * EXCHANGE_GRACE])
async def test_who_leaves_waits_a_little_for_its_exchange_and_saves_what_came_of_it(
    story: Story, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, seconds: float
) -> None:
    (trainer,) = story.trainers
    story.know(BOB)
    story.exchange_seconds = seconds
    await trainer.report(contributed(0))
    story.is_committed = seconds < EXCHANGE_GRACE
    left_at = trio.current_time()
    nursery.start_soon(story.leave)
    await trio.sleep(EXCHANGE_GRACE + GIVE_UP_GRACE)
    if story.is_committed:
        assert trainer.commands[-2:] == [messages.TakeOuterStep(0, BOB, 0, 0), messages.Save(is_last=True)]
        await trainer.report(messages.OuterStepTaken(0))
    else:
        assert story.given_up.is_set()
        assert trainer.commands[-1] == messages.Save(is_last=True)
    await trainer.report(saved())
    assert story.has_left
    assert trio.current_time() - left_at < 2 * EXCHANGE_GRACE
    assert not any(command == TRAIN(1, 0) for command in trainer.commands)

"""Evaluates the run at its marks, where the owner wants it, and keeps all members' reports.

`farandole.protocol.evaluation.evaluations` decides which marks this node evaluates. Training goes on: the newest
checkpoint's file is evaluated in another process. Whatever goes wrong there costs one mark. While the node rests,
nothing is evaluated.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Protocol

import trio

from farandole.protocol.evaluation.evaluation_messages import EvaluationAnswer, EvaluationOrder
from farandole.protocol.evaluation.evaluations import (
    MAX_REPORTS,
    Ended,
    Evaluate,
    Evaluations,
    Event,
    Looked,
    curve_of,
    is_plausible,
    report_of,
)
from farandole.protocol.run.manifest import EvaluationConfig
from farandole.protocol.state.entries import RULES, Evaluator, Kind, Payload
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.identity import peer_id_of

from ..base.driver import Driver
from ..base.nurseries import open_service_nursery
from ..base.settings import NodeSettings
from ..status.evaluation_log import EvaluationRecord, read_evaluations
from ..status.journal import Journal
from ..status.status import EvaluationStatus
from ..store.folder import CheckpointFolder, saved_round
from .evaluation_process import EvaluationFailedError, evaluate_in_process
from .pause.pause import Rest

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 2.0
# An entry lives an hour: three may be lost.
RENEW_SECONDS: Final = RULES[Kind.EVALUATOR].ttl / 4
# Newest marks whose reports are held in memory; older ones are in the file, and are not heard again.
MAX_MARKS: Final = 64


class Publisher(Protocol):
    """The run state and its writer: the part of `farandole.node.state.gossip.GossipService` that is used here."""

    state: RunState

    async def publish(self, kind: Kind, index: int, payload: Payload) -> None:
        """Publish an entry to the run."""


class Company(Protocol):
    """The other members: the part of `farandole.node.state.membership.Membership` that is used here."""

    @property
    def reached(self) -> frozenset[bytes]:
        """Return the live members that this node has reached."""

    def current_round(self) -> int:
        """Return the round that the others are in."""

    def awaits_contact(self) -> bool:
        """Return whether none of the others was reached yet."""


class EvaluationKeeper:
    """A node's part in the evaluations of its run."""

    def __init__(
        self,
        config: EvaluationConfig,
        author: bytes,
        gossip: Publisher,
        company: Company,
        journal: Journal,
        rest: Rest,
        settings: NodeSettings,
    ) -> None:
        self._config = config
        self._author = author
        self._gossip = gossip
        self._company = company
        self._journal = journal
        self._rest = rest
        self._settings = settings
        self._run_id = gossip.state.run_id
        self._known: dict[int, dict[str, EvaluationRecord]] = {}
        """Mark -> peer id -> its report: at most `MAX_REPORTS` of each of the last `MAX_MARKS` marks."""
        self._driver = Driver[Event, Evaluate](self._begin)
        # The machine asks for the next evaluation after the end of the last.
        self._to_evaluate, self._marks = trio.open_memory_channel[int](1)

    def status(self) -> list[EvaluationStatus]:
        """Return the figures of the newest mark that was reported, those of most members first."""
        if not self._known:
            return []
        newest = self._known[max(self._known)]
        points = curve_of(record.report for record in newest.values())
        return [
            EvaluationStatus(
                each.mark, each.task, each.metric, each.value, each.stderr, each.lowest, each.highest, [*each.authors]
            )
            for each in sorted(points, key=lambda point: -len(point.authors))
        ]

    async def run(self) -> None:
        """Keep reports, and evaluate where the owner wants it, until cancelled."""
        await self._remember()
        async with trio.open_nursery() as nursery:
            if self._settings.evaluate:
                machine = Evaluations(self._run_id, self._author, self._config.every_rounds, self._config.max_seconds)
                self._driver.begin(machine)
                nursery.start_soon(self._evaluate_marks)
            while True:
                self._hear()
                if self._settings.evaluate:
                    await self._look()
                await trio.sleep(LOOK_SECONDS)

    # Reports

    async def _remember(self) -> None:
        """Read the reports that earlier lives have kept."""
        try:
            records = await trio.to_thread.run_sync(read_evaluations, self._settings.evaluations)
        except OSError as error:
            logger.warning("earlier evaluations cannot be read: %s", error)
            return
        for record in records:
            if record.run_id == self._run_id.hex():
                reports = self._reports_of(record.evaluation.mark)
                if reports is not None:
                    reports.setdefault(record.author, record)

    def _hear(self) -> None:
        """Keep each member's first report of each mark."""
        current = max(self._journal.state.round, self._company.current_round())
        for entry in self._gossip.state.entries(Kind.EVALUATION):
            evaluation, author = entry.payload, peer_id_of(entry.author)
            if not is_plausible(evaluation, self._config.every_rounds, current):
                continue
            reports = self._reports_of(evaluation.mark)
            if reports is not None and author not in reports and len(reports) < MAX_REPORTS:
                reports[author] = EvaluationRecord(self._journal.clock(), self._run_id.hex(), author, evaluation)
                self._journal.record_evaluation(reports[author], is_own=entry.author == self._author)

    def _reports_of(self, mark: int) -> dict[str, EvaluationRecord] | None:
        """Return the known reports of a mark, to be added to; None for a mark before all that are held."""
        if mark not in self._known and len(self._known) == MAX_MARKS:
            if mark < min(self._known):
                return None
            del self._known[min(self._known)]
        return self._known.setdefault(mark, {})

    # Decisions

    async def _look(self) -> None:
        """Show the state machine how things are."""
        newest = await trio.to_thread.run_sync(_newest_round, self._settings.checkpoints)
        state, reached = self._gossip.state, self._company.reached
        evaluators = {peer: payload.mark for peer in reached if (payload := state.payload(peer, Evaluator)) is not None}
        reported = frozenset(
            (entry.author, entry.payload.mark)
            for entry in state.entries(Kind.EVALUATION)
            if entry.author in evaluators or entry.author == self._author
        )
        is_free = not (self._rest.is_on or self._company.awaits_contact())
        self._driver.handle(Looked(newest, evaluators, reported, is_free))

    def _begin(self, wanted: Evaluate) -> None:
        self._to_evaluate.send_nowait(wanted.mark)

    # Work

    async def _evaluate_marks(self) -> None:
        """Evaluate the marks that this node takes, one after the other."""
        while True:
            async with self._holding(0):
                mark = await self._marks.receive()
            async with self._holding(mark):
                await self._evaluate(mark)
            self._driver.handle(Ended())

    @contextlib.asynccontextmanager
    async def _holding(self, mark: int) -> AsyncIterator[None]:
        """Have the run know, while the block runs, that this node evaluates, and which mark it has leased, or 0."""

        async def renew() -> None:
            while True:
                await trio.sleep(RENEW_SECONDS)
                await self._gossip.publish(Kind.EVALUATOR, 0, Evaluator(mark))

        await self._gossip.publish(Kind.EVALUATOR, 0, Evaluator(mark))
        async with open_service_nursery() as nursery:
            nursery.start_soon(renew)
            yield

    async def _evaluate(self, mark: int) -> None:
        """Evaluate and report, or log why not. The report is published before the lease ends, or that would count as a
        failure.
        """
        self._journal.note(f"evaluating the newest checkpoint, for round {mark}")
        try:
            answer = await self._measure()
            if answer.round < mark:
                raise EvaluationFailedError(f"only a checkpoint of round {answer.round} can be read")
            report = report_of(mark, answer.round, answer.figures, self._config.tasks)
            if not report.figures:
                raise EvaluationFailedError("no figure of these tasks can be published")
        except EvaluationFailedError as error:
            self._journal.warn(f"round {mark} is not evaluated by this node: {error}")
            return
        slot = mark // self._config.every_rounds % RULES[Kind.EVALUATION].slots
        await self._gossip.publish(Kind.EVALUATION, slot, report)

    async def _measure(self) -> EvaluationAnswer:
        """Evaluate within the run's time, and until this node rests. Raises `EvaluationFailedError`."""
        config, settings = self._config, self._settings
        order = EvaluationOrder(
            home=str(settings.home.absolute()),
            tasks=config.tasks,
            limit=config.limit or None,
            num_fewshot=config.num_fewshot,
            include=None if settings.evaluate_include is None else str(settings.evaluate_include),
            tokenizer=None if settings.tokenizer is None else str(settings.tokenizer),
            allow_model=tuple(settings.allow_model),
            device=settings.evaluate_device,
        )
        answer, reason = None, f"it took longer than the run's {config.max_seconds:g} s"

        async def stop_at_rest(scope: trio.CancelScope) -> None:
            nonlocal reason
            while not self._rest.is_on:
                await self._rest.changed()
            reason = f"this node rests: {self._rest.words}"
            scope.cancel()

        async with open_service_nursery() as nursery:
            with trio.move_on_after(config.max_seconds) as scope:
                nursery.start_soon(stop_at_rest, scope)
                answer = await evaluate_in_process(order)
        if answer is None:
            raise EvaluationFailedError(reason)
        return answer


def _newest_round(checkpoints: Path) -> int:
    """Return the round of the newest checkpoint of a whole model; 0 if there is none that can be read."""
    rounds = (saved_round(path) for path in CheckpointFolder(checkpoints, 0).files())
    return next((round_index for round_index in rounds if round_index is not None), 0)

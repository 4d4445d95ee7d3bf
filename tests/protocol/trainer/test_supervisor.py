from __future__ import annotations

import math

import pytest

from farandole.protocol.trainer.supervisor import (
    FIRST_SECONDS,
    HEALTHY_SECONDS,
    HUNG_STEPS,
    MAX_CRASHES,
    MAX_TURN,
    REST_SECONDS,
    RESTART_DELAYS,
    WATCH_INTERVAL,
    Supervisor,
    Verdict,
    Watchdog,
)
from farandole.protocol.trainer.trainer_messages import Cause

Died = tuple[str, Cause]
CRASH: Died = ("the trainer process was killed by signal 11 (SIGSEGV)", "fault")
NO_MEMORY: Died = ("the trainer is out of memory", "memory")


@pytest.mark.parametrize(("batch_size", "sizes"), [(16, [8, 4, 2, 1]), (5, [3, 2, 1])])
def test_out_of_memory_halves_what_is_taken_at_a_time_until_it_is_one(batch_size: int, sizes: list[int]) -> None:
    supervisor = Supervisor(batch_size)
    for size in sizes:
        verdict = supervisor.judge(*NO_MEMORY, lived=3.0)
        assert supervisor.microbatch == size
        assert verdict.delay == RESTART_DELAYS[0]
        assert f"{size} of a batch's {batch_size} sequences" in verdict.words
    verdict = supervisor.judge(*NO_MEMORY, lived=3.0)
    assert verdict.delay == REST_SECONDS
    assert "Close other programs" in verdict.words
    assert supervisor.microbatch == 1


def test_a_stage_is_not_halved_and_names_the_settings_that_help() -> None:
    supervisor = Supervisor(16, is_cut=True)
    verdict = supervisor.judge(*NO_MEMORY, lived=3.0)
    assert supervisor.microbatch == 0
    assert "pipeline.recompute" in verdict.words
    assert "pipeline.in_flight" in verdict.words


def test_crashes_are_waited_out_ever_longer_and_then_the_node_rests() -> None:
    supervisor = Supervisor(16)
    for life in range(2):
        delays = [supervisor.judge(*CRASH, lived=1.0).delay for _ in range(MAX_CRASHES - 1)]
        assert delays == [*RESTART_DELAYS, RESTART_DELAYS[-1]][: MAX_CRASHES - 1], life
        verdict = supervisor.judge(*CRASH, lived=1.0)
        assert verdict.delay == REST_SECONDS
        assert "SIGSEGV" in verdict.words
        assert "farandole resume" in verdict.words


def test_a_month_of_crashes_with_healthy_lives_between_them_never_makes_it_rest() -> None:
    supervisor = Supervisor(16)
    for _ in range(1_000):
        assert supervisor.judge(*CRASH, lived=HEALTHY_SECONDS + 1).delay == RESTART_DELAYS[0]


def test_where_the_model_is_cut_a_node_that_cannot_train_leaves_its_stage_to_others() -> None:
    supervisor = Supervisor(16, is_cut=True)
    for _ in range(MAX_CRASHES - 1):
        assert supervisor.judge(*CRASH, lived=None).delay < REST_SECONDS
    verdict = supervisor.judge(*CRASH, lived=None)
    assert verdict.delay == math.inf
    assert "leaving" in verdict.words


def test_what_cannot_be_set_up_ends_a_node_that_has_just_begun_and_no_other() -> None:
    no_text: Died = ("there is no text at /media/disk", "setup")
    assert Supervisor(16).judge(*no_text, lived=None) == Verdict("there is no text at /media/disk")
    supervisor = Supervisor(16)
    supervisor.judge(*CRASH, lived=1.0)
    assert supervisor.judge(*no_text, lived=None).delay < math.inf


def test_a_peers_unfit_weights_are_no_crashes() -> None:
    supervisor = Supervisor(16)
    for _ in range(10 * MAX_CRASHES):
        verdict = supervisor.judge("a peer's weights are unfit", "weights", lived=None)
        assert verdict.delay == RESTART_DELAYS[0]


LEAST = 60.0


def wait(watchdog: Watchdog, seconds: float) -> None:
    for _ in range(int(seconds / WATCH_INTERVAL)):
        watchdog.pass_time(WATCH_INTERVAL)


def asked(*step_seconds: float) -> Watchdog:
    """Return the watchdog of a trainer that has answered after each of these times, and is asked again."""
    watchdog = Watchdog(LEAST)
    watchdog.begin()
    for seconds in step_seconds:
        watchdog.ask()
        wait(watchdog, seconds)
        watchdog.hear()
    watchdog.ask()
    return watchdog


@pytest.mark.parametrize(("step_seconds", "limit"), [((), FIRST_SECONDS), ((1.0,), LEAST), ((1.0, 10.0), 200.0)])
def test_silence_is_measured_by_the_trainers_own_inner_steps(step_seconds: tuple[float, ...], limit: float) -> None:
    assert HUNG_STEPS == 20.0
    watchdog = asked(*step_seconds)
    wait(watchdog, limit)
    assert not watchdog.is_hung
    wait(watchdog, 2.0)
    assert watchdog.is_hung


def test_a_trainer_that_is_not_asked_may_be_silent_and_the_next_begins_with_what_is_known_of_inner_steps() -> None:
    watchdog = asked(1.0)
    watchdog.hear()
    wait(watchdog, 10 * LEAST)
    assert not watchdog.is_hung
    watchdog = asked(10.0)
    wait(watchdog, 1_000.0)
    watchdog.begin()
    assert not watchdog.is_hung
    assert watchdog.limit == 200.0


def test_a_machine_that_stood_still_is_not_the_trainers_fault() -> None:
    watchdog = asked(1.0)
    for _ in range(5):
        watchdog.pass_time(3_600.0)
    assert not watchdog.is_hung
    wait(watchdog, LEAST - 5 * MAX_TURN)
    assert not watchdog.is_hung
    wait(watchdog, 2.0)
    assert watchdog.is_hung

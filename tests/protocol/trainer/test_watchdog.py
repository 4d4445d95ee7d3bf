from __future__ import annotations

import pytest

from farandole.protocol.trainer.supervisor import FIRST_SECONDS, HUNG_STEPS, MAX_TURN, WATCH_INTERVAL, Watchdog

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


def test_a_trainer_that_is_not_asked_may_be_silent() -> None:
    watchdog = asked(1.0)
    watchdog.hear()
    wait(watchdog, 10 * LEAST)
    assert not watchdog.is_hung


def test_a_machine_that_stood_still_is_not_the_trainers_fault() -> None:
    watchdog = asked(1.0)
    for _ in range(5):
        watchdog.pass_time(3_600.0)
    assert not watchdog.is_hung
    wait(watchdog, LEAST - 5 * MAX_TURN)
    assert not watchdog.is_hung
    wait(watchdog, 2.0)
    assert watchdog.is_hung


def test_the_next_trainer_begins_with_what_is_known_of_inner_steps() -> None:
    watchdog = asked(10.0)
    wait(watchdog, 1_000.0)
    watchdog.begin()
    assert not watchdog.is_hung
    assert watchdog.limit == 200.0

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from farandole.node.base.driver import Driver


class Echo:
    """A machine that answers each event with itself, and with one further output for each letter of the event."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, float]] = []

    def handle(self, event: str, now: float) -> list[str]:
        self.heard.append((event, now))
        return [event, *(f"{event}{index}" for index in range(len(event)))]


async def test_outputs_of_an_event_that_an_output_causes_come_after_the_waiting_ones() -> None:
    done: list[str] = []

    def carry_out(output: str) -> None:
        done.append(output)
        if output == "ab":
            driver.handle("c")

    driver = Driver[str, str](carry_out, "fired")
    driver.begin(Echo().handle)
    driver.handle("ab")
    assert done == ["ab", "ab0", "ab1", "c", "c0"]


async def test_the_timer_fires_once_at_the_time_that_was_set_last(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    machine, driver = Echo(), Driver[str, str](lambda output: None, timer_fired="fired")
    driver.begin(machine.handle)
    nursery.start_soon(driver.run)
    began_at = trio.current_time()
    driver.set_timer(began_at + 5)
    driver.set_timer(began_at + 7)
    assert driver.timer_at == began_at + 7
    await trio.sleep(20)
    ((event, at),) = machine.heard
    assert event == "fired"
    assert at == pytest.approx(began_at + 7)
    assert driver.timer_at == math.inf
    driver.set_timer(trio.current_time() - 1)
    await trio.testing.wait_all_tasks_blocked()
    assert len(machine.heard) == 2
    for seconds in (9, 1):  # an earlier time counts at once
        driver.set_timer(trio.current_time() + seconds)
        await trio.testing.wait_all_tasks_blocked()
    await trio.sleep(2)
    assert len(machine.heard) == 3


async def test_a_driver_without_a_machine_drops_events_outputs_and_the_timer() -> None:
    machine = Echo()

    def carry_out(output: str) -> None:
        done.append(output)
        driver.end()

    done: list[str] = []
    driver = Driver[str, str](carry_out, "fired")
    driver.handle("a")
    driver.begin(machine.handle)
    driver.set_timer(trio.current_time() + 1)
    driver.handle("abc")
    driver.handle("d")
    assert done == ["abc"]
    assert [event for event, _ in machine.heard] == ["abc"]
    assert driver.timer_at == math.inf

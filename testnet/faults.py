"""What happens to nodes in a scenario, and when."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from .natlab.home import Home
from .process import NodeProcess
from .scenario import Fault

# A slowed trainer is stopped and let go on in turns of this length: shorter than an exchange's deadlines.
SLOW_PERIOD: Final = 0.4


@dataclass(frozen=True)
class FaultContext:
    """What faults act on."""

    nodes: Sequence[NodeProcess]
    homes: Mapping[int, Home]
    """Of each node, by its index; none outside the NAT lab."""
    started_at: float
    """On trio's clock."""
    start: Callable[[NodeProcess], Awaitable[None]]
    """Start a node, for the first time or again."""
    reach_round: Callable[[int], Awaitable[None]]
    """Wait until the farthest live node is in that round."""
    say: Callable[[str], None]


async def run_fault(fault: Fault, context: FaultContext) -> None:
    """Wait for the fault's moment, do it to all its nodes at once, and undo what ends."""
    await _moment(fault, context)
    async with trio.open_nursery() as nursery:
        for node in _targets(fault, context):
            nursery.start_soon(_DEEDS[fault.kind], fault, node, context)


def _targets(fault: Fault, context: FaultContext) -> list[NodeProcess]:
    if fault.of_stage is None:
        return [context.nodes[index] for index in fault.nodes]
    holders = [node for node in context.nodes if node.is_running and not node.is_frozen]
    holders = [node for node in holders if node.record.stage == fault.of_stage]
    return holders[::-1][: fault.count]


async def _moment(fault: Fault, context: FaultContext) -> None:
    if fault.at_seconds is not None:
        await trio.sleep_until(context.started_at + fault.at_seconds)
        return
    assert fault.at_round is not None
    await context.reach_round(fault.at_round)


async def _kill(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    context.say(f"kill -9 {node.name} in round {node.record.round}{_stage(node)}")
    node.record.is_doomed = fault.kind == "kill"
    node.kill()
    await node.wait_ended()


async def _restart(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    assert fault.duration is not None
    await _kill(fault, node, context)
    await trio.sleep(fault.duration)
    context.say(f"starting {node.name} again in the same folder, {fault.duration:g} s later")
    await context.start(node)


async def _freeze(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    assert fault.duration is not None
    context.say(f"freezing {node.name} in round {node.record.round}{_stage(node)} for {fault.duration:g} s")
    node.freeze()
    try:
        await trio.sleep(fault.duration)
    finally:
        node.thaw()
    context.say(f"{node.name} goes on")


async def _slow(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    """Take the processor from the trainer most of the time; the daemon is as quick as before."""
    context.say(f"slowing {node.name} down {fault.factor:g} times")
    with trio.move_on_after(fault.duration if fault.duration is not None else float("inf")):
        while not node.record.is_finished:
            trainer = node.record.status.trainer_pid if node.record.status and node.is_running else None
            try:
                _signal(trainer, signal.SIGSTOP)
                await trio.sleep(SLOW_PERIOD * (1 - 1 / fault.factor))
            finally:
                _signal(trainer, signal.SIGCONT)
            await trio.sleep(SLOW_PERIOD / fault.factor)


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return  # it was restarted; the next status names its successor


async def _join(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    context.say(f"{node.name} joins late")
    await context.start(node)


async def _leave(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    context.say(f"{node.name} leaves in round {node.record.round}{_stage(node)}")
    node.record.is_doomed = True
    await node.leave()


async def _cut(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    home = context.homes[node.record.index]
    await _interrupt("the line", home.cut, home.heal, fault, node, context)


async def _unplug(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    home = context.homes[node.record.index]
    await _interrupt("the cable", home.unplug, home.plug, fault, node, context)


async def _reboot_router(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    home = context.homes[node.record.index]
    await _interrupt("the router", home.switch_off, home.switch_on, fault, node, context)


async def _interrupt(
    what: str,
    stop: Callable[[], None],
    go: Callable[[], None],
    fault: Fault,
    node: NodeProcess,
    context: FaultContext,
) -> None:
    assert fault.duration is not None
    context.say(f"{what} of {node.name} is gone for {fault.duration:g} s in round {node.record.round}")
    await trio.to_thread.run_sync(stop)
    await trio.sleep(fault.duration)
    await trio.to_thread.run_sync(go)
    context.say(f"{what} of {node.name} is back")


async def _change_address(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    home = context.homes[node.record.index]
    await trio.to_thread.run_sync(home.change_address)
    context.say(f"{node.name} has another public address, {home.address}, in round {node.record.round}")


def _stage(node: NodeProcess) -> str:
    return "" if node.record.pipeline is None else f", stage {node.record.stage}"


_DEEDS: Final = {
    "kill": _kill,
    "restart": _restart,
    "freeze": _freeze,
    "slow": _slow,
    "join": _join,
    "leave": _leave,
    "cut": _cut,
    "unplug": _unplug,
    "reboot_router": _reboot_router,
    "change_address": _change_address,
}

"""The faults of a scenario's nodes, and when they occur."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from ..natlab.home import Home
from . import wrong_clock
from .fault import Fault, FaultReport
from .process import NodeProcess

# Writes that still succeed on a full disk: files of one block are overwritten in place.
FULL_DISK_BYTES: Final = 4_096
# After this time a partition counts as not healed.
HEAL_TIMEOUT: Final = 60.0
# Interval of checks whether a node trains again.
LOOK_INTERVAL: Final = 0.25


@dataclass(frozen=True)
class FaultContext:
    """The objects that faults act on."""

    nodes: Sequence[NodeProcess]
    homes: Mapping[int, Home]
    """Home of each node, by its index; none outside the NAT lab."""
    started_at: float
    """On trio's clock."""
    start: Callable[[NodeProcess], Awaitable[None]]
    """Start a node, for the first time or again."""
    is_settled: Callable[[float], bool]
    """Whether all live nodes have one run state, by their statuses after that moment."""
    say: Callable[[str], None]


async def run_fault(fault: Fault, context: FaultContext) -> FaultReport:
    """Apply the fault to all its nodes at once, undo it if it ends, and see them train again."""
    nodes = [context.nodes[index] for index in fault.nodes]
    if fault.of_stage is not None:
        holders = [node for node in context.nodes if node.is_running and not node.is_frozen]
        nodes = [node for node in holders if node.record.stage == fault.of_stage][::-1][: fault.count]
    if fault.kind != "join":
        for node in nodes:  # on a busy machine the first may be rounds ahead of the last's start
            await node.joined.wait()
    began_at = trio.current_time()
    details = {
        "starve": f", to {1 / fault.factor:.0%} of a processor",
        "set_clock": f" by {fault.offset:+g} s, {fault.drift:+.0%} fast",
    }
    lasts = f" for {fault.duration:g} s" if fault.duration is not None else ""
    context.say(f"{fault.kind}{details.get(fault.kind, '')}{lasts}: {_names(nodes)}")
    standstill: dict[int, float | None] = {}
    is_over = trio.Event()
    healed_in = None
    async with trio.open_nursery() as nursery:
        for node in nodes:
            if fault.duration is not None and node.is_running:
                nursery.start_soon(_watch_standstill, node, is_over, standstill)
        if fault.kind == "partition":
            healed_in = await _partition(fault, nodes, context)
        else:
            async with trio.open_nursery() as doing:
                for node in nodes:
                    doing.start_soon(_befall, fault, node, context)
        is_over.set()
        if fault.duration is not None:
            context.say(f"{fault.kind} is over: {_names(nodes)}")
    indices, at = [node.report.index for node in nodes], began_at - context.started_at
    return FaultReport(fault.kind, indices, at, fault.duration, standstill, healed_in)


async def _watch_standstill(node: NodeProcess, is_over: trio.Event, standstill: dict[int, float | None]) -> None:
    """Watch the node until it trains again after the fault, or never will, and record its longest standstill."""
    record, longest, over_at = node.record, 0.0, math.inf
    last = trio.current_time() if record.trained_at is None else record.trained_at
    while True:
        await trio.sleep(LOOK_INTERVAL)
        if is_over.is_set():
            over_at = min(over_at, trio.current_time())
        if record.trained_at is not None and record.trained_at > last:
            longest, last = max(longest, record.trained_at - last), record.trained_at
        if last > over_at:
            standstill[node.report.index] = longest
            return
        # Otherwise another fault starts it again.
        is_gone = not node.is_running and (node.report.is_doomed or node.report.died)
        if record.is_finished or node.report.wedged or (is_over.is_set() and is_gone):
            standstill[node.report.index] = None
            return


def _names(nodes: Sequence[NodeProcess]) -> str:
    stages = ["" if node.report.pipeline is None else f", stage {node.record.stage}" for node in nodes]
    return "; ".join(
        f"{node.name} in round {node.report.rounds}{stage}" for node, stage in zip(nodes, stages, strict=True)
    )


async def _befall(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    """Do to a node what the fault does, to its end."""
    match fault.kind:
        case "kill" | "restart" | "flap":
            node.report.is_doomed = fault.kind == "kill"
            await _kill(fault, node, context)
        case "starve":
            await node.starve(1 / fault.factor, fault.seconds)
        case "freeze" | "fill_disk" | "set_clock":
            with contextlib.ExitStack() as undoing:
                if fault.kind == "freeze":
                    node.freeze()
                    undoing.callback(node.thaw)
                elif fault.kind == "fill_disk":
                    node.limit_files(FULL_DISK_BYTES)
                    undoing.callback(node.limit_files, None)
                else:
                    wrong_clock.set_clock(node.home, fault.offset, fault.drift)
                    undoing.callback(wrong_clock.set_clock, node.home)
                await trio.sleep(fault.seconds)
        case "join":
            await context.start(node)
        case "leave":
            node.report.is_doomed = True
            await node.leave()
        case "change_address":
            home = context.homes[node.report.index]
            await trio.to_thread.run_sync(home.change_address)
            context.say(f"{node.name} has another public address, {home.address}")
        case _:
            home = context.homes[node.report.index]
            do = {"cut": home.cut, "unplug": home.unplug, "reboot_router": home.switch_off}[fault.kind]
            await trio.to_thread.run_sync(do)
            await trio.sleep(fault.seconds)
            await trio.to_thread.run_sync(partial(do, undo=True))


async def _kill(fault: Fault, node: NodeProcess, context: FaultContext) -> None:
    """Kill the node, and unless for good start it again: once, or repeatedly until the time is over."""
    ends_at = trio.current_time() + (fault.seconds if fault.kind == "flap" else 0.0)
    while True:
        node.kill()
        await node.wait_ended()
        if fault.kind == "kill":
            return
        await trio.sleep(fault.interval if fault.kind == "flap" else fault.seconds)
        await context.start(node)
        if trio.current_time() + fault.interval >= ends_at:
            return
        await trio.sleep(fault.interval)


async def _partition(fault: Fault, nodes: Sequence[NodeProcess], context: FaultContext) -> float | None:
    """Cut the nodes off, and heal; return how long it took then until all had one run state."""
    homes = [context.homes[node.report.index] for node in nodes]
    await trio.to_thread.run_sync(part, homes)
    try:
        await trio.sleep(fault.seconds)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(heal, homes)
    healed_at = trio.current_time()
    with trio.move_on_after(HEAL_TIMEOUT):
        while True:
            await trio.sleep(LOOK_INTERVAL)
            if context.is_settled(healed_at):
                return trio.current_time() - healed_at
    return None


# A network that splits into two parts, in the NAT lab: its internet forwards nothing between them.


def part(homes: Sequence[Home]) -> None:
    """Cut these homes off from all others; they still reach each other."""
    part = f"{{ {', '.join(home.address for home in homes)} }}"
    rules = f"""table ip part{homes[0].index} {{
  chain forward {{
    type filter hook forward priority filter
    ip saddr {part} ip daddr != {part} drop
    ip saddr != {part} ip daddr {part} drop
  }}
}}
"""
    homes[0].internet.run("nft -f -", rules)


def heal(homes: Sequence[Home]) -> None:
    """Undo `part`."""
    homes[0].internet.run(f"nft delete table ip part{homes[0].index}")

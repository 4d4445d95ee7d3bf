"""Members' own training loops in two homes meet through one home's router. `tests/node/test_own_loop.py` kills them."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

from farandole.testnet.natlab.lab import Lab

from ...node.loops import invite_to, loop, node_of_a_loop

FOR_EVER = ("--steps", "1000000")


async def test_loops_in_two_homes_train_together(lab: Lab, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    at_first, at_second = (
        partial(loop, enter=lab.add_home(kind).host.enter, listen="/ip4/0.0.0.0/tcp/0")
        for kind in ("open", "port-restricted")
    )
    async with at_first(first, "--create", str(first), "--round-seconds", "1", *FOR_EVER) as one:
        await one.says("step 0")
        async with node_of_a_loop(first) as node, at_second(second, await invite_to(first), *FOR_EVER) as other:
            await other.says("step 0")
            [home] = (second / "runs").iterdir()  # of the node that a loop starts for an invite
            async with node_of_a_loop(home) as others_node:
                for each in (node, others_node):
                    await each.until(lambda status: status.exchanges_ok > 0)
                assert await other.end(signal.SIGINT) != 0
                assert await one.end(signal.SIGINT) != 0

"""Three real nodes train on an epoch; one is killed, and another one joins. Only slices that trainers drew count."""

from __future__ import annotations

import ast
import random
import re
import signal
from collections import Counter
from contextlib import AsyncExitStack
from itertools import permutations
from pathlib import Path

import trio

from ..daemons import Daemon, joined
from ..hosts import until
from ..small_runs import TINY, small_manifest, write_run

# An inner step takes some milliseconds; slowed down, three nodes need 15 seconds for the epoch. The node that joins
# later is faster: the epoch waits for it even if it starts slowly, and ends soon after it has joined.
NUM_FILES, WORDS_A_FILE, SLOW, SLOW_LATER = 8, 2_000, "45", "10"
NUM_NODES = 3
MAX_MEAN = 1.1


RUN: dict[str, object] = {
    "model": {**TINY, "context": 32},
    # Means cost nothing then: members of which nothing counts would be met last, and this is no test of the guard.
    "inner": {"batch_size": 8, "learning_rate": 1e-6},
    "rounds": {"round_seconds": 2.0, "exchange_seconds": 2.0},
    "data": {"source": "text", "epochs": 1},
}


def drawn(home: Path, before: str = "\0") -> Counter[int]:
    """Return slice -> number of times that the node trained on it, by the daemon's log up to the words ``before``."""
    slices, log = Counter[int](), (home / "log").read_text().partition(before)[0]
    for ranges in re.findall(r"trained on slices of epoch 0: (\[.*?\])$", log, re.MULTILINE):
        for first, count in ast.literal_eval(ranges):
            slices.update(range(first, first + count))
    return slices


async def num_done(daemon: Daemon, num: int) -> None:
    """Wait until the node has heard that ``num`` slices are done."""
    await daemon.until(lambda status: status.data is not None and status.data.done >= num)


async def test_an_epoch_is_whole_though_a_third_of_its_nodes_is_replaced(tmp_path: Path) -> None:
    texts, rng = tmp_path / "texts", random.Random(1)
    texts.mkdir()
    for name in range(NUM_FILES):
        words = rng.choices(("dance", "chain", "hand", "open", "free", "turn"), k=WORDS_A_FILE)
        (texts / f"{name}.txt").write_text(" ".join(words))
    signed = write_run(tmp_path, small_manifest(**RUN))
    data = ("--data", str(texts), "--log-level", "debug")

    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(
                joined(tmp_path / "0", str(tmp_path / "run.manifest"), *data, "--slow", SLOW)
            )
        ]
        await nodes[0].says("this node is")
        await nodes[0].says("listening on")
        invite = nodes[0].invite(signed.run_id)

        async def join(slow: str) -> None:
            home = tmp_path / str(len(nodes))
            nodes.append(await stack.enter_async_context(joined(home, invite, *data, "--slow", slow)))

        for _ in range(NUM_NODES - 1):
            await join(SLOW)
        with trio.fail_after(180):
            await num_done(nodes[0], 20)
            await join(SLOW_LATER)
            doomed, survivors = nodes[1], [nodes[0], *nodes[2:]]
            await until(lambda: bool(drawn(doomed.home)))  # on a busy machine it may start long after the others
            await num_done(nodes[0], len(sum((drawn(node.home) for node in nodes[:NUM_NODES]), Counter[int]())))
            await doomed.end(signal.SIGKILL)
            async with trio.open_nursery() as nursery:
                for node in survivors:
                    nursery.start_soon(node.says, "all 1 epochs are done")
        status = await nodes[0].until(lambda status: status.data is not None)

    assert status.data is not None
    num_slices, counts = status.data.slices, sum((drawn(node.home) for node in nodes), Counter[int]())
    # A node trains again on slices that members report which it has not averaged with yet: the killed one's, and those
    # of survivors that have not met, or too late, in so short an epoch.
    repeated = (
        drawn(one.home).keys() & drawn(other.home, f"averaged with {one.name}").keys()
        for one, other in permutations(survivors, 2)
    )
    unproven = drawn(doomed.home).keys() | set().union(*repeated)
    again = Counter({number: count - 1 for number, count in counts.items() if number not in unproven})
    print(f"\n{num_slices:,} slices, {len(unproven)} of strangers; of the others {again.total()} draws too many")
    assert status.data.done == num_slices
    assert set(counts) == set(range(num_slices))
    assert again.total() <= (MAX_MEAN - 1) * len(again)
    assert max(counts[number] for number in unproven) <= 1 + len(survivors)
    assert len(unproven) <= num_slices / 2, "most of the epoch is of members that have met"
    assert all(drawn(node.home) for node in survivors), "a newcomer has no part in it"

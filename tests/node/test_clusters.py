"""Two clusters of ranks, a plain loop and a small node in one run, with churn inside and outside of the clusters."""

from __future__ import annotations

import itertools
import os
import re
import signal
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import trio
from blake3 import blake3
from safetensors import SafetensorError, safe_open

import farandole
from farandole.node.base.settings import NodeSettings
from farandole.node.status.round_log import RoundRecord, read_rounds
from farandole.node.store.folder import CheckpointFolder
from farandole.protocol.run.invite import decode_invite
from farandole.protocol.run.rules import SLOW
from farandole.training.model.model import build_model

from ..patience import PATIENCE
from .cluster_member import MODEL, held_out_loss, read_text
from .daemons import Daemon, started
from .loops import invite_to, loop, node_of_a_loop, ranks_of

PROGRAM = Path(__file__).with_name("cluster_member.py")
NUM_MEMBERS: Final = 4
ROUNDS: Final = 50
ROUND_SECONDS: Final = 6.0
EXCHANGE_SECONDS: Final = 12.0
# Least time of a step: the slowest member needs less, so all train on about as many tokens.
STEP_SECONDS: Final = 0.5
HELD_OUT_WINDOWS: Final = 512
POLL_SECONDS: Final = 0.1
# A commit reaches the two partners' logs within this time.
APART_SECONDS: Final = 5.0


@dataclass
class Member:
    """A member, by its node's folder, and the slow weights that it saved."""

    name: str
    home: Path
    seed: int
    meeting: Path
    """Where the members' programs wait for each other."""
    peer_id: str = ""
    saved: dict[tuple[int, int], tuple[float, int, str]] = field(default_factory=dict)
    """By the file's inode and time of writing: when it was written, the round, the hash of the slow weights."""

    def arguments(self, run: str) -> tuple[str, ...]:
        """Return the arguments of its program."""
        return (run, str(self.seed), str(ROUNDS), str(self.meeting), str(NUM_MEMBERS))

    @property
    def rounds(self) -> list[RoundRecord]:
        return list(read_rounds(NodeSettings(home=self.home).rounds))

    @property
    def committed(self) -> list[RoundRecord]:
        return [record for record in self.rounds if record.verdict == "committed"]

    @property
    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, the newest first."""
        return CheckpointFolder(NodeSettings(home=self.home).checkpoints, 0).files()

    def note_saved(self) -> None:
        """Hash the slow weights of new checkpoints."""
        for path in self.checkpoints:
            try:
                found = path.stat()
                key = found.st_ino, found.st_mtime_ns
                if key in self.saved:
                    continue
                with safe_open(path, framework="numpy") as file:
                    names = sorted(name for name in file.keys() if name.startswith(f"{SLOW}/"))  # noqa: SIM118 - no dict
                    hashed = blake3(b"".join(file.get_tensor(name).tobytes() for name in names)).hexdigest()
                    self.saved[key] = found.st_mtime, int(file.metadata()["round"]), hashed
            except (OSError, SafetensorError):
                continue  # a newer one has replaced it

    def weights_after(self, record: RoundRecord) -> str | None:
        """Return the hash of the slow weights that a round ended with, None if they were not saved."""
        after = [(at, hashed) for at, number, hashed in self.saved.values() if number == record.round + 1]
        near = [(abs(at - record.at), hashed) for at, hashed in after]
        return min(near)[1] if near and min(near)[0] < APART_SECONDS else None

    def logged(self, pattern: str) -> list[str]:
        """Return what the group of a pattern matches in the node's log."""
        return re.findall(pattern, NodeSettings(home=self.home).log.read_text())

    @property
    def trainers(self) -> list[str]:
        """Return how the node's trainers have begun, one after another."""
        return self.logged(r"trainer ready .* parameters, (.*)")

    async def until_next_trainer(self, num_before: int) -> None:
        """Wait for a trainer after this number of them; check that it continues from weights saved or fetched here."""
        await self._until(lambda: len(self.trainers) > num_before)
        saved = {str(number) for _, number, _ in self.saved.values()}
        fetched = self.logged(r"weights of round (\d+) from")
        assert self.trainers[num_before].removeprefix("resumed at round ") in {*saved, *fetched}

    async def until_exchange(self) -> None:
        """Wait until one more exchange than now is committed."""
        num_before = len(self.committed)
        await self._until(lambda: len(self.committed) > num_before)

    async def _until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE):
            while not condition():  # noqa: ASYNC110 - files that another process writes
                await trio.sleep(POLL_SECONDS)

    def loss(self) -> float:
        """Return the held-out loss of the newest checkpoint's slow weights."""
        model = build_model(MODEL, 0)
        with safe_open(self.checkpoints[0], framework="pt") as file:
            model.load_state_dict({name: file.get_tensor(f"{SLOW}/{name}") for name, _ in model.named_parameters()})
        return held_out_loss(model, read_text()[1], HELD_OUT_WINDOWS)


@asynccontextmanager
async def attached(member: Member, ranks: int, *arguments: str) -> AsyncIterator[tuple[Daemon, Daemon]]:
    """Run a node, by arguments of ``farandole join`` that name the run, and a loop that attaches; yield both."""
    settings = ("--trainer", "external", "--heartbeat-seconds", "1", "--step-seconds", str(STEP_SECONDS))
    async with started(member.home, "join", *arguments, *settings) as node:
        await node.says("waiting for a loop to attach")
        member.peer_id = (await node.status()).peer_id
        async with loop(member.home, *member.arguments("attached"), program=program(ranks)) as running:
            yield node, running


@asynccontextmanager
async def with_own_node(member: Member, ranks: int, invite: str) -> AsyncIterator[Daemon]:
    """Run a loop that starts its node."""
    home = member.home
    member.home = home / "runs" / decode_invite(invite).run_id.hex()[:16]
    arguments = member.arguments(invite)
    async with loop(home, *arguments, program=program(ranks), step_seconds=STEP_SECONDS) as running:
        yield running


async def begun(running: Daemon, member: Member, stack: AsyncExitStack) -> None:
    """Wait until the loop trains, whose node then ends with the stack."""
    await running.says("rank 0 begins")
    node = await stack.enter_async_context(node_of_a_loop(member.home))
    member.peer_id = (await node.status()).peer_id


def program(ranks: int) -> tuple[str, ...]:
    """Return the arguments of Python that run a member's loop in this number of processes."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "9", "--nproc-per-node", str(ranks))
    return (*(torchrun if ranks > 1 else ()), str(PROGRAM))


def create(folder: Path) -> Path:
    """Create a run in which exchanges leave both partners with the same slow weights: their mean."""
    rounds = {"round_seconds": ROUND_SECONDS, "exchange_seconds": EXCHANGE_SECONDS}
    return farandole.create_run(build_model(MODEL, 0), folder, rounds=rounds, outer={"kind": "plain"})


async def all_end(loops: Sequence[Daemon]) -> None:
    """Wait until the loops have ended by themselves, without a fault."""
    with trio.fail_after(2 * PATIENCE):
        for each in loops:
            assert await each.process.wait() == 0, each.said


async def note_all(members: Sequence[Member]) -> None:
    """Hash all that the members save, without end."""
    while True:
        for member in members:
            await trio.to_thread.run_sync(member.note_saved)
        await trio.sleep(POLL_SECONDS)


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="ranks are found as Linux lists a process's children")
async def test_clusters_and_plain_members_average_and_learn_as_plain_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster of two ranks, one of four, a plain loop and a small node; ranks and a plain member are killed."""
    monkeypatch.setenv("FARANDOLE_CHECKPOINT_SECONDS", "0.1")
    monkeypatch.setenv("FARANDOLE_MDNS", "false")
    start = create(tmp_path / "run") / "start"
    names = ("two ranks", "four ranks", "plain", "laptop")
    members = members_of(tmp_path, names)
    two, four, plain, laptop = members
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        nursery.start_soon(note_all, members)
        enter = stack.enter_async_context
        _, pair = await enter(attached(two, 2, str(start / "manifest"), "--start", str(start)))
        invite = await invite_to(two.home)
        quartet = await enter(with_own_node(four, 4, invite))
        small = await enter(with_own_node(laptop, 1, invite))
        async with attached(plain, 1, invite) as (node, plain_loop):
            await begun(quartet, four, stack)
            await begun(small, laptop, stack)
            for member in members:
                await member.until_exchange()
            num_trainers = [len(member.trainers) for member in (two, four)]
            # A rank is lost: torchrun starts both again, and they attach to the node, which has stayed.
            os.kill(ranks_of(pair.process.pid)[1], signal.SIGKILL)
            # So is the rank that has started its node: the next one takes the node over.
            os.kill(ranks_of(quartet.process.pid)[0], signal.SIGKILL)
            for member, num_before in zip((two, four), num_trainers, strict=True):
                await member.until_next_trainer(num_before)
                await member.until_exchange()
            node.process.kill()
            plain_loop.process.kill()
        await laptop.until_exchange()  # without the plain member
        async with attached(plain, 1, invite) as (_, plain_loop):
            await plain.until_exchange()
            await all_end([small, pair, quartet, plain_loop])
        nursery.cancel_scope.cancel()
    for member in members:
        member.note_saved()
    counts = {member.name: partners_of(member, members) for member in members}
    mixed = {member.name: member.loss() for member in members}
    print(f"\nexchanges: {counts}\nmixed: {mixed}, {tokens_of(members)} tokens")
    require_equal_means(members)
    for member in members:
        others = {other.name for other in members if other is not member}
        assert set(counts[member.name]) == others, member.name

    equals = await play_plain(tmp_path / "equal")
    alike = {member.name: member.loss() for member in equals}
    print(f"plain: {alike}, {tokens_of(equals)} tokens; exchanges: {[len(member.committed) for member in equals]}")
    assert statistics.mean(mixed.values()) == pytest.approx(statistics.mean(alike.values()), rel=0.01)


def members_of(folder: Path, names: Sequence[str]) -> list[Member]:
    """Return members whose programs begin together."""
    (folder / "meeting").mkdir()
    return [Member(name, folder / str(seed), seed, folder / "meeting") for seed, name in enumerate(names)]


async def play_plain(folder: Path) -> list[Member]:
    """Train four plain members with the same data, without churn; returns them."""
    start = create(folder / "run") / "start"
    first, *others = members = members_of(folder, [f"plain {number}" for number in range(NUM_MEMBERS)])
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        joining = (str(start / "manifest"), "--start", str(start))
        running = [await enter(attached(first, 1, *joining))]
        invite = await invite_to(first.home)
        running += [await enter(attached(member, 1, invite)) for member in others]
        await all_end([each for _, each in running])
    return members


def partners_of(member: Member, members: Sequence[Member]) -> Counter[str]:
    """Count a member's committed exchanges by the partner's name."""
    names = {other.peer_id: other.name for other in members}
    return Counter(names[record.partner] for record in member.committed)


def tokens_of(members: Sequence[Member]) -> dict[str, int]:
    return {member.name: sum(record.tokens for record in member.rounds) for member in members}


def require_equal_means(members: Sequence[Member]) -> None:
    """Compare the slow weights of both partners after each exchange.

    The screening gives little weight to a member that has just begun: such exchanges have no common mean.
    """
    num_all = num_clipped = num_compared = 0
    for one, other in itertools.combinations(members, 2):
        theirs = [record for record in other.committed if record.partner == one.peer_id]
        for record in (record for record in one.committed if record.partner == other.peer_id):
            num_all += 1
            same = [each for each in theirs if abs(each.at - record.at) < APART_SECONDS]
            if len(same) != 1:
                continue  # a kill came between the commit and the log
            if min(record.clip, same[0].clip) < 1.0:
                num_clipped += 1
                continue
            hashes = {one.weights_after(record), other.weights_after(same[0])}
            if None not in hashes:
                num_compared += 1
                assert len(hashes) == 1, f"{one.name} and {other.name} after round {record.round}: {hashes}"
    print(f"{num_compared} of {num_all} exchanges compared, {num_clipped} clipped")
    assert num_compared > 0.8 * (num_all - num_clipped)
    assert num_clipped < 0.2 * num_all

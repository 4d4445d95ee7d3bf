"""Liars announce one checkpoint of bad weights, ahead of all others, and serve it: a newcomer does not train on it.

Its trainer refuses weights that are worse on held-out text than a fresh start. In a stage no loss is known, and a
comparison with other members' weights reveals them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import numpy as np
import trio
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from farandole.node.base.settings import NodeSettings
from farandole.node.inspect.peek import open_visit
from farandole.node.mesh.host import open_host
from farandole.node.state.messenger import open_messenger
from farandole.node.store.folder import saved_round
from farandole.node.transfers.giver import BlockService, Holding
from farandole.node.transfers.receiver import Conditions
from farandole.node.transfers.sketches import SketchService
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import Index, SignedIndex, sign_index
from farandole.protocol.run.invite import peers_at
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.state.entries import Beat, CheckpointNotice, Kind, Member, deltas_of
from farandole.protocol.state.push import MAX_BATCH_BYTES, MAX_PUSH_BYTES, PROTOCOL, Batch
from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.messagepack import encode
from farandole.training.engine.blocks import content_of

from ..patience import PATIENCE
from ..protocol.authors import author_of, key_of, signed, tick_at
from .daemons import Daemon, joined
from .hosts import LOOPBACK
from .small_runs import TINY, small_manifest, write_run

LIARS: Final = (501, 502)
JUDGE: Final = 503
"""It says that its weights are like the poison: then only their loss shows what they are."""
NUM_ROUNDS: Final = 3
# A run state takes one announcement a minute, so honest members' announcements may still be of round 1. A checkpoint
# ahead of them by more than `copies.MAX_ROUNDS_OLDER` is tried last, and no newcomer would get to it.
ROUNDS_AHEAD: Final = 1
ENDLESS: Final = 10_000


def options(texts: Path, num_rounds: int) -> tuple[str, ...]:
    """Return options without copies: only the liars' checkpoint has two holders, so the newcomer does fetch it."""
    return "--data", str(texts), "--backup-seconds", "3600", "--max-rounds", str(num_rounds)


async def trained(daemon: Daemon, num_rounds: int) -> Path:
    """Return the checkpoint of a member that has finished its rounds."""
    await daemon.says("rounds are done")
    await daemon.until(lambda status: status.trainer_pid is None)  # its weights are saved
    newest = max((daemon.home / "checkpoints").glob("*.safetensors"), key=lambda path: saved_round(path) or 0)
    assert saved_round(newest) == num_rounds
    return newest


def write_poison(
    honest: Path, path: Path, author: int, run_id: bytes, stage: int, num_stages: int
) -> tuple[SignedIndex, Index]:
    """Write a checkpoint of noise, ahead of the honest one and of its shapes; return its index, signed by an author."""
    with safe_open(honest, framework="numpy") as file:
        metadata = file.metadata()
    rng, tensors = np.random.default_rng(1), load_file(honest)
    for name in filter(lambda name: name.startswith("slow/"), tensors):
        tensors[name] = rng.standard_normal(tensors[name].shape, np.float32)
    metadata["round"] = str(int(metadata["round"]) + ROUNDS_AHEAD)
    save_file(tensors, path, metadata)
    content = content_of(path)
    index = Index(
        run_id=run_id,
        author=author_of(author),
        stage=stage,
        num_stages=num_stages,
        round=int(metadata["round"]),
        inner_steps=int(metadata["steps"]),
        tokens=int(metadata["tokens"]),
        size=content.size,
        layout=bytes.fromhex(metadata["layout"]),
        hashes=content.hashes,
    )
    return sign_index(key_of(author), index), index


@asynccontextmanager
async def open_liar(
    number: int, run_id: bytes, victims: dict[bytes, list[str]], path: Path, signed_index: tuple[SignedIndex, Index]
) -> AsyncIterator[None]:
    """Run a liar that announces to these nodes the checkpoint at ``path``, and gives it to any peer that asks.

    The judge announces another checkpoint, and answers questions for sketches from the file at ``path``.
    """
    made, index = signed_index
    held = bytes([number % 256]) * 32 if number == JUDGE else made.id
    holding = Holding(path, made, index)

    async def find(question: BlockQuestion) -> Holding | None:
        await trio.lowlevel.checkpoint()
        return holding if question.id in (None, made.id) else None

    async with open_host(key_of(number), LOOPBACK) as host, open_messenger(host) as messenger:
        messenger.set_receiver(PROTOCOL, MAX_PUSH_BYTES, lambda peer, payload: None)
        for victim, places in victims.items():
            await host.connect(victim, places)
        BlockService(Conditions(host, run_id), find)
        if number == JUDGE:
            SketchService(host, run_id, lambda stage: find(BlockQuestion(run_id, stage)))
        addresses = tuple(address.rpartition("/p2p/")[0] for address in host.addresses)
        said = {
            Kind.MEMBER: Member(stage=index.stage, addresses=addresses),
            Kind.BEAT: Beat(index.inner_steps, index.round, 1_000_000, 1_000),
            Kind.CHECKPOINT: CheckpointNotice(
                index.round, index.stage, held, index.size, index.tokens, index.inner_steps
            ),
        }

        async def push() -> None:
            while True:
                now = time.time()
                entries = [signed(number, kind, 0, tick_at(kind, now), each, run_id) for kind, each in said.items()]
                for delta in deltas_of(entries, MAX_BATCH_BYTES):
                    for victim in victims:
                        messenger.send_nowait(victim, PROTOCOL, encode(Batch(False, delta)))
                await trio.sleep(1.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(push)
            yield
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def lied_to(
    run: SignedManifest,
    alice: Daemon,
    honest: Path,
    liars: tuple[int, ...],
    stages: tuple[int, int] = (0, 1),
    others: tuple[Daemon, ...] = (),
) -> AsyncIterator[None]:
    """Run liars: two hold poison, as ``alice`` and ``others`` have heard; ``stages``: its stage and their number."""
    path, num_members = alice.home.parent / "poison.safetensors", (await alice.status()).run.members_live
    index = write_poison(honest, path, LIARS[0], run.run_id, *stages)
    victims = peers_at(alice.addresses)
    async with AsyncExitStack() as stack:
        for number in liars:
            await stack.enter_async_context(open_liar(number, run.run_id, victims, path, index))
        await alice.until(lambda status: status.run.members_live == num_members + len(liars))
        for member in (alice, *others):  # the newcomer may sync with any of them
            await offers(member, run.run_id, index[0].id, len(LIARS))
        yield


async def offers(daemon: Daemon, run_id: bytes, checkpoint_id: bytes, num_holders: int) -> None:
    """Wait until a member gives visitors the word of ``num_holders`` holders of this checkpoint."""
    settings = NodeSettings(
        home=daemon.home.parent / "visitor", invite=daemon.invite(run_id), listen=LOOPBACK, mdns=False
    )
    with trio.fail_after(PATIENCE):
        async with open_visit(settings, lambda text: None) as visit:
            while sum(notice.id == checkpoint_id for _, notice in visit.notices()) < num_holders:
                await visit.gossip.changed.park()


async def test_a_newcomer_refuses_noise_that_liars_give_and_call_like_their_own(tmp_path: Path, texts: Path) -> None:
    run = write_run(tmp_path, small_manifest())
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *options(texts, NUM_ROUNDS)) as alice:
        honest = await trained(alice, NUM_ROUNDS)
        end = NUM_ROUNDS + 2
        async with AsyncExitStack() as stack:
            async with lied_to(run, alice, honest, (*LIARS, JUDGE)):
                newcomer = joined(tmp_path / "carol", alice.invite(run.run_id), *options(texts, end))
                carol = await stack.enter_async_context(newcomer)
                await carol.says("their loss on held-out text is")
                assert short_name(author_of(LIARS[0])) in await carol.says("unfit", "not believed for a while")
            # The judge is gone, which would dispute the honest member's weights for 20 s.
            assert f"resumed at round {NUM_ROUNDS}" in await carol.says("trainer ready")
            await carol.says(f"all {end} rounds are done")
            status = await carol.status()
            assert status.loss is not None
            assert status.loss < 5.6, "that of a fresh start is 5.5, that of noise 20"
            givers = [line for line in carol.said if f"weights of round {NUM_ROUNDS} from" in line]
            assert alice.name in givers[-1]


async def test_a_newcomer_to_a_stage_of_which_no_loss_is_known_refuses_noise(tmp_path: Path, texts: Path) -> None:
    run = write_run(tmp_path, small_manifest(model=TINY | {"num_layers": 2, "num_stages": 2}))
    async with AsyncExitStack() as stack:

        async def start(name: str, source: str, stage: int, num_rounds: int = NUM_ROUNDS) -> Daemon:
            rounds = options(texts, num_rounds)
            return await stack.enter_async_context(joined(tmp_path / name, source, *rounds, "--stage", str(stage)))

        bob = await start("bob", str(tmp_path / "run.manifest"), 1)
        await bob.says("listening on")
        invite = bob.invite(run.run_id)
        carol = await start("carol", invite, 1)
        for member in (bob, carol):  # neither trains before the other: alice would end with the first
            await member.says("trainer ready")
        alice = await start("alice", invite, 0, ENDLESS)
        await alice.says("listening on")
        honest = [await trained(member, NUM_ROUNDS) for member in (bob, carol)]
        await alice.until(lambda status: status.run.members_live == 3)
        async with lied_to(run, alice, honest[0], LIARS, stages=(1, 2), others=(bob, carol)):
            dan = await start("dan", invite, 1)
            refusal = await dan.says("far from most others' weights")
            assert f"{short_name(author_of(LIARS[0]))} is not believed for a while" in refusal
            given = await dan.says("weights of stage 1", "hashes verified")
            assert bob.name in given or carol.name in given
            assert "resumed at round" in await dan.says("trainer ready")

"""Liars announce one checkpoint of bad weights, ahead of all others, and serve it: a newcomer does not train on it.

Its trainer refuses weights that are worse on held-out text than a fresh start. Others can be better than that, and far
from everything that the run has learnt: a comparison with other members' weights reveals these.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import trio

from farandole.node.inspect.listing import CheckpointOffer
from farandole.node.store.folder import saved_round
from farandole.protocol.run.invite import peers_at
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.wire.identity import short_name

from ..patience import PATIENCE
from ..protocol.authors import author_of
from .daemons import POLL_INTERVAL, Daemon, joined
from .outsiders import Floats, fresh_start, noise_like, open_liar, write_poison
from .small_runs import TINY, small_manifest, write_run

LIARS: Final = (501, 502)
JUDGE: Final = 503
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


@asynccontextmanager
async def lied_to(
    run: SignedManifest,
    alice: Daemon,
    honest: Path,
    weights: Mapping[str, Floats],
    judges: tuple[int, ...] = (),
    stages: tuple[int, int] = (0, 1),
    others: tuple[Daemon, ...] = (),
) -> AsyncIterator[None]:
    """Run liars: two hold poison with these weights, as ``alice`` and ``others`` have heard.

    ``judges`` claim that their weights are like it. ``stages``: its stage, and the number of stages.
    """
    path, num_members = alice.home.parent / "poison.safetensors", (await alice.status()).run.members_live
    index = write_poison(honest, path, weights, ROUNDS_AHEAD, LIARS[0], run.run_id, *stages)
    victims = peers_at(alice.addresses)
    async with AsyncExitStack() as stack:
        for number in (*LIARS, *judges):
            is_judge = number in judges
            await stack.enter_async_context(open_liar(number, run.run_id, victims, path, index, is_judge=is_judge))
        await alice.until(lambda status: status.run.members_live == num_members + len(LIARS) + len(judges))
        for member in (alice, *others):  # the newcomer may sync with any of them
            await offers(member, index[0].id, len(LIARS))
        yield


async def offers(daemon: Daemon, checkpoint_id: bytes, num_holders: int) -> None:
    """Wait until a member has heard of ``num_holders`` holders of this checkpoint."""
    with trio.fail_after(PATIENCE):
        while True:
            known = msgspec.convert(await daemon.ask("checkpoints"), list[CheckpointOffer])
            if any(each.id == checkpoint_id.hex() and len(each.holders) >= num_holders for each in known):
                return
            await trio.sleep(POLL_INTERVAL)


async def test_a_newcomer_refuses_noise_that_liars_give_and_call_like_their_own(tmp_path: Path, texts: Path) -> None:
    run = write_run(tmp_path, small_manifest())
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *options(texts, NUM_ROUNDS)) as alice:
        honest = await trained(alice, NUM_ROUNDS)
        async with lied_to(run, alice, honest, noise_like(honest), (JUDGE,)):
            end = NUM_ROUNDS + ROUNDS_AHEAD + 2
            async with joined(tmp_path / "carol", alice.invite(run.run_id), *options(texts, end)) as carol:
                assert f"resumed at round {NUM_ROUNDS}" in await carol.says("trainer ready")
                await carol.says(f"all {end} rounds are done")
                status = await carol.status()
                assert status.loss is not None
                assert status.loss < 5.6, "that of a fresh start is 5.5, that of noise 20"
                assert any("their loss on held-out text is" in line for line in carol.said)
                assert any(short_name(author_of(LIARS[0])) in line for line in carol.said if "unfit" in line)
                givers = [line for line in carol.said if f"weights of round {NUM_ROUNDS} from" in line]
                assert alice.name in givers[-1]


async def test_a_newcomer_refuses_weights_that_are_no_worse_than_a_fresh_start_but_far_from_others(
    tmp_path: Path, texts: Path
) -> None:
    manifest = small_manifest()
    run = write_run(tmp_path, manifest)
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *options(texts, NUM_ROUNDS)) as alice:
        honest = await trained(alice, NUM_ROUNDS)
        invite = alice.invite(run.run_id)
        async with joined(tmp_path / "bob", invite, *options(texts, NUM_ROUNDS + 2)) as bob:
            await trained(bob, NUM_ROUNDS + 2)
            async with lied_to(run, alice, honest, fresh_start(manifest), others=(bob,)):
                end = NUM_ROUNDS + ROUNDS_AHEAD + 2
                async with joined(tmp_path / "carol", invite, *options(texts, end)) as carol:
                    refusal = await carol.says("far from most others' weights")
                    assert f"{short_name(author_of(LIARS[0]))} is not believed for a while" in refusal
                    await carol.says(f"all {end} rounds are done")
                    assert not any("their loss on held-out text is" in line for line in carol.said)
                    (given,) = [line for line in carol.said if "MB, hashes verified" in line]
                    assert alice.name in given or bob.name in given


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
        async with lied_to(run, alice, honest[0], noise_like(honest[0]), stages=(1, 2), others=(bob, carol)):
            dan = await start("dan", invite, 1)
            refusal = await dan.says("far from most others' weights")
            assert f"{short_name(author_of(LIARS[0]))} is not believed for a while" in refusal
            given = await dan.says("weights of stage 1", "hashes verified")
            assert bob.name in given or carol.name in given
            assert "resumed at round" in await dan.says("trainer ready")

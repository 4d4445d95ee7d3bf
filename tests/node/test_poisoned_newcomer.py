"""Two liars announce one checkpoint of noise, ahead of all others, and serve it: a newcomer does not train on it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from farandole.node.store.folder import saved_round
from farandole.protocol.identity import short_name
from farandole.protocol.invite import peers_at

from ..protocol.authors import author_of
from .daemons import joined
from .liars import open_liar, write_noise
from .small_runs import small_manifest, write_run

LIARS: Final = (501, 502)
NUM_ROUNDS: Final = 5
ROUNDS_AHEAD: Final = 3


async def test_a_newcomer_refuses_noise_that_two_give_and_trains_from_an_honest_members_weights(
    tmp_path: Path, texts: Path
) -> None:
    run = write_run(tmp_path, small_manifest())
    # No copies: what the liars announce is all that two hold, so the newcomer does fetch it.
    options = ("--data", str(texts), "--backup-seconds", "3600", "--max-rounds")
    manifest = str(tmp_path / "run.manifest")
    async with joined(tmp_path / "alice", manifest, *options, str(NUM_ROUNDS)) as alice:
        await alice.says("rounds are done")
        await alice.until(lambda status: status.trainer_pid is None)  # what it learnt is saved
        honest = max((alice.home / "checkpoints").glob("*.safetensors"), key=lambda path: saved_round(path) or 0)
        assert saved_round(honest) == NUM_ROUNDS
        noise = tmp_path / "noise.safetensors"
        index = write_noise(honest, noise, ROUNDS_AHEAD, LIARS[0], run.run_id)
        victims = peers_at(alice.addresses)
        async with (
            open_liar(LIARS[0], run.run_id, victims, noise, index),
            open_liar(LIARS[1], run.run_id, victims, noise, index),
        ):
            await alice.until(lambda status: status.run.members_live == 1 + len(LIARS))
            end = str(NUM_ROUNDS + ROUNDS_AHEAD + 2)
            async with joined(tmp_path / "carol", alice.invite(run.run_id), *options, end) as carol:
                assert f"resumed at round {NUM_ROUNDS}" in await carol.says("trainer ready")
                await carol.says(f"all {end} rounds are done")
                status = await carol.status()
                assert status.loss is not None
                assert status.loss < 5.6, "that of a fresh start is 5.5, that of noise 20"
                assert any("their loss on held-out text is" in line for line in carol.said)
                assert any(short_name(author_of(LIARS[0])) in line for line in carol.said if "unfit" in line)
                givers = [line for line in carol.said if f"weights of round {NUM_ROUNDS} from" in line]
                assert alice.name in givers[-1]

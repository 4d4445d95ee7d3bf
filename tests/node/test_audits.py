"""A run with audits, with real daemons: a member that trains otherwise than it says is found and avoided, no other."""

from __future__ import annotations

import json
from pathlib import Path

from farandole.node.base.errors import Exit

from .daemons import Daemon, farandole, joined, other_source
from .small_runs import small_manifest, write_run

MANIFEST = small_manifest(
    inner={"batch_size": 2, "learning_rate": 3e-3, "warmup_steps": 2, "deterministic": True},
    rounds={"inner_steps": 10, "round_seconds": 2.0, "exchange_seconds": 5.0},
    audits=1.0,
)


async def met_again(daemon: Daemon, peer: str) -> None:
    """Wait until two more exchanges with a peer are committed."""
    met = (await daemon.status()).partners.get(peer, 0)
    await daemon.until(lambda status: status.partners.get(peer, 0) > met + 1)


async def audit(invite: str, folder: Path, texts: Path) -> tuple[int, dict[str, str]]:
    """Audit as an outsider; return the exit code, and the verdict on each member."""
    answer = await farandole(folder / "outsider", "run", "audit", invite, "--data", str(texts), "--json")
    return answer.code, {row["peer_id"]: row["verdict"] for row in json.loads(answer.out)}


async def test_a_cheat_is_caught_by_all_and_no_honest_member_is(tmp_path: Path, texts: Path) -> None:
    run, data = write_run(tmp_path, MANIFEST), ("--data", str(texts))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = alice.invite(run.run_id)
        async with (
            joined(tmp_path / "bob", invite, *data) as bob,
            joined(tmp_path / "mallory", invite, *data, env=other_source("half")) as mallory,
        ):
            await mallory.says("step")
            peer = (await mallory.status()).peer_id
            for honest in (alice, bob):
                status = await honest.until(lambda status: status.audits is not None and peer in status.audits.avoided)
                assert status.audits is not None
                assert set(status.audits.avoided) == {peer}
                assert "gives something else" in status.audits.avoided[peer]
                assert status.audits.own
            for honest, other in ((alice, bob), (bob, alice)):
                await met_again(honest, (await other.status()).peer_id)
            for honest in (alice, bob):
                status = await honest.status()
                assert status.audits is not None
                assert set(status.audits.avoided) == {peer}, "the cheat accuses honest members, in vain"
            code, verdicts = await audit(invite, tmp_path, texts)
            assert code == Exit.VERDICT_FAILED
            assert verdicts.pop(peer) == "wrong"
            assert set(verdicts) == {(await honest.status()).peer_id for honest in (alice, bob)}
            assert set(verdicts.values()) <= {"right", "not given"}, "fast rounds may be over before they are fetched"

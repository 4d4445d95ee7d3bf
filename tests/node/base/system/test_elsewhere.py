"""A run of nodes without the features that Windows lacks: system calls, and changes to open files."""

from __future__ import annotations

import re
import signal
import stat
from pathlib import Path

import pytest
import trio

from farandole.node.base.exits import Exit
from farandole.node.base.system import endpoint, features
from farandole.protocol.run.manifest import SignedManifest

from ....patience import PATIENCE
from ...daemons import joined
from ...small_runs import small_manifest, write_run, write_text

pytestmark = pytest.mark.skipif(not features.HAS_PROC, reason="taken away from Linux")


@pytest.fixture
def denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the log of changes to open files that the nodes tried."""
    path = tmp_path / "denied"
    path.touch()
    monkeypatch.setenv("DENIED_LOG", str(path))
    monkeypatch.setenv(features.WITHOUT_VARIABLE, "all")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "as_on_windows"), prepend=":")
    monkeypatch.setattr(endpoint, "HAS_UNIX_SOCKETS", False)
    return path


@pytest.fixture
def run(tmp_path: Path) -> SignedManifest:
    write_text(tmp_path)
    return write_run(tmp_path, small_manifest())


async def test_three_nodes_train_one_is_killed_and_comes_back_all_leave(
    tmp_path: Path, run: SignedManifest, denied: Path
) -> None:
    data = ("--data", str(tmp_path / "text.txt"), "--checkpoint-seconds", "1")
    homes = [tmp_path / name for name in ("alice", "bob", "carol")]
    async with joined(homes[0], str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("listening on")
        invite = alice.invite(run.run_id)
        async with joined(homes[1], invite, *data) as bob:
            await bob.says("averaged with", alice.name)
            async with joined(homes[2], invite, *data) as carol:
                await carol.says("averaged with")
                await carol.says("averaged with")
                await carol.until(lambda status: status.run.members_live == 3)
                assert not (homes[2] / "control.sock").exists()
                assert stat.S_IMODE((homes[2] / "control.port").stat().st_mode) == 0o600
                before = set((homes[2] / "checkpoints" / "shared").iterdir())
                assert before
                await carol.end(signal.SIGKILL)
            async with joined(homes[2], *data) as carol:
                await carol.says("trainer ready", "resumed at round")
                assert not before & set((homes[2] / "checkpoints" / "shared").iterdir()), "memory is left behind"
                await carol.says("averaged with")
                await carol.ask("pause")
                await carol.says("paused")
                await carol.ask("resume")
                await carol.says("trainer ready", "resumed at round")
                await carol.says("averaged with")
                for daemon in (carol, bob, alice):
                    await daemon.ask("leave")
                    with trio.fail_after(PATIENCE):
                        assert await daemon.process.wait() == Exit.OK
    for home in homes:
        assert not (home / "control.port").exists()
        assert any((home / "checkpoints").glob("*.safetensors"))
    # Older checkpoints and copies that others may still request stay until the next save, shared memory that is in use
    # until the next trainer; no other file is denied, and nothing is renamed.
    kept = re.compile(r"os.remove .*\.(safetensors|blocks|shared)")
    assert [line for line in denied.read_text().splitlines() if not kept.match(line)] == []

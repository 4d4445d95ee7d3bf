"""Real daemons: a model in stages is pulled from its run, and another run goes on from it in other stages."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.exits import Exit
from farandole.node.base.settings import NodeSettings
from farandole.node.store.consolidated.folder import read_folder, verify_hashes
from farandole.protocol.run.manifest import decode_manifest, manifest_from_dict, sign_manifest

from ...daemons import PACE, Daemon, joined, started
from .validation import validation_loss

RUN: dict[str, Any] = {
    "name": "before",
    "model": {"num_layers": 2, "width": 32, "num_heads": 2, "hidden": 64, "context": 16, "vocabulary": 256},
    "inner": {"learning_rate": 2e-3, "warmup_steps": 2, "batch_size": 4, "total_steps": 2_000},
    "rounds": {"inner_steps": 30, "round_seconds": 2.0, "exchange_seconds": 5.0},
    "pipeline": {"microbatch_size": 2},
    "data": {"source": "text", "held_out": 0.2},
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"text number {i}, which goes on and on, as all of them do. " * 20)
    return folder


async def farandole(*arguments: object) -> None:
    """Run a command in its own process, which must exit with code 0."""
    result = await trio.run_process(
        [sys.executable, "-m", "farandole.node", *map(str, arguments)],
        check=False,
        capture_stdout=True,
        capture_stderr=True,
    )
    assert result.returncode == Exit.OK, (result.stdout + result.stderr).decode()


async def inner_steps(daemon: Daemon, count: int) -> None:
    """Wait until the node has taken ``count`` more inner steps; a slow machine takes few per round."""
    while count > 0:
        count -= int((await daemon.says(" inner steps")).partition(": ")[2].split()[0])


async def rounds(daemon: Daemon, count: int) -> None:
    for _ in range(count):
        await daemon.says("inner steps")


async def test_two_stages_are_pulled_and_go_on_as_one(tmp_path: Path, texts: Path) -> None:
    data = ("--data", str(texts), "--checkpoint-seconds", "1")
    before = sign_manifest(
        manifest_from_dict({**RUN, "model": {**RUN["model"], "num_stages": 2}}), Ed25519PrivateKey.generate()
    )
    (tmp_path / "before.manifest").write_bytes(before.encode())
    pull = ("checkpoint", "pull", "--home", tmp_path / "puller", "--listen", "/ip4/127.0.0.1/tcp/0", "--no-mdns")
    async with joined(tmp_path / "ann", str(tmp_path / "before.manifest"), "--stage", "0", *data) as ann:
        await ann.says("listening on")
        invite = ann.invite(before.run_id)
        async with joined(tmp_path / "bob", invite, "--stage", "1", *data) as bob:
            await inner_steps(ann, 60)
            await farandole(*pull, invite, "--to", tmp_path / "model")
            assert await bob.end(signal.SIGTERM) == Exit.OK
        assert await ann.end(signal.SIGTERM) == Exit.OK
    model = read_folder(tmp_path / "model")
    assert model.index.round >= 1
    verify_hashes(model)
    last = validation_loss(model, texts)

    rounds_of_5_seconds = "[rounds]\ninner_steps = 0\nround_seconds = 5\n"
    changes = f'name = "after"\n[model]\nnum_stages = 1\n[outer]\ncodec = "int8"\n{rounds_of_5_seconds}'
    (tmp_path / "after.toml").write_text(changes)
    resume = ("checkpoint", "resume", "--home", tmp_path / "creator", tmp_path / "model", tmp_path / "after.toml")
    await farandole(*resume, "-o", tmp_path / "after.manifest")
    manifest, after = decode_manifest((tmp_path / "after.manifest").read_bytes())
    assert manifest.start is not None

    join = ("join", *PACE, "--heartbeat-seconds", "1", "--validate-every", "1", "--no-mdns", *data)
    async with started(tmp_path / "cyd", *join, str(tmp_path / "after.manifest")) as cyd:  # she lacks the folder
        await cyd.says("looking for the weights that this run starts from")
        there = ("--bootstrap", cyd.addresses[0], "--start", str(tmp_path / "model"))
        async with started(tmp_path / "dan", *join, str(tmp_path / "after.manifest"), *there) as dan:
            await dan.says("trainer ready", "from the run's starting checkpoint")
            await cyd.says("trainer ready")  # from the run's start, or, if she is late, from dan's own
            await cyd.says("averaged with", dan.name)
            await rounds(dan, 2)
            status = await dan.ask("status")
            first_round, first = status["validation"][0]  # measured before any training
            assert first_round == 0
            assert first == pytest.approx(last, rel=1e-3)
            assert status["bits_per_byte"] == pytest.approx(
                status["validation"][-1][1] / math.log(2)
            )  # bytes are tokens
            assert last < 4.5 < math.log(256)
            assert status["inner_steps"] > manifest.start.inner_steps
            await dan.end(signal.SIGKILL)
        # the node with the folder is gone: cyd gives her own weights, and a newcomer to a running run needs no start
        newcomer = cyd.invite(after.run_id)
        async with started(tmp_path / "eve", *join, newcomer) as eve:
            await eve.says("trainer ready", "resumed at round")
            await eve.says("averaged with", cyd.name)
        await farandole(*pull, newcomer, "--to", tmp_path / "again")
    again = read_folder(tmp_path / "again")
    assert again.index.inner_steps > model.index.inner_steps
    assert validation_loss(again, texts) < last * 1.01
    assert not NodeSettings(home=tmp_path / "puller").checkpoints.exists()

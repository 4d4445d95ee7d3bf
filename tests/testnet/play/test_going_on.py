"""A check of `make soak`: a run goes on in other stages, and as a model of transformers."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.exits import Exit
from farandole.node.store.consolidated.folder import read_folder
from farandole.protocol.run.manifest import SignedManifest, decode_manifest, sign_manifest
from farandole.protocol.run.rules import NoLoCoConfig, required_vectors
from farandole.testnet.play.scenario import load_scenario

from ...node.daemons import Daemon, started
from ...node.store.consolidated.runs import assert_same_logits, learner_from

VECTORS = required_vectors(NoLoCoConfig())

KEY = Ed25519PrivateKey.generate()


async def farandole(*arguments: object) -> None:
    """Run a command in its own process, which must exit with code 0."""
    command = [sys.executable, "-m", "farandole.node", *map(str, arguments)]
    result = await trio.run_process(command, check=False, capture_stdout=True, capture_stderr=True)
    assert result.returncode == Exit.OK, (result.stdout + result.stderr).decode()


async def play(folder: Path, manifest: Path, num_nodes: int, rounds: int, to: Path, start: Sequence[str] = ()) -> None:
    """Run ``num_nodes`` nodes until the first has had ``rounds`` rounds, pull the model, and end them all."""
    join = ("join", "--no-mdns", "--heartbeat-seconds", "1", "--checkpoint-seconds", "3")
    run_id = decode_manifest(await trio.Path(manifest).read_bytes())[1].run_id
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(started(folder / "0", *join, str(manifest), *start))
        await first.says("listening on")
        invite = first.invite(run_id)
        others = [
            await stack.enter_async_context(started(folder / f"{number}", *join, invite))
            for number in range(1, num_nodes)
        ]
        async with trio.open_nursery() as nursery:
            for other in others:
                nursery.start_soon(drain, other)
            taken = 0
            while taken < rounds:
                line = await first.says(" inner step")
                taken += int(line.partition(": ")[2].split()[0]) > 0
            nursery.start_soon(drain, first)
            home = ("--home", folder / "puller", "--listen", "/ip4/127.0.0.1/tcp/0", "--no-mdns")
            await farandole("checkpoint", "pull", invite, *home, "--to", to, "--merge", "2")
            nursery.cancel_scope.cancel()
        for daemon in (first, *others):
            daemon.process.send_signal(signal.SIGTERM)
        for daemon in (first, *others):
            assert await daemon.process.wait() == Exit.OK


async def drain(daemon: Daemon) -> None:
    """Read all output, so that the process never blocks on it."""
    assert daemon.process.stdout is not None
    while await daemon.process.stdout.receive_some():
        pass


def first_loss(folder: Path) -> float:
    """Return the held-out loss at which the first node of a run began, from the logs, whose lines have times."""
    lines = [line for log in folder.glob("*/log") for line in log.read_text().splitlines()]
    first = min(line for line in lines if "have a held-out loss of" in line)
    return float(first.partition("have a held-out loss of")[2].split()[0])


@pytest.mark.soak
async def test_four_stages_of_eight_nodes_go_on_as_two_of_five_and_as_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    torch: Any = pytest.importorskip("torch")
    before: SignedManifest = sign_manifest(load_scenario("stages").manifest(0), KEY)
    (tmp_path / "before.manifest").write_bytes(before.encode())
    await play(tmp_path / "before", tmp_path / "before.manifest", 8, 12, tmp_path / "model")
    model = read_folder(tmp_path / "model")
    last = learner_from(model).evaluate(8)

    (tmp_path / "after.toml").write_text('name = "after"\n[model]\nnum_stages = 2\n[outer]\ncodec = "int8"\n')
    resume = ("checkpoint", "resume", tmp_path / "model", tmp_path / "after.toml", "-o", tmp_path / "after.manifest")
    await farandole(*resume, "--home", tmp_path / "creator")
    start = ("--start", str(tmp_path / "model"))
    await play(tmp_path / "after", tmp_path / "after.manifest", 5, 1, tmp_path / "again", start)
    again = read_folder(tmp_path / "again")
    first, then = first_loss(tmp_path / "after"), learner_from(again).evaluate(8)
    print(
        f"\nloss {last:.4f} at round {model.index.round} of the first run, {model.index.inner_steps} inner steps; "
        f"{first:.4f} when the second began; {then:.4f} at its round {again.index.round}, {again.index.inner_steps} "
        "inner steps"
    )
    assert again.index.run_id != model.index.run_id
    assert again.index.inner_steps > model.index.inner_steps
    assert first == pytest.approx(last, rel=0.01)
    assert then < 1.01 * last

    await farandole("checkpoint", "export", tmp_path / "again", "--to", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same_logits(theirs, learner_from(again).replica.module, torch.arange(2 * 64).view(2, 64) * 37 % 256)

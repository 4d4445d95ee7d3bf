"""How many files a contribution, a heartbeat and a microbatch pass on their way, recorded while real nodes run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import trio

from .node.daemons import joined
from .node.small_runs import TINY, small_manifest, write_run, write_text
from .patience import PATIENCE

BUDGET = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["farandole"]["budget"]
EXCHANGE = "contribute encode _encode take_in _take_in screen _screen take_outer_step"
# Where a busy machine is warned of: a line of the log is no part of a walk.
LOGGING = {"node/base/logs.py", "node/base/system/terminal.py"}
# Where a contribution does not count as a whole, which happens to honest partners now and then: the owner is told, and
# a suspicion is published. And where a channel is opened, at the first meeting with a partner.
UNUSUAL = {
    "contribution": {
        *("protocol/state/entries.py", "protocol/state/state.py", "protocol/wire/identity.py"),
        *(f"protocol/{name}.py" for name in ("exchange/bulk", "mesh/dialling", "wire/framing")),
        *(f"node/mesh/reach/{name}.py" for name in ("connectivity", "punching", "reachability")),
        *("node/base/system/sockets.py", "node/mesh/addresses.py", "node/mesh/host.py"),
    }
}
# Below a walk: opening a stream, and its bytes, are the same for whatever is sent.
MESH = ("node/mesh/", "protocol/mesh/")
# The functions that carry a thing, each in the task or thread that calls it.
WHOLE = {
    "contribution": [
        *(("node/trainer_process/exchange.py", f"EngineExchange.{name}") for name in EXCHANGE.split()),
        ("node/loop/training.py", "TrainerSession.contribute"),
        ("node/loop/training.py", "Training._exchange"),
        ("node/bulk/exchange_service.py", "ExchangeSession.hold.<locals>.run"),
        ("node/bulk/pipe.py", "BulkPipe.run.<locals>.until_failed"),
        ("node/bulk/channel.py", "BulkChannel.is_fit"),
        ("training/engine/learner.py", "HeldOutLoss.on_exam"),
        ("protocol/rounds/trainer_rounds.py", "TrainerRounds._contribute"),
        ("protocol/rounds/trainer_rounds.py", "TrainerRounds._finish_round"),
    ],
    "heartbeat": [
        ("node/state/membership.py", "Announcer.beat"),
        ("node/state/gossip.py", "GossipService._tick"),
        ("node/state/gossip.py", "GossipService._receive_push"),
    ],
}
CUT = {
    "microbatch": [
        ("node/loop/pipeline_service.py", "ActivationLink._read"),
        ("node/loop/pipeline_service.py", "ActivationLink._write_data"),
        ("node/loop/pipeline_service.py", "PipelineService.handle"),
        ("training/engine/stage_worker.py", "StageWorker.forward"),
        ("training/engine/stage_worker.py", "StageWorker.tail"),
        ("training/engine/stage_worker.py", "StageWorker.backward"),
    ]
}


def passed_in(folder: Path, walk: str) -> set[str]:
    passed = {name for path in folder.glob(f"{walk}-*.txt") for name in path.read_text().split()}
    return passed - LOGGING - UNUSUAL.get(walk, set())


# Whole, its contributions are large enough for a channel of their own.
@pytest.mark.parametrize(("walks", "model"), [(WHOLE, {"width": 128}), (CUT, {"num_stages": 2})])
async def test_few_files_are_passed(
    walks: dict[str, list[tuple[str, str]]], model: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "walks.json").write_text(json.dumps(walks))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "walks"))
    monkeypatch.setenv("FARANDOLE_WALKS", str(tmp_path))
    monkeypatch.setenv("FARANDOLE_BACKUP_SECONDS", "3600")  # a copy of a checkpoint takes the same pipe
    signed, text = (
        write_run(tmp_path, small_manifest(model=TINY | {"num_layers": 4} | model)),
        str(write_text(tmp_path)),
    )
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), "--data", text) as alice:
        await alice.says("listening")
        async with joined(tmp_path / "bob", alice.invite(signed.run_id), "--data", text) as bob:
            await bob.says("round 2")
            (tmp_path / "begin").touch()
            # Until each function has run: one that never does has another name now.
            with trio.fail_after(PATIENCE):
                while any({file for file, _ in walks[walk]} - passed_in(tmp_path, walk) for walk in walks):
                    await bob.says("round")
            await bob.says("round")
    for walk in walks:
        passed = passed_in(tmp_path, walk)
        in_mesh = {file for file in passed if file.startswith(MESH)}
        assert len(passed - in_mesh) <= BUDGET["files_of_a_walk"][walk], sorted(passed)
        assert len(in_mesh) <= BUDGET["files_of_a_walk"]["stream"], sorted(in_mesh)

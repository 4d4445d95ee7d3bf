"""A run that is evaluated by a member, with real daemons: the others have its figures in their curves."""

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from farandole.node.base.exits import Exit
from farandole.node.base.settings import NodeSettings
from farandole.node.base.system.processes import may_exist
from farandole.node.daemon import run_node
from farandole.protocol.run.manifest import SignedManifest
from farandole.training.base.errors import how_to_add

from ..patience import PATIENCE
from ..task_files import write_tasks
from .daemons import POLL_INTERVAL, joined
from .hosts import LOOPBACK
from .small_runs import small_manifest, write_run

EVERY = 2
SAVES = ("--checkpoint-seconds", "1")


@pytest.fixture
def run(tmp_path: Path) -> SignedManifest:
    tasks = {"tasks": ["tiny_choice", "tiny_text"], "every_rounds": EVERY}
    return write_run(tmp_path, small_manifest(evaluation=tasks))


def metrics(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "farandole.node", "run", "metrics", "--home", str(home), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def test_figures_of_one_member_are_in_the_curve_of_another_while_both_train(
    tmp_path: Path, run: SignedManifest, texts: Path
) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    data = ("--data", str(texts), *SAVES)
    evaluates = ("--evaluate", "--evaluate-include", str(tasks))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data, *evaluates) as alice:
        await alice.says("listening on")
        async with joined(tmp_path / "bob", alice.invite(run.run_id), *data) as bob:
            await bob.says("listening on")
            status = await bob.until(lambda status: len(marks_of(tmp_path / "bob")) > 1)
            measured = {(each.task, each.metric) for each in status.run.evaluations}
            assert {("tiny_choice", "acc"), ("tiny_text", "bits_per_byte")} <= measured
            peer = (await alice.status()).peer_id
            assert {author for each in status.run.evaluations for author in each.authors} == {peer}
            before = (await alice.status()).round
            await alice.until(lambda status: status.round > before)
            assert await bob.end(signal.SIGTERM) == Exit.OK
        table = metrics(tmp_path / "bob")
        assert "tiny_choice" in table
        rows = list(csv.DictReader(io.StringIO(metrics(tmp_path / "bob", "--evaluations", "--csv"))))
        assert all(int(row["mark"]) % EVERY == 0 for row in rows)
        assert {row["authors"] for row in rows} == {peer}
        bits = [float(row["value"]) for row in rows if row["metric"] == "bits_per_byte"]
        assert all(1 < each < 12 for each in bits)
        assert await alice.end(signal.SIGINT) == Exit.OK
    assert not any("is not evaluated by this node" in line for line in alice.said)


def marks_of(home: Path) -> set[str]:
    path = home / "evaluations.jsonl"
    return set(path.read_text().splitlines()) if path.exists() else set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_the_process_that_evaluates_ends_with_its_node(
    tmp_path: Path, run: SignedManifest, texts: Path, number: signal.Signals
) -> None:
    """Its task never ends, and it ignores Ctrl-C: that is for the node, which leaves cleanly."""
    tasks, place = write_tasks(tmp_path / "tasks"), tmp_path / "pid"
    (tasks / "asking.py").write_text(
        "import os, signal\n\n\ndef question(doc):\n"
        f"    open('{place}.new', 'w').write(str(os.getpid()))\n    os.replace('{place}.new', '{place}')\n"
        "    signal.pause()\n"
    )
    text = (tasks / "choice.yaml").read_text()
    (tasks / "choice.yaml").write_text(text.replace('"{{question}}"', "!function asking.question"))
    arguments = ("--data", str(texts), *SAVES, "--evaluate", "--evaluate-include", str(tasks))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *arguments) as alice:
        with trio.fail_after(PATIENCE):
            while not place.exists():  # noqa: ASYNC110  # another process writes the file
                await trio.sleep(POLL_INTERVAL)
        pid = int(place.read_text())
        assert may_exist(pid)
        assert await alice.end(number) == (Exit.OK if number == signal.SIGINT else -signal.SIGKILL)
    with trio.fail_after(PATIENCE):
        while may_exist(pid):  # noqa: ASYNC110  # it is no child of this process
            await trio.sleep(POLL_INTERVAL)


async def test_a_failure_is_said_with_its_reason_and_training_goes_on(
    tmp_path: Path, run: SignedManifest, texts: Path
) -> None:
    """The folder lacks the run's tasks, and the harness has none of these names."""
    tasks = write_tasks(tmp_path / "tasks")
    (tasks / "choice.yaml").unlink()
    arguments = ("--data", str(texts), *SAVES, "--evaluate", "--evaluate-include", str(tasks))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *arguments) as alice:
        said = await alice.says("is not evaluated by this node")
        assert "knows no task 'tiny_choice'" in said
        before = (await alice.status()).round
        await alice.until(lambda status: status.round > before)
        assert (await alice.status()).run.evaluations == []


async def test_without_the_harness_a_node_says_what_to_install_before_it_joins(
    tmp_path: Path, run: SignedManifest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.node.base.requirements.find_spec", lambda name: None)
    manifest = tmp_path / "run.manifest"
    settings = NodeSettings(home=tmp_path / "home", manifest=manifest, listen=[*LOOPBACK], evaluate=True)
    assert await run_node(settings) == Exit.CANNOT_JOIN
    out, err = capsys.readouterr()
    assert how_to_add("eval") in err
    assert "listening" not in out

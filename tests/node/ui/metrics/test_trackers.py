"""The command with the real libraries of the trackers, read back by these. Nothing leaves this machine."""

from __future__ import annotations

import abc
import getpass
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from farandole.node.base.exits import Exit
from farandole.node.base.identity import load_or_create_key
from farandole.node.cli import main
from farandole.node.status.round_log import figures_of
from farandole.protocol.wire.identity import peer_id_of, public_bytes
from farandole.training.base.errors import how_to_add

from ....patience import PATIENCE
from .conftest import SIGNED, NodeFolder, rounds

_OURS = ("loss/", "round/", "exchange/")


@dataclass(frozen=True)
class Kept:
    """A run as a tracker has it."""

    name: str
    settings: dict[str, str]
    rounds: dict[int, list[dict[str, float]]]
    """Step -> what was logged for it, each time."""


class Place(abc.ABC):
    """A tracker of this test's own: its target, and the variables that lead there."""

    library: str
    target: str
    files: Sequence[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        return {}

    @abc.abstractmethod
    def runs(self) -> list[Kept]:
        """Return the runs, read by the tracker's own library."""

    def stored(self) -> bytes:
        """Return all that is kept, or sent later."""
        return b"".join(path.read_bytes() for pattern in self.files for path in self.folder.rglob(pattern))


class Trackio(Place):
    library = "trackio"
    target = "trackio:mine"
    files = ("trackio/*.db*",)
    # Trackio reads its variables when it is imported.
    _READ = """
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage
runs = [(each.name, each.config, SQLiteStorage.get_logs("mine", each.name, run_id=each.id))
        for each in trackio.Api().runs("mine")]
json.dump(runs, sys.stdout, default=str)
"""

    @property
    def environment(self) -> dict[str, str]:
        return {"TRACKIO_DIR": str(self.folder / "trackio")}

    def runs(self) -> list[Kept]:
        command = [sys.executable, "-c", self._READ]
        environment = {**os.environ, **self.environment, "HF_HUB_OFFLINE": "1"}
        runs = json.loads(subprocess.check_output(command, env=environment, text=True))
        return [self._kept(name, config, logs) for name, config, logs in runs]

    def _kept(self, name: str, config: dict[str, Any], logs: list[dict[str, Any]]) -> Kept:
        assert config["_Username"] is None
        kept = Kept(name, {key: str(value) for key, value in config.items() if not key.startswith("_")}, {})
        for row in logs:
            values = {key: value for key, value in row.items() if key not in ("step", "timestamp")}
            kept.rounds.setdefault(row["step"], []).append(values)
        return kept


class Wandb(Place):
    library = "wandb"
    target = "wandb:mine"
    files = ("wandb/offline-run-*/*.wandb", "wandb/offline-run-*/files/*")

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_MODE": "offline", "WANDB_DIR": str(self.folder)}

    def runs(self) -> list[Kept]:
        """Return the runs by their ids; an offline run has one file for each start."""
        runs: dict[str, Kept] = {}
        for path in sorted(self.folder.glob("wandb/offline-run-*/run-*.wandb")):
            records = list(self._records(path.read_bytes()))
            run = next(each.run for each in records if each.HasField("run"))
            config = {each.key: json.loads(each.value_json) for each in run.config.update}
            settings = {key: str(value) for key, value in config.items() if key != "_wandb"}
            kept = runs.setdefault(run.run_id, Kept(run.display_name, settings, {}))
            assert (run.project, kept.settings) == ("mine", settings)
            for record in records:
                if record.HasField("history"):
                    self._add(record.history, kept)
        return list(runs.values())

    def _add(self, history: Any, kept: Kept) -> None:
        row = {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in history.item}
        ours = {key: value for key, value in row.items() if key.startswith(_OURS)}
        kept.rounds.setdefault(history.step.num, []).append(ours)
        assert row["_timestamp"] == pytest.approx(rounds(history.step.num)[0].at)

    def _records(self, log: bytes) -> Iterator[Any]:
        """Yield the records of a file: chunks of LevelDB's log format, in blocks of 32 KiB after 7 bytes of header."""
        from wandb.proto.wandb_internal_pb2 import Record

        assert log[:4] == b":W&B"
        position, parts = 7, b""
        while position + 7 <= len(log):
            left = 32_768 - position % 32_768
            if left < 7:
                position += left
                continue
            _, size, kind = struct.unpack("<IHB", log[position : position + 7])
            parts += log[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):  # the whole record, or its last part
                yield Record.FromString(parts)
                parts = b""


@pytest.fixture(params=[Trackio, Wandb], ids=lambda kind: str(kind.library))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind: type[Place] = request.param
    if find_spec(kind.library) is None:
        pytest.skip(f"pip install 'farandole[{kind.library}]'")
    return kind(tmp_path)


def command(node: NodeFolder, place: Place, *options: str) -> list[str]:
    arguments = ["run", "metrics", "--home", str(node.path), "--report", place.target, *options]
    return [sys.executable, "-m", "farandole.node", *arguments]


def environment(place: Place) -> dict[str, str]:
    """Return an environment in which nothing that this machine knows leads to a tracker elsewhere."""
    foreign = ("WANDB_", "TRACKIO_", "HF_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | place.environment


def test_a_run_has_each_round_once_and_nothing_of_this_machine(node: NodeFolder, place: Place) -> None:
    """Some are sent at once, others by a second process while the node trains, until Ctrl-C."""
    node.add(rounds(0, 1, 2))
    around: dict[str, Any] = {"env": environment(place), "cwd": place.folder, "text": True}
    once = subprocess.run(command(node, place, "--once"), capture_output=True, **around)
    assert (once.returncode, once.stdout.splitlines()[-1:]) == (Exit.OK, ["3 rounds sent"]), once.stderr
    node.add(rounds(3))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command(node, place), start_new_session=True, **pipes, **around) as follower:
        said: Iterator[str] = iter(follower.stderr or ())
        assert "round 3 sent\n" in said
        node.add(rounds(4))
        assert "round 4 sent\n" in said
        os.killpg(follower.pid, signal.SIGINT)  # as a terminal does it
        out, rest = follower.communicate(timeout=PATIENCE)
    assert follower.returncode == Exit.OK, rest
    assert out.splitlines()[-1] == "2 rounds sent; the same command goes on from there"

    (run,) = place.runs()
    peer_id = peer_id_of(public_bytes(load_or_create_key(node.path / "key")))
    assert run.name == f"tiny run {peer_id[-8:]}"
    assert run.settings["run id"] == SIGNED.run_id.hex()
    assert run.settings["outer.codec"] == "fp32"
    assert run.settings["model.width"] == "16"
    assert run.rounds == {each.record.round: [pytest.approx(each.values)] for each in figures_of(rounds(0, 1, 2, 3, 4))}
    assert [text for text in private_words(node) if text.encode() in place.stored()] == []


def private_words(node: NodeFolder) -> list[str]:
    """Return this machine's name, its user's, and paths that a tracker might take from a process."""
    paths = (str(node.path), str(Path(__file__).parents[4]), sys.executable, os.path.realpath(sys.executable))
    names = (getpass.getuser(), socket.gethostname())
    return [*paths, f"{names[0]}@", *(f'"{name}"' for name in names)]


def test_a_missing_library_is_named(
    node: NodeFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", "metrics", "--home", str(node.path), *arguments])
        return ended.value.code, capsys.readouterr().err

    for name in ("trackio", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        code, said = run("--report", f"{name}:mine")
        assert code == Exit.BAD_INPUT
        assert how_to_add(name) in said
    assert run("--report", "elsewhere:mine")[0] == Exit.BAD_INPUT


@pytest.mark.parametrize("options", [["--report", "wandb:x", "--csv"], ["--report", "wandb:x", "-n", "3"], ["--once"]])
def test_options_that_do_not_go_together(
    node: NodeFolder, options: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "metrics", "--home", str(node.path), *options])
    assert ended.value.code == Exit.USAGE


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "metrics", "--home", str(tmp_path), "--report", "wandb:mine"])
    assert ended.value.code == Exit.BAD_INPUT
    assert "knows no run" in capsys.readouterr().err

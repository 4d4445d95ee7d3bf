"""`farandole uninstall`: it removes what a node made, and nothing else."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.node.app.commands.uninstall import INSTALL_MARK, PATTERNS, foreign_in, made_in
from farandole.node.base.exits import Exit
from farandole.node.base.identity import locked
from farandole.node.base.settings import InHome, NodeSettings
from farandole.node.base.system.sockets import bound_socket

from .conftest import Run

MADE = (
    *("store.sqlite", "store.sqlite-wal", "store.sqlite.mark", "log", "log.1", "rounds.jsonl"),
    *("checkpoints/stage-0-round-3.safetensors", "checkpoints/copy-0-ab.blocks.index", "tokens/ab.tokens"),
)
FOREIGN = ("thesis.txt", "checkpoints/mine.safetensors")


@pytest.fixture
def used(run: Run, home: Path) -> Path:
    """Return a node's folder with one file of each kind."""
    assert run("id")[0] == Exit.OK
    for name in MADE:
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_bytes(bytes(100_000))
    (home / "config.toml").touch()
    return home


def files(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


def test_it_lists_what_is_there_and_removes_all_of_it(run: Run, used: Path) -> None:
    code, out, _ = run("uninstall", "--yes")
    assert code == Exit.OK
    for what in ("checkpoints", "tokenised text (cache)", "logs", "run state", "settings", "identity"):
        assert what in out
    assert "0.3 MB" in out  # the three files of the log
    assert not used.exists()
    assert "nothing" not in out
    assert "pip uninstall farandole" in out


def test_files_of_others_stay_and_are_named(run: Run, used: Path, tmp_path: Path) -> None:
    for name in FOREIGN:
        (used / name).write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "ab.tokens").write_text("mine")
    (used / "log.2").symlink_to(elsewhere / "ab.tokens")
    (used / "tokens" / "ab.tokens").unlink()
    (used / "tokens").rmdir()
    (used / "tokens").symlink_to(elsewhere)
    code, out, _ = run("uninstall", "--yes")
    assert code == Exit.OK
    assert files(used) == {*FOREIGN, "log.2"}
    assert files(elsewhere) == {"ab.tokens"}, "no link is followed"
    for name in FOREIGN:
        assert str(used / name) in out


def test_a_folder_that_is_no_node_s_is_left_alone(run: Run, home: Path) -> None:
    home.mkdir()
    (home / "log").write_text("of another program")
    code, out, _ = run("uninstall", "--yes")
    assert code == Exit.OK
    assert "has no node's data" in out
    assert files(home) == {"log"}


def test_the_identity_can_stay(run: Run, used: Path) -> None:
    before = run("id")[1]
    assert run("uninstall", "--yes", "--keep-identity")[0] == Exit.OK
    assert files(used) == {"key", "config.toml"}
    assert run("id")[1] == before


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_without_a_yes_nothing_is_removed(run: Run, used: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    before = files(used)
    assert run("uninstall")[0] == Exit.INTERRUPTED
    assert files(used) - {"lock"} == before - {"lock"}


def test_it_refuses_while_a_node_runs(run: Run, used: Path) -> None:
    before = files(used)
    with locked(used / "lock"):
        code, _, err = run("uninstall", "--yes")
    assert code == Exit.HOME_IN_USE
    assert "farandole leave" in err
    assert before <= files(used)


def test_the_folders_of_own_loops_are_removed_too(run: Run, used: Path) -> None:
    inner = used / "runs" / "2f777047d3e4bba1"
    assert run("id", "--home", inner)[0] == Exit.OK
    assert run("uninstall", "--yes")[0] == Exit.OK
    assert not used.exists()


def test_it_says_how_to_remove_the_program(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for receipt, command in (
        ("uv-receipt.toml", "uv tool uninstall farandole"),
        ("pipx_metadata.json", "pipx uninstall farandole"),
        (INSTALL_MARK, f"rm -r {tmp_path / INSTALL_MARK}"),
    ):
        prefix = tmp_path / receipt
        prefix.mkdir()
        (prefix / receipt).touch()
        monkeypatch.setattr(sys, "prefix", str(prefix))
        assert command in run("uninstall", "--yes")[1]


@pytest.mark.soak
def test_nothing_of_a_real_node_is_foreign(tmp_path: Path) -> None:
    """The patterns know every file that a testnet's nodes have made."""
    command = [sys.executable, "-m", "farandole.node", "testnet", "run", "demo", "--nodes", "2", "--rounds", "2"]
    subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, check=False, timeout=240)
    homes = [path.parent for path in tmp_path.rglob("store.sqlite")]
    assert homes
    for home in homes:
        assert foreign_in(home) == []


def test_sockets_are_known_to_be_a_nodes(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 30)
    home.mkdir()
    (home / "key").touch()
    with bound_socket(home / "control.sock"):
        (place,) = made_in(home)["sockets"]
        assert foreign_in(home) == []
        assert place.parent != home


def test_every_file_that_settings_name_is_known_to_be_a_nodes(tmp_path: Path) -> None:
    """A socket that is missing here would be listed as somebody else's file, and keep the folder."""
    patterns = [pattern.partition("/")[0] for kinds in PATTERNS.values() for pattern in kinds]
    names = [
        getattr(NodeSettings(home=tmp_path), name).name
        for name, value in vars(NodeSettings).items()
        if isinstance(value, InHome)
    ]
    assert "control.sock" in names
    assert not set(names) - set(patterns)

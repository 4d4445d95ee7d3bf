"""The key file and its lock."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.node.base.identity import IdentityError, IdentityInUseError, keep_private, load_or_create_key, locked
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_of, public_bytes, public_key_of


def test_a_key_is_made_once_and_read_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "home" / "key"
    first = load_or_create_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]
    monkeypatch.setattr("os.open", full)
    assert public_bytes(load_or_create_key(path)) == public_bytes(first)


@pytest.mark.parametrize(
    ("content", "mode", "words"), [(bytes(32), 0o644, "chmod 600"), (b"short", 0o600, "not a farandole key")]
)
def test_a_key_that_is_damaged_or_that_others_can_read_is_refused_and_left_alone(
    tmp_path: Path, content: bytes, mode: int, words: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(IdentityError, match=words):
        load_or_create_key(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "mode"),
    [((), 0o700), (("store.sqlite", "key"), 0o700), (("thesis.tex",), 0o755)],
    ids=["empty", "a node's", "another's"],
)
def test_a_nodes_folder_is_its_owners_alone_and_another_stays_as_it_is(
    tmp_path: Path, content: tuple[str, ...], mode: int
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    for name in content:
        (home / name).touch()
    umask = os.umask(0o022)
    try:
        keep_private(home)
        (home / "new").touch()
    finally:
        os.umask(umask)
    assert stat.S_IMODE(home.stat().st_mode) == mode
    assert stat.S_IMODE((home / "new").stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    home = tmp_path / "file" / "home"
    with pytest.raises(IdentityError, match="--home"):
        load_or_create_key(home / "key")
    with pytest.raises(IdentityError, match="--home"), locked(home / "lock"):
        pass


def test_the_lock_keeps_a_second_process_out_and_dies_with_the_first(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    hold = (
        "from farandole.node.base.identity import locked; from pathlib import Path\n"
        f"with locked(Path({str(path)!r})): print('held', flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(IdentityInUseError, match=str(holder.pid)), locked(path):
            pass
        holder.kill()
    with locked(path):
        assert path.read_text().strip().isdigit()


def test_peer_ids_and_keys_convert_both_ways(tmp_path: Path) -> None:
    public = public_bytes(load_or_create_key(tmp_path / "key"))
    assert peer_id_of(public).startswith("12D3KooW")
    assert public_key_of(peer_id_of(public)) == public
    for wrong in ("", "0OIl", "12D3", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "1" * 5_000):
        with pytest.raises(RemoteProtocolError):
            public_key_of(wrong)

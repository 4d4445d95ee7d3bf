"""A run's public page, written by a relay."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.exits import Exit
from farandole.node.relay_page import BOARD_FILE, INDEX_FILE, RUN_FILE, PublicPage
from farandole.node.status.public_run import PublicMember, PublicRun
from farandole.node.ui.public_page import MAX_ROWS_SHOWN, public_page
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.state.board import Board
from farandole.protocol.state.entries import Kind, Progress
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.errors import FarandoleError

from ..patience import PATIENCE
from .daemons import PACE, joined, started
from .small_runs import small_manifest, write_run

RUN = b"r" * 32
HOSTILE = "<script>alert(1)</script>\"'&"


def run_at(at: float, loss: float | None = 2.5, **changes: Any) -> PublicRun:
    members = [PublicMember("12D3KooWabcdefgh", "live", 3_000, 12, 950.0, HOSTILE)]
    run = PublicRun(
        name=HOSTILE,
        run_id=RUN.hex(),
        parameters=41_000,
        at=at,
        live=1,
        round=12,
        tokens=3_000,
        tokens_per_second=950.0,
        loss=loss,
        notice=HOSTILE,
        members=members,
    )
    return msgspec.structs.replace(run, **changes)


class Tags(HTMLParser):
    """The tags of a page, and whether they are balanced."""

    VOID = frozenset({"meta", "polyline", "line"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_what_members_write_cannot_add_anything_to_the_page() -> None:
    page = public_page(run_at(1e9), [(1e9, 3.0), (1e9 + 60, 2.5)], [(1e9, 900.0), (1e9 + 60, 950.0)], BOARD_FILE)
    tags = Tags(page)
    assert tags.open == []
    assert "script" not in tags.seen
    assert tags.links == [BOARD_FILE]
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
    assert page.count("&lt;script&gt;") >= 4, "the name, the notice, and the device are shown as text"


def test_a_page_without_any_figure_is_a_page_too() -> None:
    page = public_page(run_at(1e9, None, members=[], tokens=0, live=0), [], [], BOARD_FILE)
    assert Tags(page).open == []
    assert page.count("no curve yet") == 2


def test_a_large_run_shows_the_first_rows_and_counts_the_others() -> None:
    members = [PublicMember(f"{number:016d}", "gone", 1, 1, 0.0, "") for number in range(MAX_ROWS_SHOWN + 7)]
    page = public_page(run_at(1e9, members=members), [], [], BOARD_FILE)
    assert page.count("<tr>") == MAX_ROWS_SHOWN + 1
    assert "and 7 more in the file" in page


def signed_progress(run: bytes, tokens: int) -> Board:
    writer, board = Writer(Ed25519PrivateKey.generate(), run), Board(run)
    writer.marked(((0, 1_750_000_100),))
    board.note([writer.write(Kind.PROGRESS, 0, Progress(1, 1, tokens, 0, 0), 1_750_000_000.0)])
    return board


def written(folder: Path) -> PublicPage:
    page = PublicPage(folder, RUN)
    page.board = signed_progress(RUN, 77)
    page.write(run_at(1e9, 3.0))
    page.write(run_at(1e9 + 60, 2.0))
    return page


def test_it_goes_on_where_it_was_after_a_restart(tmp_path: Path) -> None:
    written(tmp_path / "page")
    page = PublicPage(tmp_path / "page", RUN)
    assert page.board.tokens == 77
    page.write(run_at(1e9 + 120, 1.5))
    record = json.loads((tmp_path / "page" / RUN_FILE).read_bytes())
    assert record["losses"] == [[1e9, 3.0], [1e9 + 60, 2.0], [1e9 + 120, 1.5]]
    assert (tmp_path / "page" / INDEX_FILE).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", [BOARD_FILE, RUN_FILE])
def test_damaged_files_begin_anew(tmp_path: Path, name: str) -> None:
    written(tmp_path)
    (tmp_path / name).write_bytes(b"{")
    page = PublicPage(tmp_path, RUN)
    assert page.board.tokens == 0
    page.write(run_at(1e9))
    assert PublicPage(tmp_path, RUN).board.tokens == 0


def test_the_page_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(FarandoleError, match="name another folder"):
        PublicPage(tmp_path, b"o" * 32)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while True:
            if condition():
                return
            await trio.sleep(0.1)


async def test_a_relay_writes_a_runs_page_and_whoever_has_its_board_can_check_it(tmp_path: Path, texts: Path) -> None:
    run = write_run(tmp_path, small_manifest())
    folder = tmp_path / "page"

    def shows_the_member() -> bool:
        try:
            found = json.loads((folder / RUN_FILE).read_bytes())["run"]
        except FileNotFoundError:
            return False
        return bool(found["live"] == 1 and found["members"][0]["state"] == "live")

    async with joined(tmp_path / "node", str(tmp_path / "run.manifest"), "--data", str(texts), *PACE) as node:
        await node.says("round 1")
        async with started(tmp_path / "relay", "relay", node.invite(run.run_id), "--page", str(folder)) as relay:
            await relay.says("public page")
            await until(shows_the_member)
            assert await relay.end(signal.SIGTERM) == Exit.OK
        assert "<script" not in (folder / INDEX_FILE).read_text()
        assert Board.decode((folder / BOARD_FILE).read_bytes()).run_id == run.run_id
        (folder / RUN_FILE).unlink()
        async with started(tmp_path / "relay", "relay", "--page", str(folder)) as relay:  # without an invite
            await until(shows_the_member)
            assert await relay.end(signal.SIGTERM) == Exit.OK


async def test_a_page_is_of_one_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, small_manifest())
    written(tmp_path / "page")
    invites = encode_invite(Invite(run.run_id)), encode_invite(Invite(b"o" * 32))
    async with started(tmp_path / "relay", "relay", *invites, "--page", str(tmp_path / "other")) as relay:
        await relay.says("--page is for a relay of one run")
        assert await relay.process.wait() == Exit.BAD_INPUT
    async with started(tmp_path / "second", "relay", invites[0], "--page", str(tmp_path / "page")) as relay:
        await relay.says("name another folder")
        assert await relay.process.wait() != Exit.OK

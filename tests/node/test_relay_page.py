"""A run's public page, written by a relay."""

from __future__ import annotations

import json
import signal
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
import trio

from farandole.node.base.errors import Exit
from farandole.node.relay_page import RUN_FILE, PublicPage
from farandole.node.status.status import RunStatus
from farandole.node.ui.dashboard.app import PAGE
from farandole.node.ui.reporting import run_status
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.wire.errors import FarandoleError

from ..patience import PATIENCE
from .daemons import joined, started
from .hosts import until
from .statuses import STATUS
from .ui.dashboard.test_browser import CHROMIUM, open_browser

RUN = b"r" * 32
HOSTILE = "<script>alert(1)</script>\"'&"
MEMBER = msgspec.structs.replace(
    STATUS.members[0], name=HOSTILE, device=HOSTILE, is_live=True, is_self=False, addresses=[]
)


def written(folder: Path) -> PublicPage:
    page = PublicPage(folder, RUN)
    for number, loss in enumerate((3.0, 2.0)):
        page.write([MEMBER], run_of(loss), HOSTILE, 1e9 + 60 * number)
    return page


def run_of(loss: float) -> RunStatus:
    member = msgspec.structs.replace(MEMBER, loss=loss)
    return run_status(RUN, HOSTILE, None, [member])


def test_it_goes_on_where_it_was_after_a_restart(tmp_path: Path) -> None:
    written(tmp_path / "page")
    page = PublicPage(tmp_path / "page", RUN)
    page.write([MEMBER], run_of(1.5), "", 1e9 + 120)
    shown = json.loads((tmp_path / "page" / RUN_FILE).read_bytes())["overview"]
    assert shown["mean_loss"] == [[1e9, 3.0], [1e9 + 60, 2.0], [1e9 + 120, 1.5]]
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "page").rglob("*")}
    assert (modes["index.html"], modes[RUN_FILE], modes["vendor"]) == (0o644, 0o644, 0o755)


def test_a_damaged_file_begins_anew(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / RUN_FILE).write_bytes(b"{")
    PublicPage(tmp_path, RUN).write([MEMBER], run_of(1.5), "", 1e9)
    assert json.loads((tmp_path / RUN_FILE).read_bytes())["overview"]["mean_loss"] == [[1e9, 1.5]]


def test_what_members_write_is_in_no_file_that_a_browser_runs(tmp_path: Path) -> None:
    written(tmp_path)
    assert HOSTILE in msgspec.json.decode((tmp_path / RUN_FILE).read_bytes())["overview"]["headline"]["remedy"]
    others = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != RUN_FILE]
    assert len(others) == sum(path.is_file() for path in PAGE.rglob("*"))
    assert not any(b"alert(1)" in path.read_bytes() for path in others)
    assert b"script-src 'self'" in (tmp_path / "index.html").read_bytes()


def test_the_page_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(FarandoleError, match="name another folder"):
        PublicPage(tmp_path, b"o" * 32)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: on Debian, apt install chromium")
def test_a_browser_shows_the_run_and_nothing_of_a_node(tmp_path: Path) -> None:
    """Served as plain files; what members write is shown as text."""
    written(tmp_path)
    handler = partial(QuietFiles, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with open_browser(f"http://127.0.0.1:{server.server_port}/") as browser:
            page = browser.page
            assert page.inner_text("#headline").startswith("1 live")
            assert page.inner_text("#remedy") == HOSTILE
            assert page.inner_text("#members td >> nth=0") == f'{MEMBER.peer_id[-8:]} "{HOSTILE}"'
            assert HOSTILE in page.inner_text("#members td >> nth=9")
            assert not any(page.locator(each).is_visible() for each in ("#controls", "#limits", "#node", "#exchanges"))
            assert browser.problems == []
        server.shutdown()


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


async def test_a_relay_writes_a_runs_page(tmp_path: Path, run: SignedManifest, texts: Path) -> None:
    folder = tmp_path / "page"

    def shows_the_member() -> bool:
        try:
            found = json.loads((folder / RUN_FILE).read_bytes())
        except FileNotFoundError:
            return False
        members = found["members"]["members"]
        assert not any(member["member"]["addresses"] for member in members), "no address is shown"
        return bool(found["overview"]["run"]["members_live"] == 1 and members[0]["state"] == "live")

    async with joined(tmp_path / "node", str(tmp_path / "run.manifest"), "--data", str(texts)) as node:
        await node.says("round 1")
        async with started(tmp_path / "relay", "relay", node.invite(run.run_id), "--page", str(folder)) as relay:
            await relay.says("public page")
            with trio.fail_after(PATIENCE):
                await until(shows_the_member)
            assert await relay.end(signal.SIGTERM) == Exit.OK
        (folder / RUN_FILE).unlink()
        async with started(tmp_path / "relay", "relay", "--page", str(folder)) as relay:  # without an invite
            with trio.fail_after(PATIENCE):
                await until(shows_the_member)
            assert await relay.end(signal.SIGTERM) == Exit.OK

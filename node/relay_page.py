"""A run's public page, which a relay writes into a folder: `farandole relay --page FOLDER`.

The page is the dashboard's own (`farandole.node.ui.dashboard`) in its public mode: it shows a file with the run instead
of asking a node, and has nothing that concerns one node, and no buttons. A web server, or a host of static pages,
serves the folder, so no request reaches the relay. A visitor (`farandole.node.inspect.peek`) reads the run state; the
relay itself stays a member of no run.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import trio

from farandole.protocol.run.invite import MAX_ADDRESSES, Invite, encode_invite
from farandole.protocol.wire.bounds import pauses
from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.durable import replacing

from .base.settings import DEFAULT_LISTEN, NodeSettings
from .inspect.peek import VISIT_SECONDS, Visit, open_visit
from .loop.rest_service import notice_words, notices_of
from .status.journal import Journal
from .status.status import MemberStatus, RunStatus
from .ui.dashboard.app import PAGE
from .ui.dashboard.views import PublicView, RunHistory, public_view
from .ui.reporting import members_of, run_status

logger = logging.getLogger(__name__)

RUN_FILE: Final = "run.json"
"""What the page shows, a `PublicView`: for programs too, and for the curves after a restart."""
# Heartbeats of a large run are as far apart.
WRITE_INTERVAL: Final = 30.0
# Until the next visit if one fails: it grows to the second.
FIRST_PAUSE, MAX_PAUSE = 10.0, 600.0
# A visitor's pass is good for `VISIT_SECONDS`.
REVISIT_AFTER: Final = VISIT_SECONDS / 2
PAGE_CAUSE: Final = "page"
# The web server may be another user.
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755


class PublicPage:
    """The files of one run's page. Raises `FarandoleError` if the folder has another run's page, or cannot be used."""

    def __init__(self, folder: Path, run_id: bytes) -> None:
        self._folder = folder
        self._run_id = run_id
        self._history = RunHistory()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._read()
            for path in (each for each in PAGE.rglob("*") if each.is_file()):
                data = path.read_bytes()
                if path.name == "index.html":
                    data = data.replace(b"<body>", b'<body class="public">')
                self._write(str(path.relative_to(PAGE)), data)
        except OSError as error:
            raise FarandoleError(f"the page's folder cannot be used: {error}") from error

    def _read(self) -> None:
        """Read the curves that an earlier relay has written."""
        try:
            before = msgspec.json.decode((self._folder / RUN_FILE).read_bytes(), type=PublicView).overview
        except FileNotFoundError:
            return
        except msgspec.MsgspecError as error:
            logger.warning("the page in %s begins anew: %s", self._folder, error)
            return
        if before.run.run_id != self._run_id.hex():
            raise FarandoleError(f"{self._folder} has the page of run {before.run.run_id[:16]}: name another folder")
        history = self._history
        for curve, points in ((history.mean_loss, before.mean_loss), (history.throughput, before.throughput)):
            for at, value in points:
                curve.add(at, value)

    def write(self, members: list[MemberStatus], run: RunStatus, notice: str, now: float) -> None:
        """Add the present moment to the curves, and write the run's file. Raises `OSError`."""
        self._history.observe(run, members, (), now)
        view = public_view(run, members, notice, self._history, now)
        self._write(RUN_FILE, msgspec.json.encode(view) + b"\n")

    async def show(self, visit: Visit) -> None:
        """Write what a visitor sees now, without the members' addresses. Raises `OSError`."""
        gossip, live = visit.gossip, visit.live()
        known = members_of(gossip.state, gossip.liveness, live, trio.current_time())
        members = [msgspec.structs.replace(member, addresses=[]) for _, member in known]
        members.sort(key=lambda member: (-member.tokens, member.peer_id))
        run = run_status(self._run_id, visit.manifest.name, gossip.state, members)
        notice = notice_words(*notices_of(gossip.state))
        await trio.to_thread.run_sync(self.write, members, run, notice, time.time())

    def _write(self, name: str, data: bytes) -> None:
        path = self._folder / name
        if path.parent != self._folder:
            path.parent.mkdir(exist_ok=True)
            path.parent.chmod(_FOLDER_MODE)
        with replacing(path) as file:
            file.write(data)
        path.chmod(_FILE_MODE)


async def publish(settings: NodeSettings, invite: Invite, own: list[str], page: PublicPage, journal: Journal) -> None:
    """Write the page every `WRITE_INTERVAL` until cancelled; failures are reported, and tried again.

    ``own``: addresses of the relay itself, which the visitor dials first: it knows members.
    """
    addresses = list(dict.fromkeys([*own, *invite.addresses]))[:MAX_ADDRESSES]
    named = encode_invite(Invite(invite.run_id, tuple(addresses), invite.admission, invite.network_key))
    visitor = replace(settings, invite=named, listen=DEFAULT_LISTEN, port=0, bootstrap=[], mdns=False)
    waits = pauses(FIRST_PAUSE, MAX_PAUSE, random.Random())
    while True:
        try:
            with trio.move_on_after(REVISIT_AFTER):
                async with open_visit(visitor, logger.info) as visit:
                    while True:
                        await page.show(visit)
                        waits = pauses(FIRST_PAUSE, MAX_PAUSE, random.Random())
                        journal.over(PAGE_CAUSE)
                        await trio.sleep(WRITE_INTERVAL)
        except (FarandoleError, OSError) as error:
            journal.warn(f"the page could not be written, still trying: {error}", PAGE_CAUSE)
            await trio.sleep(next(waits))

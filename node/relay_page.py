"""A run's public page, which a relay writes into a folder: `farandole relay --page FOLDER`.

The page is files, so a web server, or a host of static pages, serves it, and no request reaches the relay. A visitor
(`farandole.node.inspect.peek`) reads the run state; the relay itself stays a member of no run.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
import trio

from farandole.protocol.run.invite import MAX_ADDRESSES, Invite, encode_invite
from farandole.protocol.state.board import Board, BoardError
from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.durable import replacing

from .base.backoff import pauses
from .base.bandwidth import Shaping
from .base.settings import DEFAULT_LISTEN, NodeSettings
from .inspect.observe import observe
from .inspect.peek import VISIT_SECONDS, Visit, open_visit
from .status.journal import Journal
from .status.public_run import Point, PublicRun
from .ui.dashboard.history import MAX_POINTS, Curve
from .ui.public_page import public_page

logger = logging.getLogger(__name__)

INDEX_FILE, BOARD_FILE, RUN_FILE = "index.html", "board.json", "run.json"
# Heartbeats of a large run are as far apart.
WRITE_INTERVAL: Final = 30.0
# Until the next visit if one fails: it grows to the second.
FIRST_PAUSE, MAX_PAUSE = 10.0, 600.0
# A visitor's pass is good for `VISIT_SECONDS`.
REVISIT_AFTER: Final = VISIT_SECONDS / 2


class _Record(msgspec.Struct, frozen=True):
    """The contents of `RUN_FILE`: for programs, and for the curves after a restart."""

    run: PublicRun
    losses: Annotated[list[Point], msgspec.Meta(max_length=MAX_POINTS)]
    """(Unix seconds, mean training loss of the live members in nats a token)."""
    throughput: Annotated[list[Point], msgspec.Meta(max_length=MAX_POINTS)]
    """(Unix seconds, tokens a second of the whole run)."""


class PublicPage:
    """The files of one run's page. Raises `FarandoleError` if the folder has another run's page, or cannot be read."""

    def __init__(self, folder: Path, run_id: bytes) -> None:
        self._folder = folder
        self.board = Board(run_id)
        self._losses, self._throughput = Curve(MAX_POINTS), Curve(MAX_POINTS)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._read(run_id)
        except OSError as error:
            raise FarandoleError(f"the page's folder cannot be used: {error}") from error

    def _read(self, run_id: bytes) -> None:
        """Read what an earlier relay has written, as far as it is whole."""
        try:
            board = Board.decode((self._folder / BOARD_FILE).read_bytes())
            record = msgspec.json.decode((self._folder / RUN_FILE).read_bytes(), type=_Record)
        except FileNotFoundError:
            return
        except (BoardError, msgspec.MsgspecError) as error:
            logger.warning("the page in %s begins anew: %s", self._folder, error)
            return
        if board.run_id != run_id:
            raise FarandoleError(f"{self._folder} has the page of run {board.run_id.hex()[:16]}: name another folder")
        self.board = board
        for curve, points in ((self._losses, record.losses), (self._throughput, record.throughput)):
            for at, value in points:
                curve.add(at, value)

    def write(self, run: PublicRun) -> None:
        """Add the present moment to the curves, and write all files. Raises `OSError`."""
        if run.loss is not None:
            self._losses.add(run.at, run.loss)
        self._throughput.add(run.at, run.tokens_per_second)
        record = _Record(run, self._losses.points, self._throughput.points)
        files = {
            BOARD_FILE: self.board.encode(),
            RUN_FILE: msgspec.json.encode(record) + b"\n",
            INDEX_FILE: public_page(run, self._losses.points, self._throughput.points, BOARD_FILE).encode(),
        }
        for name, data in files.items():
            with replacing(self._folder / name) as file:
                file.write(data)
            (self._folder / name).chmod(0o644)  # the web server may be another user


async def publish(settings: NodeSettings, invite: Invite, own: list[str], page: PublicPage, journal: Journal) -> None:
    """Write the page every `WRITE_INTERVAL` until cancelled; failures are reported, and tried again.

    ``own``: addresses of the relay itself, which the visitor dials first: it knows members.
    """
    visitor = _visitor_settings(settings, invite, own)
    waits, told = pauses(FIRST_PAUSE, MAX_PAUSE, random.Random()), ""
    while True:
        try:
            with trio.move_on_after(REVISIT_AFTER):
                async with open_visit(visitor, Shaping(), logger.info) as visit:
                    waits, told = pauses(FIRST_PAUSE, MAX_PAUSE, random.Random()), ""
                    await _write_often(visit, page, journal)
        except FarandoleError as error:
            if str(error) != told:
                told = str(error)
                journal.warn(f"the page could not be written, still trying: {told}")
            await trio.sleep(next(waits))


async def _write_often(visit: Visit, page: PublicPage, journal: Journal) -> None:
    has_failed = False
    while True:
        run = observe(visit, page.board, time.time())
        try:
            await trio.to_thread.run_sync(page.write, run)
            has_failed = False
        except OSError as error:
            if not has_failed:
                journal.warn(f"the page could not be written, still trying: {error}")
            has_failed = True
        await trio.sleep(WRITE_INTERVAL)


def _visitor_settings(settings: NodeSettings, invite: Invite, own: list[str]) -> NodeSettings:
    """Return the settings of a visitor that dials the relay first, and listens at a port of its own."""
    addresses = list(dict.fromkeys([*own, *invite.addresses]))[:MAX_ADDRESSES]
    named = Invite(invite.run_id, tuple(addresses), invite.admission, invite.network_key)
    return replace(settings, invite=encode_invite(named), listen=DEFAULT_LISTEN, port=0, bootstrap=[], mdns=False)

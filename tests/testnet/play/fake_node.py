"""A daemon that trains nothing: serves the control API and reports the rounds that a real daemon would.

    fake_node.py [--die N] [--stall N] [--stray N] [--late N] [--write N] [--pace SECONDS] join [SOURCE] --home .../NN

Node N dies in its second round, or hangs in it, or never agrees with the others on the run state, begins at node 0's
round, or writes a file each round and records in another file whether it could. A round takes SECONDS.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import trio

from farandole.node.base.control import serve_control
from farandole.node.base.identity import load_or_create_key
from farandole.node.base.settings import NodeSettings
from farandole.node.store.folder import CheckpointFolder
from farandole.protocol.wire.identity import peer_id_of, public_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "node"))
from statuses import STATUS  # type: ignore[import-not-found]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for fault in ("--die", "--stall", "--stray", "--late", "--write"):
        parser.add_argument(fault, type=int, default=-1)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("command")
    parser.add_argument("source", nargs="?")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--max-rounds", type=int)
    parser.add_argument("--listen")
    parser.add_argument("--slow", type=float)
    return parser.parse_known_args()[0]


class FakeNode:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.home: Path = options.home
        self.index = int(self.home.name)
        is_invited_late = (self.home.parent / "00" / "round").exists() and self.index == options.late
        saved = self.home / ("../00/round" if is_invited_late else "round")
        self.round = self.first_round = int(saved.read_text()) if saved.exists() else 0
        self.started_at = time.time()
        self.exchanges = 0
        self.is_paused = False
        self.written: list[str] = []
        self.peer_id, *self.partners = [
            peer_id_of(public_bytes(load_or_create_key(home / "key")))
            for home in (self.home, *(other for other in self.home.parent.iterdir() if other != self.home))
        ]

    async def run(self) -> None:
        with (self.home / "sources").open("a") as file:
            file.write(f"{self.options.source}\n")
        deeds = {"status": self.status, "pause": self.pause}
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_control, self.home / "control.sock", deeds)
                nursery.start_soon(self.train)
                async for _ in signals:
                    nursery.cancel_scope.cancel()
        # In any state: a daemon that is asked to end saves its replica first.
        folder = NodeSettings(home=self.home).checkpoints
        folder.mkdir(exist_ok=True)
        CheckpointFolder(folder, 0).file(self.round).touch()

    async def train(self) -> None:
        while self.round < self.options.max_rounds and not self.is_paused:
            await trio.sleep(self.options.pace)
            if self.round == 2 and self.index == self.options.die:
                os._exit(7)
            if self.round == 2 and self.index == self.options.stall:
                await trio.sleep_forever()
            self.round += 1
            self.exchanges += 1
            if self.index == self.options.write:
                self.write()
            (self.home / "round.new").write_text(str(self.round))  # it may be killed at any moment
            (self.home / "round.new").replace(self.home / "round")

    def write(self) -> None:
        """Write two blocks, which a full disk refuses, and a word, which still fits in its file."""
        try:
            (self.home / "large").write_bytes(bytes(8_192))
            self.written.append("ok")
        except OSError as error:
            self.written.append(str(error.strerror))
        (self.home / "written").write_text("\n".join(self.written))

    async def pause(self, params: dict[str, Any]) -> object:
        self.is_paused = True
        return "paused"

    async def status(self, params: dict[str, Any]) -> object:
        (self.home / "asked").touch()
        is_finished = self.round == self.options.max_rounds
        root = "stray" if self.index == self.options.stray else "root"
        return msgspec.structs.replace(
            STATUS,
            peer_id=self.peer_id,
            pid=os.getpid(),
            started_at=self.started_at,
            addresses=[f"{self.options.listen}/p2p/{self.peer_id}"],
            phase="finished" if is_finished else "paused" if self.is_paused else "training",
            round=self.round,
            inner_steps=int(100 * self.round / self.options.slow),
            tokens=1_000 * self.round,
            losses=[(r, 5.0 - r) for r in range(self.first_round, self.round)],
            loss_first=5.0,
            exchanges_ok=self.exchanges,
            partners=dict.fromkeys(self.partners, 1),
            run=msgspec.structs.replace(STATUS.run, state_root=root),
        )


if __name__ == "__main__":
    trio.run(FakeNode(parse()).run)

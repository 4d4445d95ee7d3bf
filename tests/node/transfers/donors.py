"""Members of a run in stages that give weights, and a node that needs them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.base.settings import NodeSettings
from farandole.node.join import bootstrap as joining
from farandole.node.state.membership import COPY_SLOT
from farandole.node.status.journal import Journal
from farandole.node.store.disk_space import WeightFiles
from farandole.node.transfers import receiver as downloads
from farandole.node.transfers import sketches as comparing
from farandole.node.transfers.block_file import partial_path
from farandole.node.transfers.giver import Holding
from farandole.node.transfers.receiver import Conditions, DonorBusyError, Downloads, Fetched
from farandole.node.transfers.weights import Weights
from farandole.protocol.checkpoints import sketches
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import Index, SignedIndex, sign_index
from farandole.protocol.checkpoints.copies import ranked
from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.state.believing import Credit
from farandole.protocol.state.entries import CheckpointNotice

from .files import KEY, RUN, checkpoint_bytes, index_of, run_here
from .test_sketch import sketch_of

MODEL = ModelConfig(num_layers=3, width=16, num_heads=2, hidden=32, context=16, vocabulary=256, num_stages=3)
ME, ANN, BOB, CYD, DAN, EVE = (bytes([number]) * 32 for number in range(6))


def content_of(peer: bytes, stage: int, round_index: int) -> bytes:
    return checkpoint_bytes(8, seed=hash((peer, stage, round_index)), round_index=round_index)


class World:
    """A membership, and peers with checkpoints of stages: (peer, stage) -> (author, round)."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_stages = 3
        self.stage = 1
        self.round = 30
        self.by_peer: dict[tuple[bytes, int], tuple[bytes, int]] = {}
        self.members: dict[bytes, int] = {}
        """Live members -> stage; all are in this run's round."""
        self.silent: set[bytes] = set()
        """Members that do not answer."""
        self.busy: set[bytes] = set()
        self.weights_of: dict[bytes, bytes] = {}
        """Peer -> its file, for members that answer questions for sketches."""
        self.compared_with: list[bytes] = []
        self.asked: list[tuple[bytes, int]] = []
        self.fetched_from: list[tuple[bytes, ...]] = []
        self.told: list[tuple[int, int, bool]] = []
        self.seconds = 1.0
        """Duration of a download."""
        self.said: list[str] = []
        self.journal = Journal(self.said.append)
        self.announcer = self
        self.credit = Credit()
        self.settings = NodeSettings(home=folder, backup_seconds=10.0)
        self.settings.checkpoints.mkdir()
        self.weights = self.begin()
        self.patch = monkeypatch.setattr
        self.patch(comparing, "ask_for_sketch", self.sketch)
        self.patch(downloads, "ask_for_index", self.ask)
        self.patch(downloads, "fetch_checkpoint", self.fetch)
        self.patch(joining, "dial", self.dial)
        self.patch(trio.to_thread, "run_sync", run_here)
        self.patch(trio.from_thread, "check_cancelled", lambda: None)

    def hold(self, round_index: int, *peers: bytes, stage: int = 1) -> None:
        """Have these members of the stage announce its checkpoint of this round, by the first of them."""
        for peer in peers:
            self.members.setdefault(peer, stage)
            self.by_peer[peer, stage] = (peers[0], round_index)

    def is_believed(self, peer: bytes) -> bool:
        return self.credit.is_good(peer, trio.current_time())

    def begin(self) -> Weights:
        """Begin a new life of the node."""
        host: Any = SimpleNamespace(author=ME)
        me: Any = self
        files = WeightFiles(self.settings, Manifest("cut", MODEL))
        return Weights(KEY, Downloads(host, Conditions(host, RUN), files, me, self.journal))

    def index(self, peer: bytes, stage: int) -> Index:
        author, round_index = self.by_peer[peer, stage]
        index = index_of(self.content_of(author, stage, round_index), round_index)
        maker = author if author in self.weights_of else index.author
        return msgspec.structs.replace(index, stage=stage, num_stages=3, author=maker)

    def content_of(self, author: bytes, stage: int, round_index: int) -> bytes:
        return self.weights_of.get(author) or content_of(author, stage, round_index)

    # The part of a membership that weights use

    def current_round(self) -> int:
        return self.round

    @property
    def everyone(self) -> frozenset[bytes]:
        return frozenset(self.members)

    def networks(self) -> dict[bytes, str]:
        return {}

    def awaits_contact(self) -> bool:
        return False

    def is_beginning(self) -> bool:
        return False

    def doubt_those_ahead(self, after_round: int) -> None:
        self.credit.lose((peer for peer in self.members if self.round > after_round), trio.current_time())

    def nodes_of_stages(self) -> tuple[frozenset[bytes], ...]:
        return tuple(frozenset(peer for peer, held in self.members.items() if held == stage) for stage in range(3))

    def donors(self, after_round: int, stage: int) -> list[bytes]:
        ahead = [peer for peer, held in self.members.items() if held == stage and self.round > after_round]
        return [peer for peer in ahead if self.is_believed(peer)]

    def announced(self, stage: int) -> dict[bytes, CheckpointNotice]:
        return {peer: found[0] for peer, found in self.notices(stage).items() if self.members[peer] == stage}

    def notices(self, stage: int) -> dict[bytes, list[CheckpointNotice]]:
        return {
            peer: [CheckpointNotice(told[1], of, sign_index(KEY, self.index(peer, of)).id, 1, 1, 1)]
            for (peer, of), told in self.by_peer.items()
            if of == stage and peer in self.members
        }

    def holders(self, stage: int, checkpoint_id: bytes) -> list[bytes]:
        return [peer for peer, notices in self.notices(stage).items() if notices[0].id == checkpoint_id]

    def told_checkpoints(self) -> frozenset[bytes]:
        return frozenset()

    async def tell_held(self, slot: int, checkpoint_id: bytes, index: Index) -> None:
        self.told.append((index.stage, index.round, slot == COPY_SLOT))

    # The part of a network that weights use

    async def sketch(self, host: object, member: bytes, question: sketches.SketchQuestion) -> sketches.Sketch | None:
        """Return a member's answer, by `sketch_of`; None if it does not answer."""
        await trio.lowlevel.checkpoint()
        self.compared_with.append(member)
        content = self.weights_of.get(member)
        return None if content is None else sketches.values_of(sketch_of(content, question.seed))

    async def dial(self, host: object, peers: dict[bytes, list[str]]) -> dict[bytes, str]:
        await trio.lowlevel.checkpoint()
        return {}

    async def ask(
        self, conditions: object, peer: bytes, stage: int, max_size: int, known: bytes | None
    ) -> tuple[SignedIndex, Index]:
        await trio.lowlevel.checkpoint()
        self.asked.append((peer, stage))
        if (peer, stage) not in self.by_peer or peer in self.silent:
            raise PeerUnreachableError("it does not have the checkpoint")
        if peer in self.busy:
            raise DonorBusyError(1.0)
        index = self.index(peer, stage)
        signed = sign_index(KEY, index)
        assert known in (None, signed.id)
        return signed, index

    async def fetch(
        self,
        conditions: object,
        signed: SignedIndex,
        index: Index,
        donors: Callable[[], Collection[bytes]],
        wanted: object,
        path: Path,
        show: object,
        accuse: object,
        *,
        is_prefix: bool,
    ) -> Fetched:
        await trio.sleep(self.seconds)
        names = tuple(donors())
        if names:
            author, round_index = self.by_peer[names[0], index.stage]
            path.write_bytes(self.content_of(author, index.stage, round_index))
        else:
            partial_path(path, signed.id).replace(path)
        assert is_prefix is (path.suffix == ".blocks")
        self.fetched_from.append(names)
        return Fetched(dict.fromkeys(names, 1), 1)

    def is_fetched(self, author: bytes, stage: int, round_index: int) -> bool:
        path = self.settings.fetched(stage)
        return path.exists() and path.read_bytes() == self.content_of(author, stage, round_index)

    def two_to_copy(self) -> list[bytes]:
        """Return members of the next stage with checkpoints, in the order in which they must be copied."""
        self.hold(29, ANN, stage=2)
        self.hold(28, BOB, stage=2)
        return ranked(RUN, 2, [ANN, BOB])

    async def given(self, weights: Weights, stage: int) -> Holding | None:
        return await weights.provider.find(BlockQuestion(RUN, stage))

    async def read(self, weights: Weights, stage: int) -> bytes:
        """Return the first block that is given of this stage."""
        given = await self.given(weights, stage)
        assert given is not None
        return bytes(given.read(0))

"""Members that are not nodes: hosts that send anything to a run, or serve a forged checkpoint."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.host import Host, open_host
from farandole.node.state.gossip import GossipService
from farandole.node.state.messenger import Messenger, open_messenger
from farandole.node.state.store import open_store
from farandole.node.transfers.giver import BlockService, Holding
from farandole.node.transfers.receiver import Conditions
from farandole.node.transfers.sketches import SketchService
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import Index, SignedIndex, sign_index
from farandole.protocol.run.manifest import Manifest, SignedManifest
from farandole.protocol.state.entries import Beat, CheckpointNotice, Kind, Member, Payload, deltas_of
from farandole.protocol.state.push import MAX_BATCH_BYTES, MAX_PUSH_BYTES, PROTOCOL, Batch
from farandole.protocol.state.state import MAX_AUTHORS, RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import public_key_of
from farandole.protocol.wire.messagepack import encode
from farandole.training.engine.blocks import content_of
from farandole.training.model.model import build_model

from ..protocol.authors import author_of, key_of, signed, tick_at
from .daemons import Daemon
from .hosts import LOOPBACK

Floats = npt.NDArray[np.float32]


@dataclass
class Pusher:
    """A host that sends to its victims, every second, what these authors, given by number, publish then."""

    host: Host
    said: list[tuple[int, Kind, Payload]] = field(default_factory=list)

    async def push(self, messenger: Messenger, run_id: bytes, victims: Collection[bytes]) -> None:
        while True:
            now = time.time()
            entries = [
                signed(number, kind, 0, tick_at(kind, now), payload, run_id) for number, kind, payload in self.said
            ]
            for delta in deltas_of(entries, MAX_BATCH_BYTES):
                for victim in victims:
                    messenger.send_nowait(victim, PROTOCOL, encode(Batch(False, delta)))
            await trio.sleep(1.0)


@asynccontextmanager
async def open_pusher(
    run_id: bytes, victims: Mapping[bytes, list[str]], key: Ed25519PrivateKey
) -> AsyncIterator[Pusher]:
    """Open a host that is connected to these nodes, and pushes to them until the context ends."""
    async with (
        open_host(key, LOOPBACK) as host,
        open_messenger(host) as messenger,
        trio.open_nursery() as nursery,
    ):
        messenger.set_receiver(PROTOCOL, MAX_PUSH_BYTES, lambda peer, payload: None)
        for victim, places in victims.items():
            await host.connect(victim, places)
        pusher = Pusher(host)
        nursery.start_soon(pusher.push, messenger, run_id, victims)
        yield pusher
        nursery.cancel_scope.cancel()


def noise_like(honest: Path) -> dict[str, Floats]:
    """Return random slow weights of the shapes of a checkpoint's."""
    rng = np.random.default_rng(1)
    tensors = load_file(honest).items()
    return {name: rng.standard_normal(tensor.shape, np.float32) for name, tensor in tensors if name.startswith("slow/")}


def fresh_start(manifest: Manifest) -> dict[str, Floats]:
    """Return slow weights that have learnt nothing, from another seed than the run's."""
    module = build_model(manifest.model, manifest.seed + 1)
    return {f"slow/{name}": tensor.detach().numpy() for name, tensor in module.named_parameters()}


def write_poison(
    honest: Path,
    path: Path,
    weights: Mapping[str, Floats],
    rounds_ahead: int,
    author: int,
    run_id: bytes,
    stage: int = 0,
    num_stages: int = 1,
) -> tuple[SignedIndex, Index]:
    """Write a checkpoint like the honest one, except for weights and round; return its index, signed by an author."""
    with safe_open(honest, framework="numpy") as file:
        metadata = file.metadata()
    tensors = {**load_file(honest), **weights}
    metadata["round"] = str(int(metadata["round"]) + rounds_ahead)
    save_file(tensors, path, metadata)
    content = content_of(path)
    index = Index(
        run_id=run_id,
        author=author_of(author),
        stage=stage,
        num_stages=num_stages,
        round=int(metadata["round"]),
        inner_steps=int(metadata["steps"]),
        tokens=int(metadata["tokens"]),
        size=content.size,
        layout=bytes.fromhex(metadata["layout"]),
        hashes=content.hashes,
    )
    return sign_index(key_of(author), index), index


@asynccontextmanager
async def open_liar(
    number: int,
    run_id: bytes,
    victims: dict[bytes, list[str]],
    path: Path,
    signed_index: tuple[SignedIndex, Index],
    *,
    is_judge: bool = False,
) -> AsyncIterator[None]:
    """Run a liar that announces to these nodes the checkpoint at ``path``, and gives it to any peer that asks.

    ``is_judge``: it announces another checkpoint, and answers questions for sketches from the file at ``path``.
    """
    made, index = signed_index
    held = bytes([number % 256]) * 32 if is_judge else made.id
    notice = CheckpointNotice(index.round, index.stage, held, index.size, index.tokens, index.inner_steps)
    holding = Holding(path, made, index)

    async def find(question: BlockQuestion) -> Holding | None:
        await trio.lowlevel.checkpoint()
        return holding if question.id in (None, made.id) else None

    async with open_pusher(run_id, victims, key_of(number)) as pusher:
        BlockService(Conditions(pusher.host, run_id), find).register()
        if is_judge:
            SketchService(pusher.host, run_id, lambda stage: find(BlockQuestion(run_id, stage))).register()
        addresses = tuple(address.rpartition("/p2p/")[0] for address in pusher.host.addresses)
        pusher.said += [
            (number, Kind.MEMBER, Member(stage=index.stage, addresses=addresses)),
            (number, Kind.BEAT, Beat(index.inner_steps, index.round, 1_000_000, 1_000)),
            (number, Kind.CHECKPOINT, notice),
        ]
        yield


@asynccontextmanager
async def light_member(
    folder: Path, run: SignedManifest, contact: Daemon, max_authors: int = MAX_AUTHORS
) -> AsyncIterator[GossipService]:
    """Run a member without a trainer that has synced with the contact and announced itself; the test sends the rest."""
    folder.mkdir()
    key, peer = Ed25519PrivateKey.generate(), public_key_of((await contact.status()).peer_id)
    state = RunState(run.run_id, run.creator, max_authors=max_authors)
    async with (
        open_store(folder / "store.sqlite") as store,
        open_host(key, LOOPBACK) as host,
        open_messenger(host) as messenger,
    ):
        gossip = GossipService(
            state, Writer(key, run.run_id), host, messenger, store, random.Random(0), base_period=1.0
        )
        host.dialler.add_addresses(peer, contact.addresses)
        await host.connect(peer)
        async with open_service_nursery() as nursery:
            await nursery.start(gossip.run)
            assert await gossip.join()
            await gossip.publish(Kind.MEMBER, 0, Member())
            yield gossip

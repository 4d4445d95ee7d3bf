from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.identity import load_or_create_key
from farandole.node.state.store import MANIFEST_FACT, open_store
from farandole.node.status.round_log import RoundRecord
from farandole.protocol.run.manifest import Manifest, ModelConfig, sign_manifest

MODEL = ModelConfig(num_layers=2, width=16, num_heads=2, hidden=32, context=16, vocabulary=256)
SIGNED = sign_manifest(Manifest("tiny run", MODEL), Ed25519PrivateKey.from_private_bytes(bytes(32)))
COMMITTED = RoundRecord(1_000.5, 0, 5, 640, 2.0, 4.0, 3.5, "committed", "12D3", 4_000_000, 2_000_000, 0.5, "bulk", 3)
ALONE = RoundRecord(1_002.5, 1, 5, 640, 2.0, None, None, "alone: nobody is there", "", 0, 0, 0.0, "", 0)


def rounds(*indices: int) -> list[RoundRecord]:
    """Return rounds with these indices, one each minute; every third is alone."""
    kinds = (COMMITTED, ALONE, COMMITTED)
    return [msgspec.structs.replace(kinds[index % 3], round=index, at=1_000.5 + 60 * index) for index in indices]


class NodeFolder:
    """A node's folder: its key, its run, its rounds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds = path / "rounds.jsonl"
        load_or_create_key(path / "key")
        trio.run(self._join)

    async def _join(self) -> None:
        async with open_store(self.path / "store.sqlite") as store:
            await store.put_fact(MANIFEST_FACT, SIGNED.encode())

    def add(self, records: Iterable[RoundRecord]) -> None:
        """Write finished rounds, as the node does."""
        with self.rounds.open("ab") as file:
            file.writelines(msgspec.json.encode(record) + b"\n" for record in records)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeFolder:
    for name in os.environ:
        if name.startswith("FARANDOLE_"):
            monkeypatch.delenv(name)
    return NodeFolder(tmp_path / "home")

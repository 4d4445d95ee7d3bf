"""Small runs and texts, for tests of trainers and daemons."""

from __future__ import annotations

from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.identity import load_or_create_key
from farandole.protocol.run.manifest import Manifest, ModelConfig, SignedManifest, manifest_from_dict, sign_manifest

TINY = {"num_layers": 1, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}
MODEL = msgspec.convert(TINY, ModelConfig)
CREATOR = Ed25519PrivateKey.from_private_bytes(bytes(32))
SIGNED = sign_manifest(Manifest("tiny", MODEL), CREATOR)


class NewerManifest(Manifest, frozen=True):
    """A manifest with a field that this release does not know."""

    colour: str = "blue"


def small_manifest(**sections: object) -> Manifest:
    """Return the manifest of a tiny model, in rounds boxed in time, so that every machine does the same.

    ``sections``: changes to this manifest.
    """
    settings: dict[str, object] = {
        "name": "small",
        "model": TINY,
        "inner": {"batch_size": 2},
        "rounds": {"inner_steps": 0, "round_seconds": 1.0, "exchange_seconds": 5.0},
        "data": {"source": "text"},
    }
    return manifest_from_dict(settings | sections)


def write_run(folder: Path, manifest: Manifest, creator: Path | None = None) -> SignedManifest:
    """Write a run with this manifest to ``folder/run.manifest``, signed by the node whose data directory is given."""
    if creator is not None:
        creator.mkdir(mode=0o700)
    signed = sign_manifest(manifest, load_or_create_key(creator / "key") if creator else Ed25519PrivateKey.generate())
    (folder / "run.manifest").write_bytes(signed.encode())
    return signed


def write_text(folder: Path) -> Path:
    """Write a text file, ``folder/text.txt``."""
    path = folder / "text.txt"
    path.write_text("".join(f"text number {i}, which goes on and on. " for i in range(4_000)))
    return path


def write_texts(folder: Path) -> Path:
    """Write a folder of many small files, ``folder/texts``."""
    texts = folder / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(f"text number {i}, which goes on and on. " * 20)
    return texts

"""The keys under which the DHT finds providers: of a run (any member), of a shard (holders of a stage), its relays."""

from __future__ import annotations

import hashlib

from ..wire.identity import framed


def run_key(run_id: bytes) -> bytes:
    """Return 32 bytes, provided by members of the run, which serve its manifest and run state."""
    return hashlib.sha256(framed(b"farandole/run/1", run_id)).digest()


def shard_key(run_id: bytes, stage: int) -> bytes:
    """Return 32 bytes, provided by nodes that hold the parameters of this stage."""
    return hashlib.sha256(framed(b"farandole/shard/1", run_id, stage.to_bytes(4, "big"))).digest()


def checkpoint_key(run_id: bytes, checkpoint_id: bytes) -> bytes:
    """Return 32 bytes, provided by nodes that serve blocks of this checkpoint (`protocol.checkpoints.blocks`)."""
    return hashlib.sha256(framed(b"farandole/checkpoint/1", run_id, checkpoint_id)).digest()


def relay_key(run_id: bytes) -> bytes:
    """Return 32 bytes, provided by publicly reachable nodes that relay for the run's nodes."""
    return hashlib.sha256(framed(b"farandole/relay/1", run_id)).digest()


def file_key(run_id: bytes, file_id: bytes) -> bytes:
    """Return 32 bytes, provided by nodes whose owners' programs serve this file (`farandole.node.programs.files`)."""
    return hashlib.sha256(framed(b"farandole/file/1", run_id, file_id)).digest()


def local_name(run_id: bytes) -> str:
    """Return the name by which a run's nodes find each other in a local network.

    It has 16 hexadecimal digits, which reveal nothing of the run's id.
    """
    return hashlib.sha256(framed(b"farandole/local/1", run_id)).hexdigest()[:16]

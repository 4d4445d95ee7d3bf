"""Blocks: a checkpoint as a list of hashes that its author has signed, and the part of it that a node needs.

A checkpoint is one safetensors file. It is cut into blocks of `BLOCK_BYTES` from its first byte on. The `Index` holds
the SHA-256 of each block, and the file's author, run, stage and round. The author signs the index, and the SHA-256 of
the index is the checkpoint's name, its *id*. So a node that has the id can take the index and every block from any
peer, and check each by itself: several peers that hold the same file give different blocks of it at once. A copy is as
good as the original.

The file's own header, in its first block or blocks, says where each tensor is. A node that needs only some tensors (a
stage's, or all but the inner optimizer's state) reads the header first. `select` then returns the blocks to fetch, and
the safetensors file of just these tensors that they make up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ..state.entries import Count, Key, Sha256, SignatureField
from ..wire.errors import RemoteProtocolError
from ..wire.identity import is_signed_by, sign
from ..wire.messagepack import MessageDecoder, encode
from ..wire.safetensors import Header, encode_header

INDEX_VERSION = 1
DOMAIN = b"farandole/checkpoint-index/1"
# Small enough that little is lost if a peer dies in the middle of a block, large enough that the hash, the request and
# a thread switch cost little compared with the transfer.
BLOCK_BYTES = 1 << 20
HASH_BYTES = 32
# 256 GiB: slow weights and momentum of 34 billion parameters. Their index has 8 MiB.
MAX_BLOCKS = 1 << 18
# Size of an index without its hashes: three names of 32 bytes, eight numbers, a signature, and msgpack's own bytes.
_INDEX_OVERHEAD_BYTES = 512


class Index(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The description of a checkpoint, and the hashes of its blocks."""

    version: Annotated[int, msgspec.Meta(ge=INDEX_VERSION, le=INDEX_VERSION)] = INDEX_VERSION
    run_id: Sha256
    author: Key
    """The node whose replica this is, and which signs the index."""
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)] = 0
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=512)] = 1
    """Stages of the model; 1 if it is not cut."""
    round: Count
    """Outer steps taken."""
    inner_steps: Count
    tokens: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS * BLOCK_BYTES)]
    """Bytes of the file."""
    layout: Sha256
    """Value of `farandole.training.base.parameters.Layout.hash`."""
    hashes: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=MAX_BLOCKS * HASH_BYTES)]
    """SHA-256 of each block, concatenated."""

    def is_block(self, block: int, data: bytes | bytearray | memoryview) -> bool:
        """Return whether these are the bytes of a block."""
        return hashlib.sha256(data).digest() == self.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]


class SignedIndex(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An index with its signature, as it is sent, and stored next to its file."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCKS * HASH_BYTES + _INDEX_OVERHEAD_BYTES)]
    signature: SignatureField

    @property
    def id(self) -> bytes:
        """Return the checkpoint's name, 32 bytes."""
        return hashlib.sha256(self.body).digest()


_decode_index = MessageDecoder[Index](Index, "a checkpoint's index")
_decode_signed_index = MessageDecoder[SignedIndex](SignedIndex, "a checkpoint's index")
encode_signed_index = encode
"""Encode a signed index: at most `max_index_bytes` of the file's size."""


def sign_index(key: Ed25519PrivateKey, index: Index) -> SignedIndex:
    """Return the index with its author's signature."""
    body = encode(index)
    return SignedIndex(body, sign(key, DOMAIN, index.run_id, body))


def max_index_bytes(max_size: int) -> int:
    """Return the most bytes that the signed index of a file of ``max_size`` bytes takes."""
    return min(num_blocks(max_size), MAX_BLOCKS) * HASH_BYTES + _INDEX_OVERHEAD_BYTES


def decode_signed_index(raw: bytes, run_id: bytes, max_size: int) -> tuple[SignedIndex, Index]:
    """Decode a signed index from a peer or a file, and check that it is of this run and signed by its author.

    Raises `RemoteProtocolError` if it is not, or if its file has more than ``max_size`` bytes.
    """
    if len(raw) > max_index_bytes(max_size):
        raise RemoteProtocolError(f"an index of {len(raw)} bytes; a file of {max_size} bytes has a shorter one")
    signed = _decode_signed_index(raw)
    index = _decode_index(signed.body)
    if index.run_id != run_id:
        raise RemoteProtocolError("the index is of another run's checkpoint")
    if index.stage >= index.num_stages:
        raise RemoteProtocolError(f"the index is of stage {index.stage} of {index.num_stages}")
    if index.size > max_size:
        raise RemoteProtocolError(f"a checkpoint of {index.size} bytes; this model's has at most {max_size}")
    if len(index.hashes) != num_blocks(index.size) * HASH_BYTES:
        raise RemoteProtocolError(f"{len(index.hashes)} bytes of hashes for a file of {index.size} bytes")
    if not is_signed_by(index.author, signed.signature, DOMAIN, index.run_id, signed.body):
        raise RemoteProtocolError("the index's signature is not its author's")
    return signed, index


def num_blocks(size: int) -> int:
    """Return the number of blocks of a file of ``size`` bytes."""
    return -(-size // BLOCK_BYTES)


def block_range(size: int, block: int) -> tuple[int, int]:
    """Return where a block of a file of ``size`` bytes begins and ends; the last one is shorter."""
    start = block * BLOCK_BYTES
    return start, min(start + BLOCK_BYTES, size)


def blocks_between(start: int, end: int) -> range:
    """Return the blocks that hold the bytes from ``start`` to ``end``."""
    return range(start // BLOCK_BYTES, num_blocks(end)) if start < end else range(0)


# Some of a file's tensors


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of a file's tensors, as a new file: ``header``, followed by ``pieces`` of the original file."""

    header: bytes
    """Header of the new file; empty if all tensors are selected: then the file stays the same."""
    pieces: tuple[tuple[int, int], ...]
    """Start and end of each piece in the original file, in order."""
    blocks: tuple[int, ...]
    """Blocks of the original file that hold the pieces."""

    @property
    def size(self) -> int:
        """Return the size of the new file in bytes."""
        return len(self.header) + sum(end - start for start, end in self.pieces)


def select(header: Header, wanted: Callable[[str], bool]) -> Selection:
    """Select the tensors whose name is wanted; raise `RemoteProtocolError` if there is none."""
    tensors = [tensor for tensor in header.tensors if wanted(tensor.name)]
    if not tensors:
        raise RemoteProtocolError("the checkpoint has no tensor of those that are wanted")
    if len(tensors) == len(header.tensors):
        pieces, new_header = [(0, tensors[-1].end)], b""
    else:
        pieces = []
        for tensor in tensors:  # in order; adjacent ones are one piece
            if pieces and pieces[-1][1] == tensor.start:
                pieces[-1] = pieces[-1][0], tensor.end
            else:
                pieces.append((tensor.start, tensor.end))
        new_header = encode_header(header.metadata, ((tensor.name, tensor.shape) for tensor in tensors))
    blocks = dict.fromkeys(block for piece in pieces for block in blocks_between(*piece))
    return Selection(new_header, tuple(pieces), tuple(blocks))

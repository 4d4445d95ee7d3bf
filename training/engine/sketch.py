"""The sketch of a checkpoint's slow weights (`protocol.checkpoints.sketches`), from its file and in little memory.

The tensors come in the order of their names, whatever their order in the file. Sixteen bits of Philox's output, which
is counter-based and keyed by the seed, say for each weight in which bucket it is and with which sign. It is raw output,
which no release of numpy changes (`training/data/dataset.py`).

It takes 0.7 s a gigabyte on an idle core, 2 s on a busy machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from farandole.protocol.checkpoints.sketches import NUM_BUCKETS, SEED_BYTES
from farandole.protocol.run.rules import SLOW
from farandole.protocol.wire.safetensors import FP32_BYTES, LENGTH_BYTES, Header, header_size, parse_header

Read = Callable[[int, int], bytes]
"""The bytes of a file from an offset to another. May raise `OSError`."""
Pause = Callable[[], None]

# Weights that are read at a time, 4 MiB, and added at a time: during an addition numpy holds the interpreter, 0.4 ms.
_PIECE: Final = 1 << 20
_STEP: Final = 1 << 16
_PER_DRAW: Final = 4  # weights for each 64 bits
_DOMAIN: Final = b"farandole/sketch/1"


def sketch_of(read: Read, size: int, seed: bytes, pause: Pause) -> bytes:
    """Return the sketch of a checkpoint's file, `farandole.protocol.checkpoints.sketches.SKETCH_BYTES` bytes.

    ``seed``: 32 bytes. ``pause`` is called after each piece of the file, and may raise. May block; raises what ``read``
    raises, and `RemoteProtocolError` if the file is no checkpoint.
    """
    assert len(seed) == SEED_BYTES
    key = hashlib.sha256(_DOMAIN + seed).digest()[:16]
    philox, buckets = np.random.Philox(key=int.from_bytes(key, "little")), np.zeros(NUM_BUCKETS)
    for place in _pieces(parse_header(read(0, header_size(read(0, LENGTH_BYTES), size)), size)):
        piece = np.frombuffer(read(*place), "<f4")
        for start in range(0, len(piece), _STEP):
            weights = piece[start : start + _STEP]
            draws = philox.random_raw(-(-len(weights) // _PER_DRAW)).astype("<u8", copy=False)
            bits = draws.view("<u2")[: len(weights)].astype(np.uint32)
            signed = (weights.view("<u4") ^ ((bits & NUM_BUCKETS) << 23)).view(
                "<f4"
            )  # bit 8 becomes the sign's, bit 31
            with np.errstate(invalid="ignore"):  # a liar's weights: what is not finite is near to nothing
                buckets += np.bincount(bits & (NUM_BUCKETS - 1), signed, NUM_BUCKETS)
        pause()
    with np.errstate(over="ignore"):
        return buckets.astype("<f4").tobytes()


def _pieces(header: Header) -> Iterator[tuple[int, int]]:
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.name):
        if tensor.name.partition("/")[0] == SLOW:
            for start in range(tensor.start, tensor.end, _PIECE * FP32_BYTES):
                yield start, min(start + _PIECE * FP32_BYTES, tensor.end)

import hashlib
from pathlib import Path

import pytest

from farandole.protocol.checkpoints import blocks as protocol
from farandole.protocol.checkpoints.blocks import BLOCK_BYTES, HASH_BYTES
from farandole.training.engine.blocks import BlockHasher, content_of, first_difference


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_each_block_has_its_hash_however_the_bytes_come(tmp_path: Path, size: int) -> None:
    data = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, size, BLOCK_BYTES)]
    hasher, position = BlockHasher(), 0
    while position < size:
        piece = data[position : position + 300_000]
        hasher.update(piece)
        position += len(piece)
    (tmp_path / "file").write_bytes(data)

    content = hasher.content()

    assert content.hashes == b"".join(hashlib.sha256(block).digest() for block in blocks)
    assert content.size == size
    assert content == content_of(tmp_path / "file")


def test_the_first_block_that_differs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * BLOCK_BYTES + 1))
    good = content_of(path)
    assert first_difference(good, good.hashes) is None
    assert first_difference(good, good.hashes[:-HASH_BYTES]) == 2
    damaged = bytearray(path.read_bytes())
    damaged[BLOCK_BYTES] = 1
    path.write_bytes(damaged)
    assert first_difference(content_of(path), good.hashes) == 1


def test_blocks_are_those_of_the_protocol() -> None:
    assert (BLOCK_BYTES, HASH_BYTES) == (protocol.BLOCK_BYTES, protocol.HASH_BYTES)

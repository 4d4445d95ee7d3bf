"""What a newcomer asks a member for: the run's manifest, and a checkpoint to start from.

Both are one question on a stream of its own. The question is the run id (32 bytes), and for a checkpoint the stage of
the model as well (2 bytes, big-endian; 0 where it is not cut); an empty frame answers "not here". The manifest comes as
one frame; a checkpoint as one frame with its header and then its bytes, which prove themselves by the header's SHA-256.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from .errors import RemoteProtocolError
from .manifest import RUN_ID_BYTES

MANIFEST_PROTOCOL = "/farandole/manifest/1"
CHECKPOINT_PROTOCOL = "/farandole/checkpoint/2"
CHECKPOINT_QUESTION_BYTES = RUN_ID_BYTES + 2
# Six 64-bit numbers and a hash, with msgpack's own bytes.
MAX_HEADER_BYTES = 256
# Slow weights, outer momentum and AdamW's two moments in fp32, and room for the file's own header of names.
CHECKPOINT_BYTES_A_PARAMETER = 16
CHECKPOINT_OVERHEAD_BYTES = 1 << 20
# Whoever gives a checkpoint more slowly than this (bytes a second; 0.5 Mbit/s) is left for another: it holds one up.
MIN_RATE = 64 * 1024
# Where its owner has capped it, it may say that it gives less, down to this (50 kbit/s).
MIN_CAPPED_RATE = 6_250


class CheckpointHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which checkpoint follows on the stream."""

    round: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    inner_steps: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    size: Annotated[int, msgspec.Meta(ge=1, le=2**50)]
    sha256: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    min_rate: Annotated[int, msgspec.Meta(ge=MIN_CAPPED_RATE, le=MIN_RATE)] = MIN_RATE
    """Bytes a second below which the donor may be left for another."""


def encode_question(run_id: bytes, stage: int) -> bytes:
    """What to ask for the checkpoint of a stage."""
    return run_id + stage.to_bytes(2, "big")


def decode_question(raw: bytes) -> tuple[bytes, int]:
    """Run id and stage; raises `RemoteProtocolError` if it is too short or too long."""
    if len(raw) != CHECKPOINT_QUESTION_BYTES:
        raise RemoteProtocolError(f"a question of {len(raw)} bytes")
    return raw[:RUN_ID_BYTES], int.from_bytes(raw[RUN_ID_BYTES:], "big")


def encode_header(header: CheckpointHeader) -> bytes:
    """The header's bytes, at most `MAX_HEADER_BYTES`."""
    return msgspec.msgpack.encode(header)


def decode_header(raw: bytes, max_size: int) -> CheckpointHeader:
    """Raises `RemoteProtocolError` if it is malformed or announces more than ``max_size`` bytes."""
    try:
        header = msgspec.msgpack.decode(raw, type=CheckpointHeader)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"not a checkpoint header: {error}") from error
    if header.size > max_size:
        raise RemoteProtocolError(f"a checkpoint of {header.size} bytes; this model's has at most {max_size}")
    return header


def max_checkpoint_bytes(num_parameters: int) -> int:
    """The most that an honest checkpoint of a model of this size takes."""
    return num_parameters * CHECKPOINT_BYTES_A_PARAMETER + CHECKPOINT_OVERHEAD_BYTES

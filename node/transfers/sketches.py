"""Sketches of this node's weights for newcomers, and other members' for this node (`protocol.checkpoints.sketches`).

A newcomer asks members when a checkpoint's index has arrived, which fixes its weights. They compute while it is
fetched, from the file and in little memory.

The tensors come in the order of their names, whatever their order in the file. Sixteen bits of Philox's output, which
is counter-based and keyed by the seed, say for each weight in which bucket it is and with which sign. It is raw output,
which no release of numpy changes (`training/data/dataset.py`). A sketch takes 0.7 s a gigabyte on an idle core, 2 s on
a busy machine.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import numpy as np
import trio

from farandole.protocol.checkpoints.blocks import Index
from farandole.protocol.checkpoints.sketches import (
    MAX_ANSWER_BYTES,
    MAX_QUESTION_BYTES,
    NUM_BUCKETS,
    SEED_BYTES,
    SKETCH_PROTOCOL,
    Judgement,
    Sketch,
    SketchQuestion,
    SketchVerdict,
    choose_judges,
    decode_answer,
    decode_question,
    encode_answer,
    judge,
    values_of,
)
from farandole.protocol.run.rules import SLOW
from farandole.protocol.wire.bounds import PeerMeters
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.messagepack import encode
from farandole.protocol.wire.safetensors import FP32_BYTES, LENGTH_BYTES, header_size, parse_header

from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..base.streams import Stream, StreamHost, ask, expecting_answer, receive_frame
from .block_file import BlockFile
from .giver import Holding
from .receiver import Downloads

logger = logging.getLogger(__name__)

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
    header = parse_header(read(0, header_size(read(0, LENGTH_BYTES), size)), size)
    slow = [tensor for tensor in header.tensors if tensor.name.partition("/")[0] == SLOW]
    slow.sort(key=lambda tensor: tensor.name)
    for tensor, at in ((each, at) for each in slow for at in range(each.start, each.end, _PIECE * FP32_BYTES)):
        piece = np.frombuffer(read(at, min(at + _PIECE * FP32_BYTES, tensor.end)), "<f4")
        for start in range(0, len(piece), _STEP):
            weights = piece[start : start + _STEP]
            draws = philox.random_raw(-(-len(weights) // _PER_DRAW)).astype("<u8", copy=False)
            bits = draws.view("<u2")[: len(weights)].astype(np.uint32)
            signed = (weights.view("<u4") ^ ((bits & NUM_BUCKETS) << 23)).view("<f4")  # bit 8 goes to the sign's, 31
            with np.errstate(invalid="ignore"):  # a liar's weights: what is not finite is near to nothing
                buckets += np.bincount(bits & (NUM_BUCKETS - 1), signed, NUM_BUCKETS)
        pause()
    with np.errstate(over="ignore"):
        return buckets.astype("<f4").tobytes()


# A small message, either way.
MESSAGE_TIMEOUT: Final = 10.0
# Sketches for one peer: the burst, and the number a second. A newcomer asks once for each checkpoint that it tries.
PEER_BURST: Final = 8.0
PEER_RATE: Final = 1 / 30
# Peers that wait for a sketch, since one is made at a time; and how long they wait before they get an empty answer.
MAX_WAITING: Final = 16
MAX_WAIT: Final = 60.0
# After each sketch the node rests this many times as long as it took: all sketches take a fifth of a core at most.
REST: Final = 4.0

FindOwn = Callable[[int], Awaitable[Holding | None]]
"""Returns this node's own newest checkpoint of a stage; None if there is none."""


class SketchService:
    """Answers other members of one run with sketches of what ``find_own`` finds."""

    def __init__(self, host: StreamHost, run_id: bytes, find_own: FindOwn) -> None:
        self._run_id = run_id
        self._find_own = find_own
        self._meters = PeerMeters(PEER_BURST, PEER_RATE)
        self._turn = trio.Lock()
        self._rests_until = 0.0
        host.set_handler(SKETCH_PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        """Answer one question; with an empty sketch if this node has no weights of the stage."""
        with trio.fail_after(MESSAGE_TIMEOUT):
            question = decode_question(await receive_frame(stream, FrameParser(MAX_QUESTION_BYTES)))
        sketch, now = b"", trio.current_time()
        has_place = self._turn.statistics().tasks_waiting < MAX_WAITING
        if question.run_id == self._run_id and has_place and self._meters.of(stream.peer, now).take(now):
            with trio.move_on_after(MAX_WAIT) as patience:  # for others' sketches
                async with self._turn:
                    await trio.sleep_until(self._rests_until)
                    patience.deadline = math.inf
                    if (holding := await self._find_own(question.stage)) is not None:
                        began_at = trio.current_time()
                        try:
                            sketch = await sketch_file(holding, question.seed)
                        except (OSError, RemoteProtocolError) as error:  # the node's own trainer says more
                            logger.debug("no sketch: %s", error)
                        self._rests_until = trio.current_time() + REST * (trio.current_time() - began_at)
        with trio.fail_after(MESSAGE_TIMEOUT):
            await stream.send_all(frame(encode_answer(sketch), MAX_ANSWER_BYTES))


async def sketch_file(file: BlockFile, seed: bytes) -> bytes:
    """Compute the sketch of the weights in a checkpoint's file, in a thread that a cancellation waits for briefly.

    Raises `OSError`, and `RemoteProtocolError` if the file is no checkpoint.
    """
    return await trio.to_thread.run_sync(sketch_of, file.read_range, file.size, seed, trio.from_thread.check_cancelled)


async def ask_for_sketch(host: StreamHost, member: bytes, question: SketchQuestion) -> Sketch | None:
    """Ask a member for a sketch; None if it gives none. The caller sets a deadline.

    Raises `PeerUnreachableError` if it cannot be asked, or does not answer as it must.
    """
    with expecting_answer(member, math.inf):
        return decode_answer(await ask(host, member, SKETCH_PROTOCOL, encode(question), MAX_ANSWER_BYTES))


# Comparison of a checkpoint that is being fetched

# For a member to be dialled and to save its weights, and for each byte of these: to read it from a slow disk, to sketch
# it in 2 s a gigabyte, and to wait for another newcomer's sketch.
COMPARISON_TIMEOUT: Final = 15.0
SECONDS_PER_BYTE: Final = 30e-9


Judge = Callable[[Path], Awaitable[Judgement]]
"""Compares the checkpoint that is at a path now with the sketches of all members that answer in time.

A file that cannot be read is left to the trainer, which reports why.
"""


@asynccontextmanager
async def open_comparison(downloads: Downloads, index: Index, holders: frozenset[bytes]) -> AsyncIterator[Judge]:
    """Ask members about a checkpoint while the block runs, all at once; ``holders`` state that they have it."""
    membership, journal = downloads.membership, downloads.journal
    training = membership.nodes_of_stages()[index.stage] - {index.author}  # paused members have old weights
    members = [member for member in membership.donors(0, index.stage) if member in training]
    judges = choose_judges(members, {index.author, *holders}, membership.networks())
    question = SketchQuestion(index.run_id, index.stage, secrets.token_bytes(SEED_BYTES))
    sketches: list[Sketch] = []
    has_all = trio.Event()

    async def ask(member: bytes) -> None:
        try:
            sketch = await ask_for_sketch(downloads.host, member, question)
        except PeerUnreachableError as error:
            journal.note(f"weights are not compared with those of {short_name(member)}: {error}")
            return
        if sketch is not None:
            sketches.append(sketch)

    async def ask_all() -> None:
        num_bytes = downloads.files.required_bytes(index.stage)
        with trio.move_on_after(COMPARISON_TIMEOUT + SECONDS_PER_BYTE * num_bytes):
            async with trio.open_nursery() as asking:
                for member in judges:
                    asking.start_soon(ask, member)
        has_all.set()

    async def judge_file(path: Path) -> Judgement:
        await has_all.wait()
        if sketches:
            try:
                file = await trio.to_thread.run_sync(BlockFile, path, os.O_RDONLY)
                return judge(values_of(await sketch_file(file, question.seed)), sketches)
            except (OSError, RemoteProtocolError) as error:
                journal.note(f"{path} cannot be compared: {error}")
        return Judgement(SketchVerdict.UNKNOWN, num_silent=len(judges))

    async with open_service_nursery() as nursery:
        nursery.start_soon(ask_all)
        yield judge_file

"""Serving and fetching what a newcomer needs: the manifest, and the newest checkpoint on a member's disk."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import trio
from safetensors import SafetensorError, safe_open

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.framing import FrameParser, frame
from farandole.protocol.manifest import MAX_MANIFEST_BYTES, RUN_ID_BYTES
from farandole.protocol.transfers import (
    CHECKPOINT_PROTOCOL,
    CHECKPOINT_QUESTION_BYTES,
    MANIFEST_PROTOCOL,
    MAX_HEADER_BYTES,
    MIN_CAPPED_RATE,
    MIN_RATE,
    CheckpointHeader,
    decode_header,
    decode_question,
    encode_header,
    encode_question,
)

from .errors import PeerUnreachableError
from .host import Host
from .libp2p_stream import Stream
from .shaping import BULK_SHARE, Shaper
from .streams import receive_frame

# A question and its small answer.
ANSWER_TIMEOUT = 10.0
# One chunk over the slowest line that we serve: 64 KiB at 50 kbit/s. A download may fall behind its rate by so much.
CHUNK_TIMEOUT = 10.0
CHUNK_BYTES = 65_507
# Newcomers served at once, a download each; the next one is told to ask another. Where the upload is capped, as many as
# get more than `MIN_RATE` of half of it, the other half being for exchanges, but one at least.
MAX_DOWNLOADS_SERVED = 4


class TransferError(PeerUnreachableError):
    """A peer did not give what it was asked for; another may."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint file that this node can serve."""

    path: Path
    header: CheckpointHeader


class TransferService:
    """Answers newcomers. ``checkpoint`` gives the newest file of a stage (0 if the model is not cut), None if none."""

    def __init__(
        self,
        run_id: bytes,
        manifest: bytes,
        checkpoint: Callable[[int], Awaitable[SavedCheckpoint | None]],
        upload: Shaper | None = None,
    ) -> None:
        self._run_id = run_id
        self._manifest = manifest
        self._checkpoint = checkpoint
        self._upload = upload = upload or Shaper()
        num_affordable = max(1, int(upload.rate / (2 * MIN_RATE))) if upload.rate else MAX_DOWNLOADS_SERVED
        self._max_served = min(num_affordable, MAX_DOWNLOADS_SERVED)
        # Beside the others and an exchange, while control traffic takes all that it may:
        least = BULK_SHARE * (upload.rate or math.inf) / (self._max_served + 1)
        self._min_rate = int(min(MIN_RATE, max(MIN_CAPPED_RATE, least)))
        self._served: set[bytes] = set()

    def register(self, host: Host) -> None:
        """Serve both protocols on the host."""
        host.set_handler(MANIFEST_PROTOCOL, self.serve_manifest)
        host.set_handler(CHECKPOINT_PROTOCOL, self.serve_checkpoint)

    async def serve_manifest(self, stream: Stream) -> None:
        """Answer one question."""
        with trio.fail_after(ANSWER_TIMEOUT):
            question = await receive_frame(stream, FrameParser(RUN_ID_BYTES))
            await stream.send_all(frame(self._manifest if question == self._run_id else b"", 2 * MAX_MANIFEST_BYTES))

    async def serve_checkpoint(self, stream: Stream) -> None:
        """Send the newest checkpoint; a file that is replaced meanwhile stays readable to its end."""
        with trio.fail_after(ANSWER_TIMEOUT):
            question = await receive_frame(stream, FrameParser(CHECKPOINT_QUESTION_BYTES))
        run_id, stage = decode_question(question)
        is_free = stream.peer not in self._served and len(self._served) < self._max_served
        if run_id != self._run_id or not is_free:
            await _send_header(stream, b"")
            return
        self._served.add(stream.peer)
        try:
            await self._send_checkpoint(stream, stage)
        finally:
            self._served.discard(stream.peer)

    async def _send_checkpoint(self, stream: Stream, stage: int) -> None:
        saved = await self._checkpoint(stage)
        if saved is None:
            await _send_header(stream, b"")
            return
        async with await trio.open_file(saved.path, "rb") as file:
            header = msgspec.structs.replace(saved.header, min_rate=self._min_rate)
            await _send_header(stream, encode_header(header))
            stream.is_bulk = True
            while chunk := await file.read(min(CHUNK_BYTES, self._upload.quantum)):
                await self._upload.wait(len(chunk))
                with trio.fail_after(CHUNK_TIMEOUT):
                    await stream.send_all(chunk)


async def _send_header(stream: Stream, header: bytes) -> None:
    with trio.fail_after(ANSWER_TIMEOUT):
        await stream.send_all(frame(header, MAX_HEADER_BYTES))


async def fetch_manifest(host: Host, peer: bytes, run_id: bytes) -> bytes:
    """The manifest's bytes as a peer gives them; the caller verifies them against the run id.

    Raises `TransferError` or `PeerUnreachableError`.
    """
    try:
        with trio.fail_after(ANSWER_TIMEOUT):
            stream = await host.open_stream(peer, MANIFEST_PROTOCOL)
            try:
                await stream.send_all(frame(run_id, RUN_ID_BYTES))
                raw = await receive_frame(stream, FrameParser(2 * MAX_MANIFEST_BYTES))
            finally:
                await stream.aclose()
    except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError) as error:
        raise TransferError(f"no manifest from this peer: {str(error) or 'too slow'}") from error
    if not raw:
        raise TransferError("this peer is not in the run")
    return raw


async def fetch_checkpoint(
    host: Host,
    peer: bytes,
    run_id: bytes,
    path: Path,
    max_size: int,
    on_progress: Callable[[int, int], None],
    download: Shaper | None = None,
    stage: int = 0,
) -> CheckpointHeader:
    """Download a peer's newest checkpoint of a stage to ``path``, verified by its hash; a failure leaves nothing there.

    ``on_progress`` is told the bytes received and their total; ``download`` is this node's cap.

    Raises `TransferError` or `PeerUnreachableError`.
    """
    partial = path.with_name(path.name + ".part")
    try:
        with trio.fail_after(ANSWER_TIMEOUT):
            stream = await host.open_stream(peer, CHECKPOINT_PROTOCOL)
        stream.is_bulk = True
        try:
            with trio.fail_after(ANSWER_TIMEOUT):
                await stream.send_all(frame(encode_question(run_id, stage), CHECKPOINT_QUESTION_BYTES))
                parser = FrameParser(MAX_HEADER_BYTES)
                raw = await receive_frame(stream, parser)
            if not raw:
                raise TransferError("this peer has no checkpoint to give now")
            header = decode_header(raw, max_size)
            with partial.open("wb") as file:
                await _receive_file(stream, file, header, parser.take_rest(), on_progress, download or Shaper())
            partial.replace(path)
        finally:
            await stream.aclose()
    except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError) as error:
        raise TransferError(f"the download broke off: {str(error) or 'too slow'}") from error
    except OSError as error:
        raise TransferError(f"the download cannot be stored: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return header


async def _receive_file(
    stream: Stream,
    file: BinaryIO,
    header: CheckpointHeader,
    data: bytes,
    on_progress: Callable[[int, int], None],
    download: Shaper,
) -> None:
    digest = hashlib.sha256()
    received = 0
    started_at = trio.current_time()  # later by all the time that our own cap has taken
    while True:
        started_at += await download.wait(len(data))
        received += len(data)
        if received > header.size:
            raise RemoteProtocolError("the checkpoint is longer than announced")
        digest.update(data)
        await trio.to_thread.run_sync(file.write, data)
        on_progress(received, header.size)
        if received == header.size:
            break
        with trio.fail_at(started_at + CHUNK_TIMEOUT + received / header.min_rate):
            data = await stream.receive_some(min(CHUNK_BYTES, download.quantum))
        if not data:
            raise RemoteProtocolError("the checkpoint is shorter than announced")
    if digest.digest() != header.sha256:
        raise RemoteProtocolError("the checkpoint's hash is not the announced one")
    await trio.to_thread.run_sync(_sync, file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def saved_round(path: Path) -> int | None:
    """The round of the checkpoint at ``path``, None if there is none that can be read; loading it judges the rest."""
    try:
        with safe_open(path, framework="numpy") as file:
            return int((file.metadata() or {}).get("round", ""))
    except (SafetensorError, OSError, ValueError):
        return None

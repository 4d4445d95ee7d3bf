"""Manifests and checkpoints, asked for and given, over streams in memory."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from farandole.node import transfers
from farandole.node.figures import BYTES_PER_MBIT
from farandole.node.settings import MIN_CAP_MBIT
from farandole.node.shaping import MAX_DEBT_SECONDS, Shaper
from farandole.node.transfers import SavedCheckpoint, TransferError, TransferService, fetch_checkpoint, fetch_manifest
from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.framing import frame
from farandole.protocol.manifest import Manifest, ModelConfig, decode_manifest, sign_manifest
from farandole.protocol.transfers import (
    CHECKPOINT_PROTOCOL,
    MANIFEST_PROTOCOL,
    MIN_CAPPED_RATE,
    MIN_RATE,
    CheckpointHeader,
    decode_header,
    decode_question,
    encode_header,
    encode_question,
)

Handler = Callable[[Any], Awaitable[None]]
MODEL = ModelConfig(num_layers=1, width=16, num_heads=2, hidden=32, context=16, vocabulary=256)
SIGNED = sign_manifest(Manifest("tiny", MODEL), Ed25519PrivateKey.from_private_bytes(bytes(32)))
CONTENT = bytes(range(256)) * 1_000


class MemoryHost:
    """Opens streams to one peer's handlers: the host's promise, without a network."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.handlers: dict[str, Handler] = {}
        self.served: list[trio.Event] = []
        """One for each stream, in order: set when its handler has ended."""
        self._nursery = nursery
        self._newcomers = itertools.count()

    def set_handler(self, protocol: str, handler: Handler) -> None:
        self.handlers[protocol] = handler

    async def open_stream(self, peer: bytes, protocol: str, newcomer: int | None = None) -> Any:
        """Each stream is another newcomer's, unless told."""
        ours, theirs = trio.testing.lockstep_stream_pair()  # sending waits for the receiver
        theirs.peer = next(self._newcomers) if newcomer is None else newcomer  # type: ignore[attr-defined]
        self.served.append(trio.Event())
        self._nursery.start_soon(self._serve, self.handlers[protocol], theirs, self.served[-1])
        return ours

    async def _serve(self, handler: Handler, stream: Any, ended: trio.Event) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.TooSlowError, RemoteProtocolError):
            await handler(stream)
        ended.set()
        await stream.aclose()


def saved_at(path: Path) -> SavedCheckpoint:
    path.write_bytes(CONTENT)
    return SavedCheckpoint(path, CheckpointHeader(7, 350, 10_000, len(CONTENT), hashlib.sha256(CONTENT).digest()))


def serve(host: Any, saved: SavedCheckpoint | None, upload: Shaper | None = None) -> None:
    async def checkpoint(stage: int) -> SavedCheckpoint | None:
        return saved

    TransferService(SIGNED.run_id, SIGNED.encode(), checkpoint, upload).register(host)


async def fetch(
    host: Any, path: Path, max_size: int = len(CONTENT), download: Shaper | None = None
) -> CheckpointHeader:
    return await fetch_checkpoint(host, b"p" * 32, SIGNED.run_id, path, max_size, lambda done, total: None, download)


async def run_here(function: Callable[..., object], *args: object, **options: object) -> object:
    """For `trio.to_thread.run_sync` where the clock would jump while a thread works."""
    await trio.lowlevel.checkpoint()
    return function(*args)


async def test_a_manifest_arrives_and_proves_itself(nursery: trio.Nursery) -> None:
    host: Any = MemoryHost(nursery)
    serve(host, None)
    raw = await fetch_manifest(host, b"p" * 32, SIGNED.run_id)
    assert decode_manifest(raw, SIGNED.run_id)[0].name == "tiny"
    with pytest.raises(TransferError, match="not in the run"):
        await fetch_manifest(host, b"p" * 32, bytes(32))


async def test_a_checkpoint_arrives_whole(nursery: trio.Nursery, tmp_path: Path) -> None:
    host: Any = MemoryHost(nursery)
    serve(host, saved_at(tmp_path / "theirs"))
    header = await fetch(host, tmp_path / "ours")
    assert header.round == 7
    assert (tmp_path / "ours").read_bytes() == CONTENT


async def test_who_asks_for_a_stage_gets_that_stage(nursery: trio.Nursery, tmp_path: Path) -> None:
    host: Any = MemoryHost(nursery)
    saved = {2: saved_at(tmp_path / "theirs")}

    async def checkpoint(stage: int) -> SavedCheckpoint | None:
        return saved.get(stage)

    TransferService(SIGNED.run_id, SIGNED.encode(), checkpoint).register(host)
    ours = tmp_path / "ours"
    args = (host, b"p" * 32, SIGNED.run_id, ours, len(CONTENT), lambda done, total: None, None)
    with pytest.raises(TransferError, match="no checkpoint"):
        await fetch_checkpoint(*args, stage=1)
    assert (await fetch_checkpoint(*args, stage=2)).round == 7
    assert ours.read_bytes() == CONTENT


@given(st.binary(max_size=64))
def test_a_question_of_another_length_is_the_peers_fault(raw: bytes) -> None:
    if len(raw) == 34:
        assert encode_question(*decode_question(raw)) == raw
    else:
        with pytest.raises(RemoteProtocolError):
            decode_question(raw)


async def test_a_donor_without_a_checkpoint_says_so(nursery: trio.Nursery, tmp_path: Path) -> None:
    host: Any = MemoryHost(nursery)
    serve(host, None)
    with pytest.raises(TransferError, match="no checkpoint"):
        await fetch(host, tmp_path / "ours")


@pytest.mark.parametrize(
    ("header_size", "content", "words"),
    [
        (len(CONTENT), CONTENT[:-1] + b"!", "hash"),
        (len(CONTENT), CONTENT + b"!", "longer"),
        (len(CONTENT), CONTENT[:-1], "shorter"),
        (2**40, CONTENT, "at most"),
    ],
)
async def test_a_lying_donor_leaves_nothing_behind(
    nursery: trio.Nursery, tmp_path: Path, header_size: int, content: bytes, words: str
) -> None:
    host: Any = MemoryHost(nursery)
    header = CheckpointHeader(7, 350, 10_000, header_size, hashlib.sha256(CONTENT).digest())

    async def lie(stream: Any) -> None:
        await stream.receive_some()
        await stream.send_all(frame(encode_header(header), 256) + content)

    host.set_handler(CHECKPOINT_PROTOCOL, lie)
    (tmp_path / "ours").write_bytes(b"what was there")
    with pytest.raises(TransferError, match=words):
        await fetch(host, tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == b"what was there"
    assert [entry.name for entry in tmp_path.iterdir()] == ["ours"]


async def test_a_frozen_donor_costs_a_deadline(
    nursery: trio.Nursery, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    host: Any = MemoryHost(nursery)

    async def freeze(stream: Any) -> None:
        await stream.receive_some()
        await trio.sleep_forever()

    host.set_handler(CHECKPOINT_PROTOCOL, freeze)
    host.set_handler(MANIFEST_PROTOCOL, freeze)
    with trio.fail_after(2 * transfers.ANSWER_TIMEOUT), pytest.raises(TransferError, match="slow"):
        await fetch(host, tmp_path / "ours")
    with trio.fail_after(2 * transfers.ANSWER_TIMEOUT), pytest.raises(TransferError, match="slow"):
        await fetch_manifest(host, b"p" * 32, SIGNED.run_id)


async def test_more_newcomers_than_are_served_at_once_are_sent_on(nursery: trio.Nursery, tmp_path: Path) -> None:
    host: Any = MemoryHost(nursery)
    serve(host, saved_at(tmp_path / "theirs"))
    stalled = [await host.open_stream(b"p" * 32, CHECKPOINT_PROTOCOL) for _ in range(transfers.MAX_DOWNLOADS_SERVED)]
    for stream in stalled:
        await stream.send_all(frame(encode_question(SIGNED.run_id, 0), 34))
        await stream.receive_some(1)  # of the header: it is being served
    with pytest.raises(TransferError, match="no checkpoint to give now"):
        await fetch(host, tmp_path / "ours")
    await stalled[0].aclose()
    with trio.fail_after(10):
        await host.served[0].wait()  # its file is read in a thread, which may take a moment
    await fetch(host, tmp_path / "ours")
    nursery.cancel_scope.cancel()


async def test_one_newcomer_takes_one_download_and_no_save_for_more(nursery: trio.Nursery, tmp_path: Path) -> None:
    host: Any = MemoryHost(nursery)
    saved, num_asked = saved_at(tmp_path / "theirs"), 0

    async def checkpoint(stage: int) -> SavedCheckpoint:
        nonlocal num_asked
        num_asked += 1
        return saved

    TransferService(SIGNED.run_id, SIGNED.encode(), checkpoint).register(host)
    streams = [await host.open_stream(b"p" * 32, CHECKPOINT_PROTOCOL, newcomer=1) for _ in range(10)]
    for stream in streams:
        await stream.send_all(frame(encode_question(SIGNED.run_id, 0), 34))
        await stream.receive_some(1)
    assert num_asked == 1
    await fetch(host, tmp_path / "ours")  # another newcomer
    nursery.cancel_scope.cancel()


async def test_a_disk_that_takes_no_checkpoint_is_said(nursery: trio.Nursery, tmp_path: Path) -> None:
    host: Any = MemoryHost(nursery)
    serve(host, saved_at(tmp_path / "theirs"))
    with pytest.raises(TransferError, match="cannot be stored"):
        await fetch(host, tmp_path / "nowhere" / "ours")


async def test_a_donor_that_trickles_is_left(
    nursery: trio.Nursery, tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    host: Any = MemoryHost(nursery)
    header = CheckpointHeader(7, 350, 10_000, len(CONTENT), hashlib.sha256(CONTENT).digest())

    async def trickle(stream: Any) -> None:
        await stream.receive_some()
        await stream.send_all(frame(encode_header(header), 256))
        for byte in CONTENT:
            await trio.sleep(transfers.CHUNK_TIMEOUT / 2)
            await stream.send_all(bytes([byte]))

    host.set_handler(CHECKPOINT_PROTOCOL, trickle)
    with trio.fail_after(3 * transfers.CHUNK_TIMEOUT), pytest.raises(TransferError, match="slow"):
        await fetch(host, tmp_path / "ours")


@pytest.mark.parametrize("mbit", [MIN_CAP_MBIT, 1.0])
async def test_a_download_is_not_given_up_for_the_slowness_of_the_donors_cap(
    nursery: trio.Nursery,
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    mbit: float,
) -> None:
    """Beside an exchange, while control traffic takes all that it can."""
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    host: Any = MemoryHost(nursery)
    cap = Shaper(mbit * BYTES_PER_MBIT, trio.current_time)
    cap.charge(round(2 * MAX_DEBT_SECONDS * cap.rate))
    serve(host, saved_at(tmp_path / "theirs"), cap)

    async def exchange() -> None:
        while True:
            await cap.wait(cap.quantum)

    nursery.start_soon(exchange)
    began = trio.current_time()
    await fetch(host, tmp_path / "ours")
    assert trio.current_time() - began > len(CONTENT) / MIN_RATE + transfers.CHUNK_TIMEOUT
    nursery.cancel_scope.cancel()


async def test_a_donor_that_gives_less_than_it_promises_is_left(
    nursery: trio.Nursery, tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    host: Any = MemoryHost(nursery)
    saved = saved_at(tmp_path / "theirs")
    header = msgspec.structs.replace(saved.header, min_rate=2 * MIN_CAPPED_RATE)
    cap = Shaper(MIN_CAPPED_RATE, trio.current_time)

    async def give(stream: Any) -> None:
        await stream.receive_some()
        await stream.send_all(frame(encode_header(header), 256))
        for offset in range(0, len(CONTENT), cap.quantum):
            await cap.wait(cap.quantum)
            await stream.send_all(CONTENT[offset : offset + cap.quantum])

    host.set_handler(CHECKPOINT_PROTOCOL, give)
    with trio.fail_after(3 * transfers.CHUNK_TIMEOUT), pytest.raises(TransferError, match="slow"):
        await fetch(host, tmp_path / "ours")


@pytest.mark.parametrize("rate", [0, MIN_CAPPED_RATE - 1, MIN_RATE + 1])
def test_no_donor_may_be_slower_than_the_slowest_nor_promise_more_than_is_asked(rate: int) -> None:
    header = CheckpointHeader(7, 350, 10_000, 1, bytes(32), min_rate=rate)
    with pytest.raises(RemoteProtocolError, match="header"):
        decode_header(encode_header(header), 1_000)


async def test_a_download_is_not_given_up_for_the_slowness_of_our_own_cap(
    nursery: trio.Nursery, tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    host: Any = MemoryHost(nursery)
    serve(host, saved_at(tmp_path / "theirs"))
    cap = Shaper(MIN_RATE / 8, trio.current_time)
    began = trio.current_time()
    await fetch(host, tmp_path / "ours", download=cap)
    assert (tmp_path / "ours").read_bytes() == CONTENT
    assert trio.current_time() - began >= (len(CONTENT) - cap.burst) / cap.rate > transfers.CHUNK_TIMEOUT


async def test_checkpoints_are_sent_as_fast_as_the_cap_lets_them(
    nursery: trio.Nursery, tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    host: Any = MemoryHost(nursery)
    cap = Shaper(2 * MIN_RATE, trio.current_time)
    serve(host, saved_at(tmp_path / "theirs"), cap)
    began = trio.current_time()
    await fetch(host, tmp_path / "ours")
    assert trio.current_time() - began >= (len(CONTENT) - cap.burst) / cap.rate


async def test_a_slow_line_serves_one_newcomer_at_a_time(nursery: trio.Nursery, tmp_path: Path) -> None:
    host: Any = MemoryHost(nursery)
    serve(host, saved_at(tmp_path / "theirs"), Shaper(MIN_RATE))
    stream = await host.open_stream(b"p" * 32, CHECKPOINT_PROTOCOL)
    await stream.send_all(frame(encode_question(SIGNED.run_id, 0), 34))
    await stream.receive_some(1)  # of the header: it is being served
    with pytest.raises(TransferError, match="no checkpoint to give now"):
        await fetch(host, tmp_path / "ours")
    nursery.cancel_scope.cancel()


@given(st.binary(max_size=300))
def test_rubbish_for_a_header_is_the_peers_fault(raw: bytes) -> None:
    try:
        header = decode_header(raw, 1_000)
    except RemoteProtocolError:
        return
    assert 1 <= header.size <= 1_000

"""A donor keeps its cap and priorities; who attacks a donor, or attacks as one, loses its stream and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.bandwidth import Shaper, Shaping
from farandole.node.base.errors import PeerUnreachableError
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.transfers import giver as giving
from farandole.node.transfers.giver import BlockService
from farandole.node.transfers.receiver import (
    LOST,
    Conditions,
    DonorSession,
    ask_for_index,
    fetch_checkpoint,
    open_donor,
)
from farandole.protocol.checkpoints.block_transfer import (
    BLOCK_TIMEOUT,
    MAX_WANTED,
    BlockQuestion,
    Busy,
    Forget,
    Give,
    Here,
    Want,
    decode_answered,
    decode_given,
    encode,
)
from farandole.protocol.checkpoints.blocks import SignedIndex, encode_signed_index, sign_index
from farandole.protocol.exchange.pipe import CONTROL_KIND, MESSAGE_KIND, Pipe, Route
from farandole.protocol.wire.framing import FrameParser, frame

from ...patience import PATIENCE
from ..parties import Faults, Handler, MemoryStream
from .files import KEY, NOBODY, RUN, ToDonor, checkpoint_bytes, finder, hold, index_of, run_here, signed_index_of

CONTENT = checkpoint_bytes(100_000)  # two blocks
MAX = 1 << 20


async def hear(stream: Any, parser: FrameParser) -> bytes | None:
    while (payload := parser.next_frame()) is None:
        data = await stream.receive_some()
        if not data:
            return None
        parser.receive_data(data)
    return payload


def say(message: Any) -> bytes:
    raw = message if isinstance(message, bytes) else encode(message)
    return frame(raw, MAX)


def say_in_pipe(message: Any) -> bytes:
    """Encode a message that follows the answer to a question."""
    if isinstance(message, Route):
        return frame(bytes((CONTROL_KIND,)) + msgspec.msgpack.encode(message), MAX)
    raw = message if isinstance(message, bytes) else encode(message)
    return frame(bytes((MESSAGE_KIND,)) + raw, MAX)


# A donor and its enemies


async def answers(tmp_path: Path, nursery: trio.Nursery, *said: bytes) -> list[Any]:
    """Return an honest donor's answers, until it closes the stream or is silent."""
    service = BlockService(Conditions(NOBODY, RUN), finder(hold(tmp_path / "theirs", CONTENT)))
    host = ToDonor(nursery, service.serve)
    stream = await host.open_stream(b"n" * 32, "")
    parser = FrameParser(MAX)
    heard: list[Any] = []
    for raw in said:
        await stream.send_all(raw)
    with trio.move_on_after(1.0):
        if (payload := await hear(stream, parser)) is None:
            return heard
        heard.append(decode_answered(payload))
        pipe = Pipe(True, max_message_bytes=MAX, is_large=True)
        pipe.begin()
        pipe.send(Route(None, 0))
        data: bytes | bytearray = parser.take_rest()
        while data or (data := await stream.receive_some()):
            pipe.receive_data(data)
            data = b""
            while (event := pipe.next_event()) is not None:
                heard.append(decode_given(event) if isinstance(event, bytes) else event)
                if isinstance(heard[-1], Give):
                    await stream.aclose()
                    return [*heard, "silence"]
        assert not service._served
        return heard
    await stream.aclose()
    return [*heard, "silence"]


QUESTION = say(BlockQuestion(RUN, 0, has_index=True))
HERE = Here(2)


async def test_an_honest_newcomer_is_given_what_it_wants(tmp_path: Path, nursery: trio.Nursery) -> None:
    heard = await answers(tmp_path, nursery, QUESTION, say_in_pipe(Route(None, 0)), say_in_pipe(Want(1, 1)))
    assert heard == [HERE, Route(None, 0), Give(1), "silence"]


@pytest.mark.parametrize(
    "said",
    [
        [b"\xff\xff\xff\xff"],
        [say(b"rubbish")],
        [say(msgspec.msgpack.encode(["Question", RUN, 2**63]))],
        [QUESTION, b"\xff\xff\xff\xff"],
        [QUESTION, say_in_pipe(b"rubbish")],
        [QUESTION, say_in_pipe(Want(0, 1))],
        [QUESTION, say_in_pipe(Route(None, 0)), say_in_pipe(Route(None, 0))],
        [QUESTION, say_in_pipe(Route(None, 0)), say_in_pipe(Want(2, 1))],
        [QUESTION, say_in_pipe(Route(None, 0)), say_in_pipe(Want(0, MAX_WANTED))],
        [QUESTION, say_in_pipe(Route(None, 0)), say_in_pipe(msgspec.msgpack.encode(["Want", 2**63, 1]))],
        [QUESTION, say_in_pipe(Route(None, 0)), QUESTION],
        [QUESTION, say_in_pipe(Forget(0))],
    ],
)
async def test_who_breaks_the_protocol_loses_the_stream(
    tmp_path: Path, nursery: trio.Nursery, said: list[bytes]
) -> None:
    heard = await answers(tmp_path, nursery, *said)
    assert heard == [HERE, Route(None, 0)][: len(heard)]


async def test_another_runs_newcomer_gets_nothing(tmp_path: Path, nursery: trio.Nursery) -> None:
    heard = await answers(tmp_path, nursery, say(BlockQuestion(b"x" * 32, 0)))
    assert [type(message).__name__ for message in heard] == ["Absent"]


async def test_one_peer_has_one_turn(tmp_path: Path, nursery: trio.Nursery) -> None:
    holding = hold(tmp_path / "theirs", CONTENT)
    num_found = 0

    async def find(question: BlockQuestion) -> Any:
        nonlocal num_found
        num_found += 1
        await trio.lowlevel.checkpoint()
        return holding

    service = BlockService(Conditions(NOBODY, RUN), find)
    host = ToDonor(nursery, service.serve)
    first, second = [await host.open_stream(b"n" * 32, "") for _ in range(2)]
    for stream in (first, second):
        await stream.send_all(QUESTION)
        heard = decode_answered(await hear(stream, FrameParser(MAX)) or b"")
        assert isinstance(heard, Here if stream is first else Busy)
    assert num_found == 1
    await first.aclose()
    nursery.cancel_scope.cancel()


# A newcomer and donors that attack it


def answer(raw: bytes, *more: bytes) -> Handler:
    async def donor(stream: Any) -> None:
        await hear(stream, FrameParser(MAX))
        await stream.send_all(raw)
        for data in more:
            await stream.receive_some()
            await stream.send_all(data)
        await trio.sleep(0.2)

    return donor


SIGNED, INDEX = signed_index_of(CONTENT)
FORGED = SignedIndex(SIGNED.body, bytes(64))
OTHER_RUN = sign_index(KEY, msgspec.structs.replace(INDEX, run_id=b"x" * 32))
LYING_SIZE = sign_index(KEY, msgspec.structs.replace(INDEX, size=len(CONTENT) + (1 << 20)))


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        say(b"rubbish"),
        say(Here(1, b"")),
        say(Here(1, b"rubbish")),
        say(Here(1, encode_signed_index(FORGED))),
        say(Here(1, encode_signed_index(OTHER_RUN))),
        say(Here(1, encode_signed_index(LYING_SIZE))),
        say(msgspec.msgpack.encode(["Here", 2**63, b""])),
        say(msgspec.msgpack.encode(Route(None, 0))),
    ],
)
async def test_a_donor_that_lies_about_the_index_is_left(nursery: trio.Nursery, said: bytes) -> None:
    host: Any = ToDonor(nursery, answer(said))
    with pytest.raises(PeerUnreachableError):
        await ask_for_index(Conditions(host, RUN), b"d" * 32, 0, 2 * len(CONTENT))
    assert index_of(CONTENT) == INDEX


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        say(b"rubbish"),
        say_in_pipe(b"rubbish"),
        say_in_pipe(Give(1)),  # not requested
        say_in_pipe(msgspec.msgpack.encode(["Give", 2**63])),
        say_in_pipe(Route(None, 0)),
        say_in_pipe(Give(0)) + b"too short",
    ],
)
async def test_a_donor_that_gives_what_nobody_asked_for_is_left(nursery: trio.Nursery, said: bytes) -> None:
    host: Any = ToDonor(nursery, answer(say(Here(2)), say_in_pipe(Route(None, 0)), said))
    conditions = Conditions(host, RUN)
    question = BlockQuestion(RUN, 0, SIGNED.id, has_index=True)

    async def take(block: int, data: memoryview) -> None:
        raise AssertionError("nothing came")

    with trio.fail_after(PATIENCE), pytest.raises(LOST):
        async with open_donor(conditions, b"d" * 32, question, len(CONTENT)) as (stream, parser, _):
            session = DonorSession(conditions, stream, len(CONTENT))
            await session.run(parser.take_rest(), lambda: session.tell(Want(0, 1)), take)


RATE = 200_000.0


class Exchanging(ExchangeService):
    """An exchange service with an exchange until the time ``until``."""

    def __init__(self, until: float) -> None:
        self.until = until

    @property
    def is_exchanging(self) -> bool:
        return trio.current_time() < self.until

    async def wait_quiet(self) -> None:
        await trio.sleep_until(self.until)


@pytest.mark.parametrize("exchange_seconds", [0.0, 40.0, 4_000.0])
async def test_while_an_exchange_goes_on_blocks_get_a_tenth_of_the_time(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, clock: MockClock, exchange_seconds: float
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    holding = hold(tmp_path / "theirs", CONTENT)
    up = Shaper(RATE, trio.current_time)
    began_at = trio.current_time()
    conditions = Conditions(NOBODY, RUN, Shaping(up, Shaper()))
    service = BlockService(conditions, finder(holding), Exchanging(began_at + exchange_seconds))
    host: Any = ToDonor(nursery, service.serve)
    donors = [b"d" * 32]
    await fetch_checkpoint(
        Conditions(host, RUN), holding.signed, holding.index, lambda: donors, lambda name: True, tmp_path / "ours"
    )
    seconds = trio.current_time() - began_at
    assert (tmp_path / "ours").read_bytes() == CONTENT
    usual = len(CONTENT) / RATE
    left = max(0.0, usual - exchange_seconds / (1 + giving.REST))
    expected = exchange_seconds + left if left else usual * (1 + giving.REST)
    assert 0.8 * expected <= seconds <= 1.2 * expected + 1.0


async def test_who_takes_nothing_of_what_he_wants_is_left(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, clock: MockClock
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    holding = hold(tmp_path / "theirs", CONTENT)
    ours, theirs = trio.testing.lockstep_stream_pair()  # what one does not read, the other cannot send
    has_asked = trio.Event()

    async def want() -> None:
        for said in (QUESTION, say_in_pipe(Route(None, 0)), say_in_pipe(Want(0, 1))):
            await ours.send_all(said)
            await ours.receive_some()
        has_asked.set()

    nursery.start_soon(want)
    with trio.fail_after(2 * BLOCK_TIMEOUT):
        await BlockService(Conditions(NOBODY, RUN), finder(holding)).serve(MemoryStream(theirs, bytes(32), Faults()))
    assert has_asked.is_set()

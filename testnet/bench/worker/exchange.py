"""The parts of the benchmark of exchanges: a node, and a program with a mesh."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
import trio
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import farandole
from farandole.node.base.control import call
from farandole.node.base.system.tuning import keep_memory
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.bulk.pipe import Outgoing
from farandole.node.mesh.host import open_host
from farandole.node.programs.mesh import MeshListener
from farandole.node.programs.stream import MeshStream
from farandole.protocol.exchange.exchange import Offer
from farandole.protocol.exchange.pipe import BULK_FROM
from farandole.protocol.rounds.pairing_events import ExchangeEnded, StartExchange
from farandole.protocol.run.rules import Codec, encoded_bytes
from farandole.protocol.wire.identity import public_key_of
from farandole.training.outer.codec import decode, encode

from ...play.process import NODE_COMMAND
from ..peers.peer import vector

# What a benchmark's processes measure of themselves.

# Sleep of the watched loop's task.
NAP: Final = 0.001
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextlib.contextmanager
def measured() -> Iterator[dict[str, Any]]:
    """Yield a dictionary, and fill it when the block ends.

    ``started_at``, ``ended_at``: `time.monotonic`; ``most_mb``: the peak resident memory during the block above that
    before it (the kernel keeps a maximum, VmHWM, which is reset before).
    """
    figures: dict[str, Any] = {}
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")
    idle_mb = memory_mb("VmRSS")
    figures["started_at"] = time.monotonic()
    yield figures
    figures["ended_at"] = time.monotonic()
    figures["most_mb"] = max(0.0, memory_mb("VmHWM") - idle_mb)


def memory_mb(name: str) -> float:
    """Return a figure of this process's memory (proc(5), ``status``), such as VmRSS, in MB; NaN without /proc."""
    if not _CLEAR_REFS.exists():
        return math.nan
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1_024 / 1e6


@contextlib.asynccontextmanager
async def watched_loop(figures: dict[str, Any]) -> AsyncIterator[None]:
    """Measure the lag of a task that repeatedly sleeps 1 ms, behind its due time: ``lag_ms`` with p50, p99, most."""
    lags: list[float] = []
    has_two = trio.Event()

    async def nap() -> None:
        while True:
            due_at = time.perf_counter() + NAP
            await trio.sleep(NAP)
            lags.append(1e3 * (time.perf_counter() - due_at))
            if len(lags) == 2:
                has_two.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(nap)
        yield
        await has_two.wait()  # the block may be over sooner, and percentiles need two values
        nursery.cancel_scope.cancel()
    hundredths = statistics.quantiles(lags, n=100, method="inclusive")
    figures["lag_ms"] = {"p50": hundredths[49], "p99": hundredths[98], "most_ms": max(lags)}


# Enough for an exchange of whole contributions over a slow line or a relay, on a busy machine.
EXCHANGE_SECONDS: Final = 60.0
ECHO, SINK = "bench-echo/1", "bench-sink/1"
PIECE_BYTES: Final = 1024 * 1024
# Of a program's request or stream.
TIMEOUT: Final = 120.0
_DIGEST: Final = bytes(32)
LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
PROTOCOL: Final = "/farandole/bench/1"
_T = TypeVar("_T")


async def accept(size: int, tokens: int) -> str | None:
    """Accept a contribution."""
    return None


async def exchange_with(
    exchanges: ExchangeService,
    peer: bytes,
    round_index: int,
    outgoing: Outgoing,
    incoming: memoryview,
    *,
    is_initiator: bool,
    codec: Codec = "fp32",
) -> ExchangeEnded:
    """Run one session of `ExchangeService.run`, named by the round, in which nothing is refused."""
    session = round_index.to_bytes(16, "big")
    deadline = trio.current_time() + EXCHANGE_SECONDS
    offer = Offer(
        run_id=_DIGEST,
        session=session,
        stage=0,
        layout=_DIGEST,
        codec=codec,
        size=outgoing.memory.nbytes,
        round=round_index,
        tokens=1,
    )
    start = StartExchange(session, peer, round_index, is_initiator, deadline)
    return await exchanges.run(start, offer, outgoing, incoming, accept, None)


def check_committed(result: ExchangeEnded) -> None:
    """Raise `ConnectionError` unless the exchange was committed, and a large one over a bulk channel."""
    if not result.committed:
        raise ConnectionError(f"an exchange was not committed: {result.reason}")
    if result.bytes_sent >= BULK_FROM and result.path != "bulk":
        raise ConnectionError("no bulk channel opened for an exchange")


class ExchangingNode:
    """One of two nodes with a plain connection, too; the one that connected initiates the exchanges.

    It holds a vector, too, which it encodes, and averages with the other's.
    """

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def listen(self, size: int) -> dict[str, Any]:
        """Make payloads of ``size`` bytes, open the host, and return its address and that of the plain listener."""
        random_bytes = np.random.default_rng(0).bytes(size)  # nothing on the way compresses them
        self._memory, self._incoming = memoryview(bytearray(random_bytes)), memoryview(bytearray(random_bytes))
        self._host = await self._stack.enter_async_context(open_host(Ed25519PrivateKey.generate(), [LOOPBACK]))
        self._channels = await self._stack.enter_async_context(open_bulk(self._host, bytes(32)))
        self._exchanges = ExchangeService(self._host, self._channels)
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        return {"address": self._host.addresses[0], "plain": self._listener.getsockname()}

    async def meet(self, address: str, plain: tuple[str, int], is_initiator: bool) -> None:
        """Connect to the other node's addresses, or let it connect."""
        self._peer, self._is_initiator = public_key_of(address.rpartition("/p2p/")[2]), is_initiator
        if is_initiator:
            await self._host.connect(self._peer, [address])
            self._plain = socket.create_connection((plain[0], plain[1]))
        else:
            self._plain, _ = await trio.to_thread.run_sync(self._listener.accept)

    async def swap(self, size: int) -> dict[str, Any]:
        """Move ``size`` bytes each way at once over the plain connection: the machine's upper bound."""
        with measured() as figures:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, self._plain.sendall, self._memory[:size])
                nursery.start_soon(trio.to_thread.run_sync, self._receive, size)
        return figures

    def _receive(self, size: int) -> None:
        received = 0
        while received < size:
            got = self._plain.recv_into(self._incoming[received:size])
            if not got:
                raise ConnectionError("the other end is gone")
            received += got

    def prepare(self, size: int) -> None:
        """Hash the first ``size`` bytes of the memory, to be exchanged next."""
        self._outgoing = Outgoing(self._memory[:size], blake3(self._memory[:size]).digest())

    def hold(self, index: int, num_elements: int) -> None:
        """Draw both vectors, and hold the ``index``-th; both nodes share the machine, so each has one thread."""
        torch.set_num_threads(1)
        keep_memory()
        first, second = (torch.from_numpy(vector(number, num_elements)) for number in range(2))
        self._vector, self._mean = (first, second)[index], (first + second) / 2

    def contribute(self, codec: str) -> dict[str, Any]:
        """Encode, and hash for the offer."""
        started_at = time.monotonic()
        size = encode(codec, self._vector, self._memory)
        self.prepare(size)
        return {"started_at": started_at, "ended_at": time.monotonic(), "size": size}

    async def exchange(self, round: int, codec: Codec = "fp32") -> dict[str, Any]:
        """Exchange what was prepared over a new channel, and measure the loop's lag."""
        self._channels.close_kept()
        own, incoming = self._outgoing, self._incoming[: self._outgoing.memory.nbytes]
        with measured() as figures:
            async with watched_loop(figures):
                result = await exchange_with(
                    self._exchanges, self._peer, round, own, incoming, is_initiator=self._is_initiator, codec=codec
                )
        check_committed(result)
        return figures

    def average(self, codec: str) -> dict[str, Any]:
        """Decode and average; return the distance from the mean of both vectors."""
        started_at = time.monotonic()
        size = encoded_bytes(codec, len(self._vector))
        mean = decode(codec, self._incoming[:size], len(self._vector)).add_(self._vector).mul_(0.5)
        ended_at = time.monotonic()
        error = float((mean - self._mean).square().mean().sqrt())
        return {"started_at": started_at, "ended_at": ended_at, "rms_error": error}


class MeshProgram:
    """A program with a node of its own, whose mesh it uses; it serves another such program."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    def open(self, manifest: str, place: str, peers: list[str]) -> dict[str, Any]:
        """Start a node in the folder ``place``; ``peers``: addresses of the other program's, if it has one yet."""
        self._folder = Path(place)
        shutil.rmtree(place, ignore_errors=True)
        command = [*NODE_COMMAND, "join", manifest, "--home", place, "--listen", LOOPBACK]
        bootstrap = [part for peer in peers[:1] for part in ("--bootstrap", peer)]
        node = subprocess.Popen([*command, *bootstrap], stdin=subprocess.DEVNULL)
        self._stack.callback(node.kill)
        self._mesh = _soon(lambda: farandole.Mesh(home=place))
        for name, serve in ((ECHO, _echo), (SINK, _sink)):
            listener = _soon(partial(self._mesh.listen, name))
            threading.Thread(target=_serve_all, args=[listener, serve], daemon=True).start()
        return {"addresses": self._mesh.status()["addresses"]}

    def connect(self) -> None:
        """Wait until the other program can be called, and pause the node, whose trainer would compute."""
        self._other = _soon(lambda: self._mesh.members()[0])
        self._calls = _soon(lambda: self._mesh.open(self._other, ECHO, 5.0))
        call(self._folder, "pause")

    def call(self, number: int, size: int) -> dict[str, Any]:
        """Send requests on one stream, one after the other; return the seconds until each answer."""
        seconds = []
        for _ in range(number):
            request = os.urandom(size)
            started_at = time.monotonic()
            self._calls.send(request, TIMEOUT)
            answer = self._calls.receive(TIMEOUT)
            seconds.append(time.monotonic() - started_at)
            assert answer == request
        return {"seconds": seconds}

    def push(self, size: int) -> dict[str, Any]:
        """Send bytes on a stream until the other program has them all."""
        piece = os.urandom(PIECE_BYTES)
        started_at = time.monotonic()
        with self._mesh.open(self._other, SINK) as stream:
            for start in range(0, size, PIECE_BYTES):
                stream.send(memoryview(piece)[: min(PIECE_BYTES, size - start)], TIMEOUT)
            stream.end()
            answer = stream.receive(TIMEOUT)
        assert answer == str(size).encode()
        return {"started_at": started_at, "ended_at": time.monotonic()}

    def share(self, size: int) -> dict[str, Any]:
        """Offer a file of random bytes."""
        path = self._folder / f"bench-{time.monotonic_ns()}"
        path.write_bytes(os.urandom(size))
        return {"file": self._mesh.share(path)}

    def fetch(self, file: str, size: int) -> dict[str, Any]:
        """Fetch the other's file."""
        path = self._folder / "bench-fetched"
        started_at = time.monotonic()
        self._mesh.fetch(file, path)
        ended_at = time.monotonic()
        assert path.stat().st_size == size
        path.unlink()
        return {"started_at": started_at, "ended_at": ended_at}


def _soon(act: Callable[[], _T]) -> _T:
    """Return what comes of an act once the node, and its peer, can do it."""
    while True:
        with contextlib.suppress(IndexError, farandole.MeshError):
            return act()
        time.sleep(NAP)  # there is no event for it, so poll


def _serve_all(listener: MeshListener, serve: Callable[[MeshStream], None]) -> None:
    for stream in listener:
        threading.Thread(target=serve, args=[stream], daemon=True).start()


def _echo(stream: MeshStream) -> None:
    with contextlib.suppress(farandole.MeshError, TimeoutError), stream:
        for message in stream:
            stream.send(message, TIMEOUT)


def _sink(stream: MeshStream) -> None:
    with contextlib.suppress(farandole.MeshError, TimeoutError), stream:
        stream.send(str(sum(map(len, stream))).encode(), TIMEOUT)

"""Two homes try to reach each other with plain sockets, and the result is compared with theory."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import trio

from farandole.testnet.natlab import kinds
from farandole.testnet.natlab.groups import Leash
from farandole.testnet.natlab.kinds import HTTPS_PORT, HomeKind
from farandole.testnet.natlab.namespace import Location

from .probe import TOKEN_BYTES, Address

PROBE: Final = Path(__file__).with_name("probe.py")
# A path opens within milliseconds, or after one repetition of TCP's first packet, which takes a second. The trial waits
# no longer than that if theory predicts no path, and otherwise as long as a busy machine may need.
PATHLESS_SECONDS: Final = 1.5
PATIENCE: Final = 20.0
# Each trial uses fresh ports, so that no NAT remembers them.
_FIRST_PORT: Final = 20_000

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Reach:
    """The ways in which two homes reach each other; in ``connect`` the first calls the second, else the reverse."""

    connect: bool
    connect_back: bool
    punch: bool


def expected(near: HomeKind, far: HomeKind) -> Reach:
    """Return what theory predicts."""
    return Reach(kinds.can_connect(near, far), kinds.can_connect(far, near), kinds.can_punch_tcp(near, far))


@dataclass
class ProbeProcess:
    """A process that runs ``probe.py`` in a place."""

    process: trio.Process
    _next_port: int = _FIRST_PORT
    _next_id: int = 0
    _sending: trio.Lock = field(default_factory=trio.Lock)
    _answers: dict[int, tuple[trio.Event, list[Any]]] = field(default_factory=dict)

    def take_port(self) -> int:
        """Return an unused local port."""
        self._next_port += 1
        return self._next_port

    async def ask(self, do: str, **fields: object) -> Any:
        """Send a request and wait for its answer."""
        self._next_id += 1
        event, result = self._answers[self._next_id] = trio.Event(), []
        assert self.process.stdin is not None
        line = msgspec.json.encode({"id": self._next_id, "do": do, **fields}) + b"\n"
        async with self._sending:
            await self.process.stdin.send_all(line)
        await event.wait()
        return result[0]

    async def observe(self, third: str, port: int, seconds: float = PATIENCE) -> Address | None:
        """Return the local port's address as the third host sees it; None if that host cannot be reached."""
        target = third, HTTPS_PORT
        answer = await self.ask("observe", port=port, target=target, seconds=seconds)
        return answer and tuple(answer)

    async def end(self) -> None:
        """Kill the process, and close its pipes."""
        self.process.kill()
        await self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                await pipe.aclose()

    async def receive(self) -> None:
        """Receive answers until the process ends."""
        assert self.process.stdout is not None
        buffer = b""
        with suppress(trio.ClosedResourceError):
            async for data in self.process.stdout:
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._take_in(msgspec.json.decode(line))

    def _take_in(self, answer: dict[str, Any]) -> None:
        event, result = self._answers.pop(answer["id"])
        result.append(answer["result"])
        event.set()


@asynccontextmanager
async def open_probes(places: Mapping[Name, Location], leash: Leash) -> AsyncIterator[dict[Name, ProbeProcess]]:
    """Open a probe in each place."""
    async with trio.open_nursery() as nursery:
        probes = {}
        try:
            for name, place in places.items():
                command = [*place.enter, sys.executable, str(PROBE)]
                process = await trio.lowlevel.open_process(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
                leash.hold(process.pid)
                probes[name] = ProbeProcess(process)
                nursery.start_soon(probes[name].receive)
            yield probes
        finally:
            with trio.CancelScope(shield=True):  # killed processes end at once
                for probe in probes.values():
                    await probe.end()
                    leash.release(probe.process.pid)
            nursery.cancel_scope.cancel()


async def try_pair(near: ProbeProcess, far: ProbeProcess, third: str, theory: Reach) -> Reach:
    """Try all ways at once; the third host serves at port 443 of that address."""
    connect, connect_back, punch = (
        PATIENCE if is_path else PATHLESS_SECONDS for is_path in (theory.connect, theory.connect_back, theory.punch)
    )
    results: dict[str, bool] = {}

    async def note(name: str, trial: Callable[[], Awaitable[bool]]) -> None:
        results[name] = await trial()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(note, "connect", partial(_connects, near, far, third, connect))
        nursery.start_soon(note, "connect_back", partial(_connects, far, near, third, connect_back))
        nursery.start_soon(note, "punch", partial(_punches, near, far, third, punch))
    return Reach(**results)


async def _connects(near: ProbeProcess, far: ProbeProcess, third: str, seconds: float) -> bool:
    """Return whether ``near`` can call the address that the third host has observed of ``far``."""
    port = far.take_port()
    target = await far.observe(third, port)
    assert target is not None, "the third cannot be reached"
    given = {"token": _new_token(), "seconds": seconds}
    return await _both(
        partial(far.ask, "answer", port=port, **given),
        partial(near.ask, "connect", target=target, **given),
    )


async def _punches(near: ProbeProcess, far: ProbeProcess, third: str, seconds: float) -> bool:
    """Return whether both find a path, each with the address that the third host has observed of the other."""
    near_port, far_port = near.take_port(), far.take_port()
    near_seen = await near.observe(third, near_port, seconds)
    far_seen = await far.observe(third, far_port, seconds)
    if near_seen is None or far_seen is None:
        return False
    given = {"token": _new_token(), "seconds": seconds}
    return await _both(
        partial(near.ask, "punch", port=near_port, target=far_seen, **given),
        partial(far.ask, "punch", port=far_port, target=near_seen, **given),
    )


def _new_token() -> str:
    return secrets.token_hex(TOKEN_BYTES // 2)


async def _both(*trials: Callable[[], Awaitable[bool]]) -> bool:
    """Run the trials at once; return whether all succeed."""
    results = []

    async def note(trial: Callable[[], Awaitable[bool]]) -> None:
        results.append(await trial())

    async with trio.open_nursery() as nursery:
        for trial in trials:
            nursery.start_soon(note, trial)
    return all(results)

"""Makes connections for a host, with its own implementation of "happy eyeballs" (RFC 8305).

Every address of a peer is tried, each 150 ms after the previous one, or at once when that one failed. The first that
is authenticated and multiplexed wins.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from farandole.protocol.wire.identity import peer_id_of

from ..base.errors import PeerUnreachableError
from .connection import CLOSE_TIMEOUT
from .dial_plan import DIRECT_HEAD_START, Dial
from .yamux import MuxedConn

if TYPE_CHECKING:
    from .host import Host

logger = logging.getLogger(__name__)

DIAL_TIMEOUT = 8.0
# Between two addresses of one peer: RFC 8305 recommends 250 ms and allows 100.
DIAL_STAGGER = 0.15
# Pauses, in seconds, before further attempts at an address whose node hangs up before it has authenticated itself. Each
# is multiplied by 0.5 to 1.5.
REDIAL_PAUSES = (0.1, 0.2, 0.4, 0.4)


class Dialler:
    """One host's dials; part of `farandole.node.mesh.host.Host`."""

    def __init__(self, host: Host, nursery: trio.Nursery) -> None:
        self._host = host
        self._nursery = nursery
        self._dials: dict[tuple[bytes, bool], Dial] = {}

    async def dial(self, peer: bytes, addresses: Sequence[str], *, is_direct: bool) -> PeerUnreachableError | None:
        """Dial a peer, together with all callers that dial it now; return the error, if any."""
        dial = self._dials.get((peer, is_direct))
        if dial is None:
            dial = self._dials[peer, is_direct] = Dial(is_direct, self._host.own.interfaces)
            self._nursery.start_soon(self._run, peer, dial)
        dial.offer(addresses)
        await dial.done.wait()
        return dial.error

    def offer(self, peer: bytes, addresses: Sequence[str]) -> None:
        """Add addresses to the dials of this peer that are running."""
        for (dialled, _), dial in self._dials.items():
            if dialled == peer:
                dial.offer(addresses)

    async def _run(self, peer: bytes, dial: Dial) -> None:
        is_adopted = False
        try:
            if peer == self._host.author:
                raise PeerUnreachableError("this is myself")
            if self._host.connections.is_offline:
                raise PeerUnreachableError("this node is offline for now")
            dial.offer(self._host.addresses_of(peer))
            with trio.move_on_after(DIAL_TIMEOUT):
                await self._race(peer, dial)
            if dial.winner is None:
                reasons = "; ".join(dial.failures) or "no address of it is known, or none answered"
                raise PeerUnreachableError(f"cannot reach {peer_id_of(peer)}: {reasons}")
            address, muxed = dial.winner
            self._host.add_addresses(peer, [address])
            is_adopted = True
            await self._host.connections.add(muxed, is_outbound=True)
        except PeerUnreachableError as error:
            dial.error = error
        except Exception as error:  # no exception of the library leaves
            dial.error = PeerUnreachableError(f"cannot reach {peer_id_of(peer)}: {error!r}")
        finally:
            if dial.winner is not None and not is_adopted:  # cancelled as soon as it was there
                await _discard(dial.winner[1])
            del self._dials[peer, dial.is_direct]
            dial.done.set()

    async def _race(self, peer: bytes, dial: Dial) -> None:
        async def attempt(address: str) -> None:
            try:
                muxed = await self._dial_patiently(peer, address)
            except Exception as error:  # whatever the handshakes raise, another address may do
                dial.failures.append(f"{address}: {str(error) or repr(error)}")
                dial.news.set()
            else:
                if dial.winner is None:
                    dial.winner = (address, muxed)
                    nursery.cancel_scope.cancel()
                else:
                    await _discard(muxed)

        async with trio.open_nursery() as nursery:
            while True:
                dial.news = trio.Event()
                is_trying = bool(nursery.child_tasks)
                address = dial.next_address(peer, is_trying=is_trying)
                if address is not None:
                    nursery.start_soon(attempt, address)
                    with trio.move_on_after(DIAL_STAGGER):
                        await dial.news.wait()
                elif is_trying:
                    with trio.move_on_after(DIRECT_HEAD_START):
                        await dial.news.wait()
                else:
                    return

    async def _dial_patiently(self, peer: bytes, address: str) -> MuxedConn:
        """Dial again if the other end hangs up at once: a peer refuses some while too many dial it."""
        for pause in REDIAL_PAUSES:
            try:
                return await self._host.dial_one(peer, address)
            except (OSError, PeerUnreachableError, trio.TooSlowError):
                raise
            except Exception as error:  # the handshakes raise whatever comes when the other end is gone
                logger.debug("%s hung up: %r", address, error)
                await trio.sleep(pause * random.uniform(0.5, 1.5))
        return await self._host.dial_one(peer, address)


async def _discard(muxed: MuxedConn) -> None:
    """Close a connection that no task runs yet, cancelled or not: nothing else owns its socket."""
    with trio.CancelScope(deadline=trio.current_time() + CLOSE_TIMEOUT, shield=True):
        await muxed.link.close()

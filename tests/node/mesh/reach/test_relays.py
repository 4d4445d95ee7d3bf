"""The relays that a node asks for a reservation."""

from __future__ import annotations

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.mesh.reach.connectivity import MAX_STRANGERS, RelayKeeper
from farandole.node.mesh.reach.reachability import Reachability
from farandole.node.mesh.relay_client import Reservation
from farandole.protocol.wire.identity import public_bytes

from ...relayed import open_home, open_relay
from .test_connectivity import HIDDEN

NOBODY = "/ip4/127.0.0.1/tcp/9"


async def test_in_a_large_run_a_few_strangers_are_asked_at_a_time_and_the_likeliest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = [public_bytes(Ed25519PrivateKey.generate()) for _ in range(4 * MAX_STRANGERS)]
    asked: list[bytes] = []
    asked_before: list[int] = []
    held: list[bytes] = []
    async with open_relay() as relay, open_home() as home, trio.open_nursery() as nursery:
        home.dialler.add_addresses(relay.host.author, relay.host.addresses)
        for member in members:
            home.dialler.add_addresses(member, [NOBODY])
        ask = home.relays.reserve

        async def reserve(peer: bytes) -> Reservation:
            if peer in members:
                asked.append(peer)
            return await ask(peer)

        async def find() -> list[bytes]:
            asked_before.append(len(asked))
            if len(asked_before) == 3:
                held.extend(each.relay for each in keeper.held)
                nursery.cancel_scope.cancel()
            return [relay.host.author, *members]

        monkeypatch.setattr(home.relays, "reserve", reserve)
        keeper = RelayKeeper(home, Reachability(HIDDEN), bytes(32))
        monkeypatch.setattr(keeper, "_find", find)
        nursery.start_soon(keeper.run)
    assert held == [relay.host.author]
    assert len(set(asked)) == len(asked)
    assert asked_before == [0, MAX_STRANGERS - 1, 2 * MAX_STRANGERS - 1]

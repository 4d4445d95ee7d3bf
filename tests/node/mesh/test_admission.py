import math
from typing import Any

import pytest
import trio
import trio.lowlevel

from farandole.node.mesh import host, links
from farandole.node.mesh.connections import AFTERMATH_SECONDS, MAX_FLOODED, STRANGER_SECONDS, FloodedNetworks
from farandole.node.mesh.host import make_room
from farandole.node.mesh.links import Site, Turns, site_of


class _Socket:
    def __init__(self, host: str, waiting_since: float = math.inf) -> None:
        self.site = site_of(host)
        self.waiting_since = waiting_since
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def begin(handshakes: set[Any], *sockets: _Socket) -> list[bool]:
    """Admit and count each socket if there is room; return whether each was admitted."""
    admitted = []
    for socket in sockets:
        admitted.append(make_room(handshakes, socket.site))
        if admitted[-1]:
            handshakes.add(socket)
    return admitted


def test_a_site_is_a_network_and_an_address_of_one_customer() -> None:
    assert site_of("192.0.2.7") == Site("192.0.2.0/24", "192.0.2.7/32")
    assert site_of("2001:db8:1:2:3::4") == Site("2001:db8:1::/48", "2001:db8:1:2::/64")
    assert site_of("fe80::1%eth0") == site_of("fe80::2")
    assert site_of("") == site_of("nonsense") == Site("", "")


def test_strangers_from_where_a_flood_came_are_let_in_one_by_one() -> None:
    networks = FloodedNetworks()
    flooder, neighbour, other = map(site_of, ("1.1.1.1", "1.1.1.2", "2.2.2.2"))
    assert networks.lets_in(flooder, 0.0)
    networks.note(flooder, 1.0)
    times = [float(second) for second in range(2, 102)]
    let_in = [now for now in times if networks.lets_in(neighbour, now)]
    assert len(let_in) == 100 / STRANGER_SECONDS
    assert all(networks.lets_in(other, now) for now in times)
    assert all(networks.lets_in(flooder, 1.0 + AFTERMATH_SECONDS + second) for second in range(5))


@pytest.mark.parametrize("host", ["127.0.0.1", "192.168.1.7", "fe80::1", ""])
def test_a_flood_from_this_machine_or_its_network_keeps_no_neighbour_out(host: str) -> None:
    networks = FloodedNetworks()
    networks.note(site_of(host), 0.0)
    assert all(networks.lets_in(site_of(host), float(second)) for second in range(5))


def test_networks_that_flooded_last_are_remembered() -> None:
    networks = FloodedNetworks()
    sites = [site_of(f"5.{number // 256}.{number % 256}.1") for number in range(MAX_FLOODED + 1)]
    for site in sites:
        networks.note(site, 0.0)
    assert networks.lets_in(sites[0], 1.0)
    assert not any(networks.lets_in(site, 1.0) for site in sites[1:])


def test_at_one_address_who_keeps_us_waiting_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_HANDSHAKES_PER_ADDRESS", 3)
    handshakes: set[Any] = set()
    sockets = [_Socket("1.1.1.1"), _Socket("1.1.1.1", 5.0), _Socket("1.1.1.1", 4.0)]
    assert begin(handshakes, *sockets, _Socket("1.1.1.1"), _Socket("2.2.2.2")) == [True] * 5
    assert [socket.is_aborted for socket in sockets] == [False, False, True]
    assert len(handshakes) == 4


@pytest.mark.parametrize(
    ("limit", "others"),
    [("MAX_HANDSHAKES_PER_ADDRESS", ["9.9.9.9"] * 3), ("MAX_HANDSHAKES", ["9.9.9.1", "9.9.9.2", "9.9.9.3"])],
)
def test_where_all_wait_for_us_newcomers_to_a_full_address_or_network_are_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str, others: list[str]
) -> None:
    monkeypatch.setattr(host, limit, 3)
    handshakes: set[Any] = set()
    sockets = [_Socket("2.2.2.2", 0.5)] if limit == "MAX_HANDSHAKES" else [_Socket(others[0])]
    sockets += [_Socket(address) for address in others[:2]]
    assert begin(handshakes, *sockets, newcomer := _Socket(others[2])) == [True, True, True, False]
    assert not any(socket.is_aborted for socket in sockets)
    handshakes.remove(sockets[0])
    assert begin(handshakes, newcomer) == [True]


@pytest.mark.parametrize("waiting_since", [1.0, math.inf])
def test_the_busiest_network_makes_room_for_the_others(monkeypatch: pytest.MonkeyPatch, waiting_since: float) -> None:
    monkeypatch.setattr(host, "MAX_HANDSHAKES", 5)
    handshakes: set[Any] = set()
    honest = [_Socket("2.2.2.2", 0.5), _Socket("2001:db8::1", 0.5)]
    crowd = [_Socket(f"9.9.9.{number}", waiting_since) for number in range(3)]
    assert begin(handshakes, *honest, *crowd) == [True] * 5
    newcomers = [_Socket("3.3.3.3"), _Socket("4.4.4.4")]
    assert begin(handshakes, *newcomers) == [True, True]
    assert not any(socket.is_aborted for socket in honest)
    assert sum(socket.is_aborted for socket in crowd) == 2


async def test_sites_take_turns(autojump_clock: trio.abc.Clock) -> None:
    turns = Turns()
    done: list[Site] = []

    async def go_on(site: Site) -> None:
        await turns.take(site)
        done.append(site)

    busy, quiet = site_of("9.9.9.9"), site_of("2.2.2.2")
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(go_on, busy)
        await trio.sleep(1)
        nursery.start_soon(go_on, quiet)
        await trio.sleep(1)
        assert not done
        nursery.start_soon(turns.run)
        while len(done) < 21:
            before = len(done)
            await trio.lowlevel.checkpoint()
            assert len(done) - before <= 2 * links.STEPS_PER_PASS
        nursery.cancel_scope.cancel()
    assert quiet in done[: 2 * links.STEPS_PER_PASS]


async def test_who_stops_waiting_for_its_turn_holds_up_nobody(autojump_clock: trio.abc.Clock) -> None:
    turns = Turns()
    site = site_of("9.9.9.9")
    with trio.move_on_after(1):
        await turns.take(site)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        with trio.fail_after(1):
            await turns.take(site)
        nursery.cancel_scope.cancel()

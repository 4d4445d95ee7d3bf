"""Addresses that a node dials because a peer names them, alone or to punch a hole: which, and for how long."""

from __future__ import annotations

import pytest

from farandole.protocol.mesh.dialling import (
    FIRST_PAUSE,
    FREE_OF_IP,
    FREE_OF_PORT,
    MAX_OFFERED,
    MAX_PAUSE,
    MAX_TARGETS,
    DialBudget,
    may_dial,
    offer,
    targets,
)


@pytest.mark.parametrize(("ip", "port"), [("8.8.8.8", 4001), ("2001:4860:4860::8888", 1024), ("::ffff:8.8.8.8", 4001)])
def test_addresses_on_the_internet_are_dialled(ip: str, port: int) -> None:
    assert may_dial(ip, port, [])


@pytest.mark.parametrize(
    ("ip", "port"),
    [
        ("127.0.0.1", 4001),
        ("::1", 4001),
        ("192.168.77.1", 8080),
        ("10.0.0.1", 4001),
        ("169.254.169.254", 8080),  # where clouds serve a machine's secrets
        ("fd00::1", 4001),
        ("fe80::1%eth0", 4001),
        ("::ffff:192.168.77.1", 8080),
        ("0.0.0.0", 4001),
        ("224.0.0.1", 4001),
        ("localhost", 4001),
        ("8.8.8.8", 22),
        ("8.8.8.8", 443),
        ("8.8.8.8", 0),
        ("8.8.8.8", 70_000),
    ],
)
def test_this_machine_its_networks_and_well_known_ports_are_not(ip: str, port: int) -> None:
    assert not may_dial(ip, port, ["0.0.0.0", "::", "1.1.1.1"])


def test_a_private_network_is_dialled_where_this_node_has_business_in_it() -> None:
    assert may_dial("192.168.77.9", 4001, ["192.168.77.5"])
    assert may_dial("127.0.0.1", 4001, ["127.0.0.1"])
    assert not may_dial("192.168.77.9", 80, ["192.168.77.5"])
    assert not may_dial("192.168.78.9", 4001, ["192.168.77.5"])


def test_where_no_peer_proves_itself_there_are_few_attempts_however_many_peers_are_said_to_be_there() -> None:
    budget = DialBudget()
    day = sum(budget.take("203.0.113.5", 4001, float(second)) for second in range(86_400))
    assert FREE_OF_PORT <= day <= FREE_OF_PORT + 7 + 86_400 / MAX_PAUSE


def test_all_ports_of_one_machine_and_all_addresses_of_one_ipv6_network_count_together() -> None:
    budget = DialBudget()
    assert sum(budget.take("203.0.113.5", port, 0.0) for port in range(2_000, 4_000)) == FREE_OF_IP
    assert budget.take("203.0.113.6", 2_000, 0.0)
    assert budget.take("203.0.113.5", 5_000, FIRST_PAUSE)
    budget = DialBudget()
    assert sum(budget.take(f"2001:db8::{number:x}", 4001, 0.0) for number in range(1_000)) == FREE_OF_IP
    assert budget.take("2001:db8:0:1::1", 4001, 0.0)
    budget.succeed("2001:db8::1", 4001)
    assert budget.take("2001:db8::ffff", 4001, 0.0)


def test_a_peer_that_proves_itself_clears_its_address_and_what_is_remembered_is_bounded() -> None:
    budget = DialBudget()
    for _ in range(100):
        assert budget.take("203.0.113.5", 4001, 0.0)
        budget.succeed("203.0.113.5", 4001)
    budget = DialBudget()
    for number in range(2 * MAX_TARGETS):
        budget.take(f"2001:db8:0:{number:x}::1", 4001, 0.0)
    assert len(budget._vain) == MAX_TARGETS


# Punching

US, THEM = ("8.8.8.8", 4001), ("9.9.9.9", 4001)
LAN = ["192.168.1.7"]


def test_what_others_see_is_offered_first_and_nothing_twice() -> None:
    assert offer([US], [("192.168.1.7", 4001), US]) == [US, ("192.168.1.7", 4001)]
    assert len(offer([US] * 20, [("10.0.0.1", port) for port in range(20)])) == MAX_OFFERED


def test_only_neighbours_behind_one_router_make_a_node_dial_into_its_own_network_and_none_system_services() -> None:
    inside = [("192.168.1.1", 8080), ("127.0.0.1", 8080), ("10.0.0.1", 8080), ("169.254.169.254", 8080)]
    assert targets([THEM, *inside], [US], LAN) == [THEM]
    offered = [("8.8.8.8", 5001), ("192.168.1.9", 5001), ("10.0.0.1", 5001)]
    assert targets(offered, [US], LAN) == [("8.8.8.8", 5001), ("192.168.1.9", 5001)]
    offered = [("nowhere", 4001), ("0.0.0.0", 4001), ("224.0.0.1", 4001), ("fe80::1%eth0", 4001), ("9.9.9.9", 22)]
    assert targets(offered, [US], LAN) == []
    assert targets([("9.9.9.9", 443), ("::ffff:9.9.9.9", 4001)], [US], LAN) == [("9.9.9.9", 443), ("9.9.9.9", 4001)]

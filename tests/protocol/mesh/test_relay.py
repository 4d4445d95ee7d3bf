"""Which peers a relay serves, and addresses through relays."""

import pytest

from farandole.protocol.mesh.relay import CircuitAddress, Limits, RelayTable, Status, circuit_address, parse_circuit
from farandole.protocol.wire.identity import peer_id_of

ALICE, BOB, CAROL, RELAY = (bytes([number]) * 32 for number in range(1, 5))
HOME = "192.0.2.1"


def reserved(limits: Limits, *peers: bytes) -> RelayTable:
    table = RelayTable(limits)
    for index, peer in enumerate(peers):
        assert table.reserve(peer, f"198.51.100.{index}", 0.0) is Status.OK
    return table


def test_a_circuit_needs_a_reservation_of_whom_it_leads_to_which_ends_with_its_time_or_connection() -> None:
    table = reserved(Limits(), BOB)
    assert table.open_circuit(ALICE, BOB, 1.0) is Status.OK
    assert table.open_circuit(BOB, ALICE, 1.0) is Status.NO_RESERVATION
    assert table.open_circuit(BOB, BOB, 1.0) is Status.PERMISSION_DENIED
    assert table.num_circuits == 1
    table = reserved(Limits(reservation_seconds=100), BOB)
    assert table.open_circuit(ALICE, BOB, 100.0) is Status.NO_RESERVATION
    assert table.reserve(BOB, HOME, 100.0) is Status.OK
    assert table.reserve(BOB, HOME, 150.0) is Status.OK
    assert len(table.reservations) == 1
    assert table.open_circuit(ALICE, BOB, 249.0) is Status.OK
    table.forget(BOB)
    assert table.open_circuit(ALICE, BOB, 249.0) is Status.NO_RESERVATION


def test_reservations_are_limited_in_all_and_by_address() -> None:
    table = RelayTable(Limits(max_reservations=3, max_reservations_per_address=2))
    assert [table.reserve(bytes([n]) * 32, HOME, 0.0) for n in range(3)] == [
        Status.OK,
        Status.OK,
        Status.RESERVATION_REFUSED,
    ]
    assert table.reserve(ALICE, HOME, 1.0) is Status.OK  # a renewal, so it takes no second reservation
    assert table.reserve(BOB, "192.0.2.2", 1.0) is Status.OK
    assert table.reserve(b"z" * 32, "192.0.2.3", 1.0) is Status.RESERVATION_REFUSED
    table.forget(ALICE)
    assert table.reserve(b"z" * 32, "192.0.2.3", 1.0) is Status.OK


def test_circuits_are_limited_in_all_and_by_either_end_and_their_places_come_back() -> None:
    table = reserved(Limits(max_circuits=3, max_circuits_per_peer=2), BOB, CAROL)
    assert table.open_circuit(ALICE, BOB, 0.0) is Status.OK
    assert table.open_circuit(CAROL, BOB, 0.0) is Status.OK
    assert table.open_circuit(RELAY, BOB, 0.0) is Status.RESOURCE_LIMIT_EXCEEDED
    assert table.open_circuit(ALICE, CAROL, 0.0) is Status.OK
    assert table.open_circuit(RELAY, CAROL, 0.0) is Status.RESOURCE_LIMIT_EXCEEDED
    table.close_circuit(ALICE, BOB)
    assert table.open_circuit(RELAY, BOB, 0.0) is Status.OK
    for source, target in ((RELAY, BOB), (CAROL, BOB), (ALICE, CAROL)):
        table.close_circuit(source, target)
    assert table.num_circuits == 0
    assert not table._circuits


def test_an_address_through_a_relay_is_taken_apart_and_made() -> None:
    address = circuit_address("/ip4/192.0.2.1/tcp/4001", RELAY)
    assert parse_circuit(address) == CircuitAddress(RELAY, "/ip4/192.0.2.1/tcp/4001", None)
    assert parse_circuit(f"{address}/p2p/{peer_id_of(BOB)}") == CircuitAddress(RELAY, "/ip4/192.0.2.1/tcp/4001", BOB)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/ip4/192.0.2.1/tcp/4001",
        f"/ip4/192.0.2.1/tcp/4001/p2p/{peer_id_of(BOB)}",
        "/ip4/192.0.2.1/tcp/4001/p2p/nobody/p2p-circuit",
        f"/ip4/192.0.2.1/udp/4001/quic-v1/p2p/{peer_id_of(BOB)}/p2p-circuit",
        f"/p2p/{peer_id_of(BOB)}/p2p-circuit",
        f"{circuit_address(circuit_address('/ip4/192.0.2.1/tcp/1', BOB), RELAY)}",
    ],
)
def test_other_addresses_are_none(address: str) -> None:
    assert parse_circuit(address) is None

"""Which addresses are offered, and which offered addresses are dialled."""

from farandole.protocol.mesh.punching import MAX_OFFERED, offer, targets

US, THEM = ("8.8.8.8", 4001), ("9.9.9.9", 4001)
LAN = ["192.168.1.7"]


def test_what_others_see_is_offered_first_and_nothing_twice() -> None:
    assert offer([US], [("192.168.1.7", 4001), US]) == [US, ("192.168.1.7", 4001)]
    assert len(offer([US] * 20, [("10.0.0.1", port) for port in range(20)])) == MAX_OFFERED


def test_a_peer_elsewhere_cannot_make_a_node_dial_into_its_own_network() -> None:
    inside = [("192.168.1.1", 8080), ("127.0.0.1", 8080), ("10.0.0.1", 8080), ("169.254.169.254", 8080)]
    assert targets([THEM, *inside], [US], LAN) == [THEM]


def test_neighbours_behind_one_router_may_meet_inside() -> None:
    offered = [("8.8.8.8", 5001), ("192.168.1.9", 5001), ("10.0.0.1", 5001)]
    assert targets(offered, [US], LAN) == [("8.8.8.8", 5001), ("192.168.1.9", 5001)]


def test_nonsense_and_system_services_are_not_dialled() -> None:
    offered = [("nowhere", 4001), ("0.0.0.0", 4001), ("224.0.0.1", 4001), ("fe80::1%eth0", 4001), ("9.9.9.9", 22)]
    assert targets(offered, [US], LAN) == []
    assert targets([("9.9.9.9", 443), ("::ffff:9.9.9.9", 4001)], [US], LAN) == [("9.9.9.9", 443), ("9.9.9.9", 4001)]

"""The addresses that an invite contains."""

from __future__ import annotations

import msgspec

from farandole.node.join.invites import choose_bootstrap_addresses, warnings_about
from farandole.node.status.status import MemberStatus
from farandole.protocol.mesh.reachability import ReachabilityKind, Verdict, has_moved
from farandole.protocol.run.invite import Invite, decode_invite, encode_invite
from farandole.protocol.wire.identity import peer_id_of

from ..statuses import ALICE, STATUS

RELAY = peer_id_of(b"r" * 32)
THROUGH_RELAY = f"/ip4/9.9.9.9/tcp/4001/p2p/{RELAY}/p2p-circuit"


def member(number: int, *addresses: str, is_live: bool = True, is_connected: bool = True) -> MemberStatus:
    return msgspec.structs.replace(
        STATUS.members[1],
        peer_id=peer_id_of(bytes([number]) * 32),
        addresses=list(addresses),
        is_live=is_live,
        is_connected=is_connected,
    )


def chosen(own: list[str], *members: MemberStatus) -> list[str]:
    addresses = choose_bootstrap_addresses(
        msgspec.structs.replace(
            STATUS, addresses=[f"{address}/p2p/{ALICE}" for address in own], members=[STATUS.members[0], *members]
        )
    )
    assert decode_invite(encode_invite(Invite(bytes(32), tuple(addresses)))).addresses == tuple(addresses)
    return [address.removesuffix(f"/p2p/{address.rpartition('/p2p/')[2]}") for address in addresses]


def test_a_home_names_its_relayed_address_and_members_that_are_public() -> None:
    assert chosen(
        ["/ip4/192.168.1.5/tcp/4001", THROUGH_RELAY],
        member(1, "/ip4/192.168.1.6/tcp/4001", "/ip4/8.8.8.1/tcp/4001"),
        member(2, "/ip4/8.8.8.2/tcp/4001", is_live=False),
        member(3, "/ip4/8.8.8.3/tcp/4001", is_connected=False),
        member(4, THROUGH_RELAY),
    ) == ["/ip4/8.8.8.1/tcp/4001", "/ip4/8.8.8.3/tcp/4001", THROUGH_RELAY, THROUGH_RELAY, "/ip4/192.168.1.5/tcp/4001"]


def test_the_first_of_a_run_names_what_its_router_says() -> None:
    """No other member is there yet to try the address."""
    own, outer = (f"/ip4/{ip}/tcp/4001/p2p/{ALICE}" for ip in ("192.168.1.5", "8.8.4.4"))
    alone = msgspec.structs.replace(
        STATUS, members=STATUS.members[:1], mapped_addresses=[outer], reachability="unknown"
    )
    assert choose_bootstrap_addresses(msgspec.structs.replace(alone, addresses=[own])) == [outer, own]
    assert choose_bootstrap_addresses(msgspec.structs.replace(alone, addresses=[own, outer])) == [outer, own]
    tried = msgspec.structs.replace(alone, addresses=[own], reachability="relay only")
    assert choose_bootstrap_addresses(tried) == [own], "peers have tried, and did not get through"


def test_an_announced_address_that_peers_do_not_confirm_comes_last_and_is_warned_about() -> None:
    """The provider has given this home another address, and peers see it."""
    old, new, home = (f"/ip4/{ip}/tcp/4001" for ip in ("8.8.4.4", "8.8.8.8", "192.168.1.5"))
    seen = Verdict(ReachabilityKind.PUBLIC, (("8.8.8.8", 4001),))
    assert has_moved(old, seen)
    assert not any(has_moved(address, seen) for address in (new, "/ip6/2a05:1::a/tcp/4001", "/dns/a.example.org/tcp/1"))
    assert not has_moved(old, Verdict(ReachabilityKind.PUNCHABLE, (("192.168.1.9", 4001),))), "a neighbour cannot tell"
    status = msgspec.structs.replace(
        STATUS,
        addresses=[f"{address}/p2p/{ALICE}" for address in (old, home, new)],
        members=STATUS.members[:1],
        doubted_addresses=[old],
    )
    addresses = choose_bootstrap_addresses(status)
    assert [address.partition("/p2p/")[0] for address in addresses] == [new, home, old]
    (warning,) = warnings_about(addresses, [old])
    assert old in warning
    assert warnings_about(addresses) == []


def test_nobodys_loopback_is_passed_on_where_there_is_anything_else() -> None:
    assert chosen(["/ip4/127.0.0.1/tcp/1"], member(1, "/ip4/8.8.8.1/tcp/4001")) == ["/ip4/8.8.8.1/tcp/4001"]
    assert chosen(["/ip4/127.0.0.1/tcp/1"]) == ["/ip4/127.0.0.1/tcp/1"]


def test_what_a_member_says_cannot_spoil_an_invite() -> None:
    nonsense = ["", "no address", "/" + "x" * 300, "/ip4/8.8.8.1/tcp/1 /p2p/", "/ip4/8.8.8.1\n/tcp/1", "/ümlaut"]
    members = [member(i, text) for i, text in enumerate(nonsense, 1)]
    assert chosen(["/ip4/8.8.8.8/tcp/4001"], *members)[0] == "/ip4/8.8.8.8/tcp/4001"


def test_one_address_over_ipv6_stays_in_and_relays_come_before_the_others() -> None:
    """Routers block what comes over IPv6 more often than not, and some newcomers have nothing else."""
    own, others = "/ip6/2a05:1::a/tcp/4001", [f"/ip6/2a05:2::{i}/tcp/4001" for i in range(20)]
    members = [member(i + 1, others[i], f"/ip4/8.8.8.{i}/tcp/4001") for i in range(20)]
    assert chosen([own, "/ip4/192.168.1.5/tcp/4001"], *members)[-1] == own
    found = chosen(["/ip4/192.168.1.5/tcp/4001"], *members)
    assert others[0] in found
    assert "/ip4/192.168.1.5/tcp/4001" in found
    assert chosen([own, THROUGH_RELAY], member(1, others[0], THROUGH_RELAY))[:2] == [THROUGH_RELAY] * 2


def test_an_invite_that_works_over_ipv6_alone_is_warned_about() -> None:
    (warning,) = warnings_about([f"/ip6/2a05:1::a/tcp/4001/p2p/{ALICE}", f"/ip4/192.168.1.5/tcp/1/p2p/{ALICE}"])
    assert "IPv6 alone" in warning
    assert "farandole relay" in warning
    assert warnings_about([f"/ip6/2a05:1::a/tcp/4001/p2p/{ALICE}", f"/ip4/8.8.8.8/tcp/1/p2p/{ALICE}"]) == []


def test_an_invite_that_works_nowhere_else_is_warned_about_with_what_to_do() -> None:
    private, loopback = "/ip4/192.168.1.5/tcp/4001", "/ip4/127.0.0.1/tcp/1"
    (warning,) = warnings_about([f"{private}/p2p/{ALICE}", f"{loopback}/p2p/{ALICE}"])
    assert "(192.168.1.5, 127.0.0.1)" in warning
    assert "--announce /ip4/PUBLIC-IP/tcp/PORT" in warning
    assert "farandole relay" in warning
    for far in ("/ip4/8.8.8.8/tcp/4001", "/dns/node.example.org/tcp/4001", THROUGH_RELAY):
        assert warnings_about([f"{private}/p2p/{ALICE}", f"{far}/p2p/{ALICE}"]) == []
    assert warnings_about([])

from __future__ import annotations

import msgspec
import pytest

from farandole.node.base.settings import ANNOUNCED_FORM, MAX_ANNOUNCED, check_announced
from farandole.protocol.state.entries import MAX_MEMBER_ADDRESS_CHARS, Member
from farandole.protocol.wire.errors import FarandoleError

decode_member = msgspec.msgpack.Decoder(Member).decode


def test_public_addresses_and_names_are_announced_each_once() -> None:
    addresses = ["/ip4/8.8.8.8/tcp/4001", "/ip6/2606:4700::1111/tcp/1", "/dns/a-1.example.org/tcp/65535"]
    assert check_announced([*addresses, addresses[0]]) == addresses
    assert check_announced(["/dns4/localhost/tcp/4001", "/dns6/x/tcp/4001"])
    assert check_announced([]) == []


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/192.168.1.10/tcp/4001",
        "/ip6/fe80::1/tcp/4001",
        "/ip6/8.8.8.8/tcp/4001",
        "/ip4/2606:4700::1111/tcp/4001",
        "/ip4/8.8.8.8/tcp/0",
        "/ip4/8.8.8.8/tcp/65536",
        "/ip4/8.8.8.8/tcp/\u0664",
        "/ip4/8.8.8.8/udp/4001/quic-v1",
        "/ip4/8.8.8.8/tcp/4001/p2p/12D3KooWPexrH79BHenTqWcGfyd8U9ZzX9LYthJM72n2PH1jRzfK",
        "/dns/-bad/tcp/4001",
        "/dns/a..b/tcp/4001",
        f"/dns/{'a.' * 130}a/tcp/4001",
        f"/dns/{'a.' * 90}a/tcp/4001",
        "/dns/8.8.8.8/tcp/4001",
        "/dns/0x7f000001/tcp/4001",
        "8.8.8.8:4001",
        "",
    ],
)
def test_other_addresses_are_refused_with_the_form_that_they_need(address: str) -> None:
    with pytest.raises(FarandoleError, match="/ip4/PUBLIC-IP/tcp/PORT"):
        check_announced(["/ip4/8.8.8.8/tcp/4001", address])


def test_every_address_that_can_be_announced_fits_into_a_member_entry() -> None:
    labels = ".".join(["a" * 59] * 3)
    longest = f"/dns4/{labels[: MAX_MEMBER_ADDRESS_CHARS - len('/dns4//tcp/65535')]}/tcp/65535"
    assert len(longest) == MAX_MEMBER_ADDRESS_CHARS
    assert f"at most {MAX_MEMBER_ADDRESS_CHARS} characters" in ANNOUNCED_FORM
    assert check_announced([longest]) == [longest]
    assert decode_member(msgspec.msgpack.encode(Member(addresses=(longest,)))).addresses == (longest,)


def test_no_more_are_announced_than_an_invite_holds() -> None:
    addresses = [f"/ip4/8.8.8.{i}/tcp/4001" for i in range(MAX_ANNOUNCED + 1)]
    assert check_announced(addresses[1:]) == addresses[1:]
    with pytest.raises(FarandoleError):
        check_announced(addresses)

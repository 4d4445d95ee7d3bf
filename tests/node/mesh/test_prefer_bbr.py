from __future__ import annotations

import socket
from pathlib import Path

import pytest

from farandole.node.bulk.channel import prefer_bbr

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@pytest.mark.skipif(
    not ALLOWED.exists() or not {"bbr", "reno"} <= set(ALLOWED.read_text().split()),
    reason="this system allows no BBR",
)
def test_a_channel_goes_by_the_rate_where_the_system_allows_it() -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        prefer_bbr(connection)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr"


def test_where_it_cannot_be_had_the_channel_is_as_it_was() -> None:
    one, other = socket.socketpair()  # not TCP
    with one, other:
        prefer_bbr(one)
        one.sendall(b"still here")
        assert other.recv(100) == b"still here"

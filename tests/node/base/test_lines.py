"""The URLs of further lines."""

from __future__ import annotations

import pytest

from farandole.node.base.lines import MAX_LINES, LineError, check_lines
from farandole.node.bulk.lines import Line
from farandole.protocol.exchange.strands import MAX_STRANDS


@pytest.mark.parametrize(
    "url", ["socks5://127.0.0.1:1080", "socks5://node-2.example.org:65535", "socks5://[::1]:1080", "socks5://office:1"]
)
def test_what_is_a_line_can_be_used(url: str) -> None:
    assert check_lines([url, url]) == [url]
    Line(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:1080",
        "http://127.0.0.1:1080",
        "socks5://127.0.0.1",
        "socks5://127.0.0.1:0",
        "socks5://127.0.0.1:65536",
        "socks5://me:secret@127.0.0.1:1080",
        "socks5://[::::]:1080",
        "socks5://a?b:1080",
        "socks5://a b:1080",
        "socks5://\u00e9:1080",
    ],
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(LineError, match="socks5://HOST:PORT"):
        check_lines([url])


def test_a_node_has_at_most_as_many_lines_as_a_channel_takes() -> None:
    assert MAX_LINES == MAX_STRANDS - 1
    urls = [f"socks5://127.0.0.1:{port}" for port in range(1, MAX_LINES + 2)]
    assert check_lines(urls[:-1]) == urls[:-1]
    with pytest.raises(LineError):
        check_lines(urls)

"""The URLs of a node's further lines, as its settings have them (`farandole.node.bulk.lines` uses them)."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from farandole.protocol.wire.errors import FarandoleError

# One less than the strands of a channel (`farandole.protocol.exchange.strands`, which takes time to import).
MAX_LINES: Final = 7
LINE_FORM: Final = f"at most {MAX_LINES} proxies, each as socks5://HOST:PORT, without a password"
_URL: Final = re.compile(r"socks5://([A-Za-z0-9.-]{1,253}|\[([0-9A-Fa-f:.]{2,45})\]):([0-9]{1,5})")
_PORTS: Final = range(1, 65_536)


class LineError(FarandoleError):
    """A URL is of no line."""


def check_lines(urls: Sequence[str]) -> list[str]:
    """Return the URLs, each once. Raises `LineError` unless all have `LINE_FORM`."""
    distinct = list(dict.fromkeys(urls))
    if len(distinct) > MAX_LINES or not all(map(_is_line, distinct)):
        raise LineError(f"expected {LINE_FORM}")
    return distinct


def _is_line(url: str) -> bool:
    match = _URL.fullmatch(url)
    if match is None or int(match[3]) not in _PORTS:
        return False
    if match[2] is None:
        return True
    with contextlib.suppress(ValueError):
        ipaddress.IPv6Address(match[2])
        return True
    return False

"""The URLs of a node's further lines, as its settings have them (`farandole.node.bulk.lines` uses them)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from farandole.protocol.errors import FarandoleError

# One less than the strands of a channel (`farandole.protocol.strands`, which takes time to import).
MAX_LINES: Final = 7
LINE_FORM: Final = f"at most {MAX_LINES} proxies, each as socks5://HOST:PORT or socks5://USER:PASSWORD@HOST:PORT"
_URL: Final = re.compile(r"socks5://([^@/:\s]+:[^@/\s]+@)?([^@/:\s]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})/?")
_PORTS: Final = range(1, 65_536)


class LineError(FarandoleError):
    """A URL is of no line."""


def check_lines(urls: Sequence[str]) -> list[str]:
    """Return the URLs, each once. Raises `LineError` unless all have `LINE_FORM`."""
    distinct = list(dict.fromkeys(urls))
    matches = [_URL.fullmatch(url) for url in distinct]
    if len(distinct) > MAX_LINES or not all(match is not None and int(match[3]) in _PORTS for match in matches):
        raise LineError(f"expected {LINE_FORM}")
    return distinct

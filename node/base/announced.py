"""The addresses that a node's owner announces: where others reach it through a port that was opened by hand.

A node sees the addresses of its own interfaces only. Behind a router with a forwarded port, 1:1 NAT (most cloud
machines) or Docker's bridge network these are private. Peers report the public ones, but a run's first node has no peer
yet when it makes its first invite.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from farandole.protocol.errors import FarandoleError

# Half of an invite's addresses, the most that it holds of the node that makes it.
MAX_ANNOUNCED: Final = 4
ANNOUNCED_FORM: Final = (
    f"at most {MAX_ANNOUNCED} public addresses, each as /ip4/PUBLIC-IP/tcp/PORT, /ip6/PUBLIC-IP/tcp/PORT or "
    "/dns/NAME/tcp/PORT, without /p2p"
)
_PORTS: Final = range(1, 65_536)
_MAX_NAME_CHARS: Final = 253  # RFC 1035, section 2.3.4, as text
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_ADDRESS: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]{1,5})")


class AnnouncedError(FarandoleError):
    """An address cannot be announced."""


def check_announced(addresses: Sequence[str]) -> list[str]:
    """Return the addresses, each once. Raises `AnnouncedError` unless all have `ANNOUNCED_FORM`."""
    distinct = list(dict.fromkeys(addresses))
    if len(distinct) > MAX_ANNOUNCED or not all(map(_is_public, distinct)):
        raise AnnouncedError(f"expected {ANNOUNCED_FORM}")
    return distinct


def _is_public(address: str) -> bool:
    from farandole.protocol.reachability import is_global  # it imports cryptography, which ``--help`` does not need

    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[3]) not in _PORTS:
        return False
    kind, host = match[1], match[2]
    if kind.startswith("dns"):
        return len(host) <= _MAX_NAME_CHARS and _NAME.fullmatch(host) is not None
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.version == int(kind[-1]) and is_global(host)

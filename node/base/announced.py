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

from farandole.protocol.wire.errors import FarandoleError

# Half of an invite's addresses, the most that it holds of the node that makes it.
MAX_ANNOUNCED: Final = 4
ANNOUNCED_FORM: Final = (
    f"at most {MAX_ANNOUNCED} public addresses, each as /ip4/PUBLIC-IP/tcp/PORT, /ip6/PUBLIC-IP/tcp/PORT or "
    "/dns/NAME/tcp/PORT, without /p2p, and at most 192 characters long"
)
_PORTS: Final = range(1, 65_536)
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
# What resolvers take for an IPv4 address, in any of its notations (WHATWG URL, "ends in a number").
_NUMERIC: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9A-Fa-f]*)")
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
    # They import cryptography, which ``--help`` does not need.
    from farandole.protocol.mesh.reachability import is_global
    from farandole.protocol.state.entries import MAX_MEMBER_ADDRESS_CHARS

    match = _ADDRESS.fullmatch(address)
    if match is None or len(address) > MAX_MEMBER_ADDRESS_CHARS or int(match[3]) not in _PORTS:
        return False
    kind, host = match[1], match[2]
    if kind.startswith("dns"):
        return _NAME.fullmatch(host) is not None and _NUMERIC.fullmatch(host) is None
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.version == int(kind[-1]) and is_global(host)

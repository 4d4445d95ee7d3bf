"""The addresses of peers that a host has heard of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from multiaddr import Multiaddr

# A machine has a few interfaces, in two families, and a relay or two.
MAX_ADDRESSES: Final = 16
# A relayed address of IPv6 has a hundred bytes, one with a name at most 255 more.
MAX_ADDRESS_BYTES: Final = 384
MAX_ADDRESS_CHARS: Final = 512
# More than a run has members; with 16 addresses each of a hundred bytes, 10 MB.
MAX_KNOWN_PEERS: Final = 4_096


def is_multiaddr(address: str) -> bool:
    """Return whether the text is a multiaddr."""
    try:
        return len(Multiaddr(address).to_bytes()) > 0
    except Exception:  # the library parses hostile text with whatever exception comes
        return False


class KnownAddresses:
    """The latest addresses of the peers heard of last."""

    def __init__(self) -> None:
        self._peers: OrderedDict[bytes, dict[str, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: bytes, addresses: Iterable[str]) -> list[str]:
        """Remember the valid addresses, and return them; new ones replace the oldest."""
        known = self._peers.setdefault(peer, {})
        self._peers.move_to_end(peer)
        good = [address for address in addresses if len(address) <= MAX_ADDRESS_CHARS and is_multiaddr(address)]
        for address in good:
            known.pop(address, None)
            known[address] = None
        while len(known) > MAX_ADDRESSES:
            del known[next(iter(known))]
        while len(self._peers) > MAX_KNOWN_PEERS:
            self._peers.popitem(last=False)
        return good

    def of(self, peer: bytes) -> list[str]:
        """Return the addresses known for a peer, the latest first."""
        return list(reversed(self._peers.get(peer, {})))

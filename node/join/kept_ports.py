"""The listening ports that a node got at its first start, tried first at each later start.

An invite, a router's port forwarding and the address books of other members all name a port. They remain valid after a
restart only if the node listens on the same port again. Only ``--port 0``, the default, leaves the choice open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ..state.store import Store, StoreError

_FACT: Final = "first port of "
_ANY_PORT: Final = "/tcp/0"
_MAX_PORT: Final = 65_535
_MAX_DIGITS: Final = 5


async def load_ports(store: Store, listen: Iterable[str]) -> dict[str, int]:
    """Return the kept port of each multiaddr that has port 0 and was listened on before."""
    ports: dict[str, int] = {}
    for address in listen:
        raw = (await store.get_fact(_FACT + address) or b"") if address.endswith(_ANY_PORT) else b""
        if raw.isdigit() and len(raw) <= _MAX_DIGITS and 0 < int(raw) <= _MAX_PORT:
            ports[address] = int(raw)
    return ports


async def keep_ports(
    store: Store, kept: Mapping[str, int], bound: Mapping[str, int], warn: Callable[[str], None]
) -> None:
    """Store the ports of multiaddrs with port 0 that have none yet; warn about each kept port that was taken.

    ``kept``: from `load_ports`; ``bound``: multiaddr -> the port that the node listens on now. A port that was taken
    stays the kept one: older invites name it, and the program that has it now may be gone at the next start.
    """
    taken: dict[int, int] = {}
    for address, port in bound.items():
        if not address.endswith(_ANY_PORT):
            continue
        if address not in kept:
            try:
                await store.put_fact(_FACT + address, str(port).encode("ascii"))
            except StoreError as error:
                warn(f"{error}; the next start may use another port than {port}")
        elif kept[address] != port:
            taken[kept[address]] = port
    for former, port in taken.items():
        warn(
            f"port {former}, on which this node listened before, is taken: it listens on {port} now. Invites made "
            "before may not find this node: make new ones, or stop the program that has the port. `--port PORT` sets a "
            "port for good"
        )

"""The places of a scenario's nodes: on the loopback interface, or in homes of the NAT lab."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from ..natlab.groups import Leash
from ..natlab.home import Home
from ..natlab.kinds import ANY_PORT, HTTPS_PORT, Filtering, kind_named
from ..natlab.lab import open_lab
from ..natlab.namespace import Location
from .scenario import HomeSettings

# An address in a home may change, and so its nodes listen on all addresses.
_ANY_IP: Final = "0.0.0.0"
# A node keeps reservations with so many relays.
NUM_RELAYS: Final = 2

Lodging = tuple[Location, Home | None]
"""One node's place, and its home, if it is in one."""


@contextlib.contextmanager
def open_lodgings(homes: Sequence[HomeSettings], count: int, leash: Leash) -> Iterator[list[Lodging]]:
    """Open ``count`` lodgings, in these homes and then others like them. Raises `NamespaceError`."""
    if not homes:
        yield [(Location(), None)] * count
        return
    with open_lab(leash) as lab:
        lodgings: list[Lodging] = []
        # Nodes that can dial nothing but HTTPS must be able to dial two public nodes, which relay. Other nodes dial
        # such a port only if an invite has it, and not on another peer's word.
        are_confined = [not kind_named(settings.kind).lets_out(ANY_PORT) for settings in homes]
        public_port = HTTPS_PORT if any(are_confined) else None
        for settings in itertools.cycle(homes):
            if len(lodgings) >= count:
                break
            home = lab.add_home(settings.kind, settings.nodes)
            home.set_rate(settings.up_mbit, settings.down_mbit)
            home.set_delay(settings.delay_ms)
            home.set_loss(settings.loss)
            is_relay = home.kind.filtering is Filtering.NONE and len(lodgings) < NUM_RELAYS
            port = public_port if is_relay else None
            lodgings += [(Location(_ANY_IP, port, host.namespace), home) for host in home.hosts]
        yield lodgings[:count]

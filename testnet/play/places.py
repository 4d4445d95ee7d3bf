"""The places of a scenario's nodes: on the loopback interface, behind slow links, or in homes of the NAT lab."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..natlab.groups import Leash
from ..natlab.home import Home
from ..natlab.kinds import ANY_PORT, HTTPS_PORT, Filtering, kind_named
from ..natlab.lab import open_lab
from ..natlab.namespace import Location, held, open_namespace, open_tun, require
from .scenario import LinkSettings, Scenario

# An address in a home may change, and so its nodes listen on all addresses.
_ANY_IP: Final = "0.0.0.0"
# A node keeps reservations with so many relays.
NUM_RELAYS: Final = 2


@dataclass(frozen=True)
class Lodging:
    """One node's place, and its home, if it is in one."""

    place: Location
    home: Home | None = None


@contextlib.contextmanager
def open_lodgings(played: Scenario, leash: Leash) -> Iterator[list[Lodging]]:
    """Open one lodging for each node. Raises `NamespaceError`."""
    if played.link is not None:
        with open_links(played.link, played.nodes, leash) as places:
            yield [Lodging(place) for place in places]
    elif played.home:
        with open_lab(leash) as lab:
            lodgings: list[Lodging] = []
            # Nodes that can dial nothing but HTTPS must be able to dial two public nodes, which relay. Other nodes dial
            # such a port only if an invite has it, and not on another peer's word.
            are_confined = [not kind_named(settings.kind).lets_out(ANY_PORT) for settings in played.home]
            public_port = HTTPS_PORT if any(are_confined) else None
            for settings in itertools.cycle(played.home):
                if len(lodgings) >= played.nodes:
                    break
                home = lab.add_home(settings.kind, settings.nodes)
                home.set_rate(settings.up_mbit, settings.down_mbit)
                home.set_delay(settings.delay_ms)
                home.set_loss(settings.loss)
                is_relay = home.kind.filtering is Filtering.NONE and len(lodgings) < NUM_RELAYS
                port = public_port if is_relay else None
                lodgings += [Lodging(Location(_ANY_IP, port, host.namespace), home) for host in home.hosts]
            yield lodgings[: played.nodes]
    else:
        yield [Lodging(Location())] * played.nodes


# Homes with slow links: each node in a network namespace of its own, behind a link with a rate and a delay.

_NETWORK: Final = "10.77.0"
LINK_DEVICE: Final = "link"


@contextlib.contextmanager
def open_links(link: LinkSettings, count: int, leash: Leash) -> Iterator[list[Location]]:
    """Open ``count`` places with such links. Raises `NamespaceError`."""
    require()
    with contextlib.ExitStack() as stack:
        places, ports = [], []
        for index in range(count):
            ip = f"{_NETWORK}.{index + 1}"
            namespace = stack.enter_context(open_namespace(leash))
            ports.append((ip, stack.enter_context(open_tun(namespace, LINK_DEVICE))))
            namespace.run(f"ip address add {ip}/24 dev {LINK_DEVICE}")
            namespace.shape(LINK_DEVICE, link.up_mbit)
            places.append(Location(ip, namespace=namespace))
        down, delay = link.down_mbit * 1e6 / 8, link.delay_ms / 1e3
        forwarder = [sys.executable, "-m", "farandole.testnet.natlab.link_forwarder", str(down), str(delay)]
        forwarder += [f"{ip}={descriptor}" for ip, descriptor in ports]
        stack.enter_context(held(forwarder, leash, pass_fds=[descriptor for _, descriptor in ports]))
        yield places

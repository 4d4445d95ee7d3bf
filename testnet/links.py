"""Homes with slow links: each node in a network namespace of its own, behind a link with a rate and a delay."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Final

from .leash import Leash
from .namespace import Location, held, open_namespace, open_tun, require
from .scenario import LinkSettings

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
            places.append(Location(ip, enter=namespace.enter))
        down, delay = link.down_mbit * 1e6 / 8, link.delay_ms / 1e3
        forwarder = [sys.executable, "-m", "farandole.testnet.link_forwarder", str(down), str(delay)]
        forwarder += [f"{ip}={descriptor}" for ip, descriptor in ports]
        stack.enter_context(held(forwarder, leash, pass_fds=[descriptor for _, descriptor in ports]))
        yield places

"""A running home of the NAT lab: its line, cables, router and address, and the faults that can be applied to them.

Its line is attached to its outermost router. Rates are limited by the kernel (tbf) on either side of the link, loss is
made by nftables. As the kernels that we use lack netem, a process (`link_forwarder`) makes the delay: the internet
sends the home's packets, both ways, through a TUN device that returns them later.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Final

from .groups import Leash
from .kinds import HomeKind
from .namespace import Location, Namespace, held
from .router import HomeRouter
from .rules import WAN, line_rules

# Each home and each of its addresses is in another network, as real homes are. A scenario has at most 128 homes.
_PUBLIC: Final = "5.{home}.{lease}.1"
_MAX_LEASES: Final = 250
INTERNET_IP: Final = "5.255.255.254"
# Between a carrier and its customers (RFC 6598).
CARRIER_IP, CUSTOMER_IP = "100.64.0.1", "100.64.0.2"
# Buffer of a home router for a full uplink.
_BUFFER: Final = "200ms"
_BURST: Final = "16kb"
# Routing tables of a home with a delay: for packets that it sends, and for packets that have been delayed.
_UP_TABLE, _DOWN_TABLE = 1_000, 2_000


@dataclass
class Home:
    """Hosts behind a router, or two; made by `Lab.add_home`."""

    kind: HomeKind
    index: int
    hosts: list[Location]
    internet: Namespace
    routers: list[HomeRouter]
    """The home's routers, the outermost first."""
    leash: Leash
    delay_ms: float = 0.0
    """The line's delay of each packet, one way."""
    loss: float = 0.0
    """Probability that a packet is lost, in each direction."""
    _lease: int = 1
    _late: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def address(self) -> str:
        """Return the home's public address."""
        return _PUBLIC.format(home=self.index, lease=self._lease)

    @property
    def host(self) -> Location:
        """Return the first host."""
        return self.hosts[0]

    # The line

    def set_rate(self, up_mbit: float | None, down_mbit: float | None) -> None:
        """Set the line's rates in Mbit/s, out and in."""
        _set_rate(self.routers[0].namespace, WAN, up_mbit)
        _set_rate(self.internet, self._link, down_mbit)

    def set_delay(self, delay_ms: float) -> None:
        """Set the delay of each packet, one way. Packets on the way are lost."""
        self.delay_ms = delay_ms
        self._late.close()
        if delay_ms:
            self.internet.run(f"""
                ip tuntap add dev {self._late_link} mode tun 2>&- || true
                ip link set dev {self._late_link} up
            """)
            program = ["-m", "farandole.testnet.natlab.link_forwarder", self._late_link, str(delay_ms / 1e3)]
            command = [*self.internet.enter, sys.executable, *program]
            forwarder = self._late.enter_context(held(command, self.leash, stdout=subprocess.PIPE))
            assert forwarder.stdout is not None
            forwarder.stdout.readline()  # once it has the device
        self._route()

    def set_loss(self, loss: float) -> None:
        """Lose each packet with this probability, in and out."""
        self.loss = loss
        self.cut(undo=True)

    def cut(self, *, undo: bool = False) -> None:
        """Drop all packets between the home and the internet, without any notice to either side."""
        self.routers[0].namespace.run("nft -f -", line_rules(self.loss if undo else 1.0))

    # Hosts and routers

    def unplug(self, *, undo: bool = False) -> None:
        """Pull the cable of the first host, which notices it."""
        self.routers[-1].namespace.run(f"ip link set dev port0 {'up' if undo else 'down'}")

    def switch_off(self, *, undo: bool = False) -> None:
        """Switch off the home's router: it forgets all mappings and connections."""
        if undo:
            self.switch_on(self.routers[-1])
        else:
            self.routers[-1].switch_off()

    def change_address(self) -> None:
        """Get another public address, by a restart of the router that has it (with a carrier, that's the carrier's)."""
        if self._lease == _MAX_LEASES:
            raise ValueError(f"a home has at most {_MAX_LEASES} addresses, one after the other")
        self.routers[0].switch_off()
        self.internet.run(f"ip route del {self.address}")
        self._lease += 1
        self._route()
        self.switch_on(self.routers[0])

    def switch_on(self, router: HomeRouter) -> None:
        """Switch on one of the home's routers."""
        if router is self.routers[0]:
            router.switch_on(self.address, INTERNET_IP)
        else:
            router.switch_on(CUSTOMER_IP, CARRIER_IP)
        if not self.routers[-1].is_translating:
            outer = self.address if len(self.routers) == 1 else CUSTOMER_IP
            self.hosts[0] = Location(outer, namespace=self.hosts[0].namespace)

    @property
    def _link(self) -> str:
        return f"to{self.index}"

    @property
    def _late_link(self) -> str:
        return f"late{self.index}"

    def _route(self) -> None:
        """Set the routes to the home, and from it, through the detour that delays."""
        up, down = _UP_TABLE + self.index, _DOWN_TABLE + self.index
        self.internet.run(f"ip rule del lookup {up} 2>&- || true; ip rule del lookup {down} 2>&- || true")
        if not self.delay_ms:
            self.internet.run(f"ip route replace {self.address} dev {self._link}")
            return
        self.internet.run(f"""
            ip route replace {self.address} dev {self._late_link}
            ip route replace default dev {self._late_link} table {up}
            ip route replace {self.address} dev {self._link} table {down}
            ip rule add iif {self._link} lookup {up}
            ip rule add iif {self._late_link} lookup {down}
        """)

    def close(self) -> None:
        """End the processes that run for the home."""
        self._late.close()
        for router in self.routers:
            router.close()


def _set_rate(namespace: Namespace, device: str, mbit: float | None) -> None:
    if mbit is None:
        namespace.run(f"tc qdisc del dev {device} root 2>&- || true")
    else:
        namespace.run(f"tc qdisc replace dev {device} root tbf rate {mbit:g}mbit burst {_BURST} latency {_BUFFER}")

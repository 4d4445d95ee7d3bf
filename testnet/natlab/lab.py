"""An internet of namespaces: public hosts, and homes behind routers.

    host eth0 -- port0 (bridge "lan") home's router "wan" -- "lan" carrier's router "wan" -- "to1" internet
                                                            (where there is one)

The internet has a route to the address of each home, and no other: packets to other addresses are dropped (blackhole),
so nothing leaves the machine. The homes' public addresses count as global, for Python and for libp2p; homes use the
same private ones, as real homes do. No router leads from the inside to its own outer address (hairpinning). A home may
have IPv6 too, or alone: then each of its hosts has a public address, without NAT.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from .groups import Leash
from .home import CARRIER_IP, CUSTOMER_IP, INTERNET_IP, Home
from .kinds import Mapping, kind_named
from .namespace import Location, Namespace, open_namespace, require
from .router import ROUTER_LINK_IP, WAN_LINK_IP, HomeRouter
from .rules import LAN, WAN

_ROUTER_IP: Final = "192.168.1.1"
_HOST_IP: Final = "192.168.1.{host}"
_FIRST_HOST: Final = 10
# Each home's IPv6 network, and its hosts in it.
_PREFIX: Final = "2a05:0:{home:x}::/64"
_HOST_IPV6: Final = "2a05:0:{home:x}::{host:x}"


@dataclass
class Lab:
    """The simulated internet and its homes; made by `open_lab`."""

    internet: Namespace
    leash: Leash
    homes: list[Home] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def add_home(self, kind: str, hosts: int = 1, families: str = "4") -> Home:
        """Add a home of one of `KINDS`, with hosts on one LAN; a public host is one in an open home.

        ``families``: the versions of IP that its hosts have, "4", "46" or "6". A line's delay is for IPv4 alone.

        Raises `KindError`, `NamespaceError` if its router needs a tool that is missing, `ValueError` if it
        cannot have so many hosts or these families.
        """
        home_kind, index = kind_named(kind), len(self.homes) + 1
        if any(nat.has_upnp for nat in home_kind.nats):
            require("miniupnpd")
        if hosts > 1 and home_kind.nats[0].mapping is Mapping.NONE:
            raise ValueError(f"a home of kind {kind!r} has one address, and so one host")
        if families != "4" and len(home_kind.nats) > 1:
            raise ValueError(f"a home of kind {kind!r} has no IPv6, with two routers in a row")
        machines = [self._stack.enter_context(open_namespace(self.leash)) for _ in range(hosts)]
        boxes = [self._stack.enter_context(open_namespace(self.leash)) for _ in home_kind.nats]
        first_host = _HOST_IP.format(host=_FIRST_HOST)
        routers = [HomeRouter(boxes[0], home_kind.nats[0], _ROUTER_IP, machines[0], first_host, self.leash)]
        for box, nat in zip(boxes[1:], home_kind.nats[1:], strict=True):
            routers.insert(
                0, HomeRouter(box, nat, CARRIER_IP, boxes[0], CUSTOMER_IP, self.leash, customer_ip=CUSTOMER_IP)
            )
        if "6" in families:
            routers[0].prefix = _PREFIX.format(home=index)
        home = Home(home_kind, index, [], self.internet, routers, self.leash)
        self._stack.callback(home.close)
        self._wire(home, machines)
        if "6" in families:
            self._wire_ipv6(home, machines, is_alone="4" not in families)
        self.homes.append(home)
        return home

    def _wire(self, home: Home, machines: list[Namespace]) -> None:
        outermost, innermost = home.routers[0], home.routers[-1]
        self.internet.run(f"""
            ip link add to{home.index} type veth peer name {WAN} netns {outermost.namespace.holder}
            ip address add {INTERNET_IP}/32 dev to{home.index}
            ip link set dev to{home.index} up
            ip route replace {home.address} dev to{home.index}
        """)
        if innermost is not outermost:
            outermost.namespace.run(f"""
                ip link add {LAN} type veth peer name {WAN} netns {innermost.namespace.holder}
                ip address add {CARRIER_IP}/32 dev {LAN}
            """)
        innermost.namespace.run(f"""
            ip link add {LAN} type bridge mcast_snooping 0
            ip address add {_ROUTER_IP}/24 dev {LAN}
        """)
        for number, machine in enumerate(machines):
            innermost.namespace.run(f"""
                ip link add port{number} type veth peer name eth0 netns {machine.holder}
                ip link set dev port{number} master {LAN} up
            """)
            machine.run("ip link set dev eth0 up")
            ip = _HOST_IP.format(host=_FIRST_HOST + number)
            if innermost.is_translating:
                machine.run(f"ip address add {ip}/24 dev eth0; ip route add default via {_ROUTER_IP}")
            home.hosts.append(Location(ip, namespace=machine))
        for router in home.routers:
            home.switch_on(router)

    def _wire_ipv6(self, home: Home, machines: list[Namespace], *, is_alone: bool) -> None:
        """Give a wired home IPv6; with ``is_alone``, take IPv4 from its hosts."""
        link, prefix = f"to{home.index}", home.routers[0].prefix
        self.internet.run(f"""
            echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
            ip address replace {ROUTER_LINK_IP}/64 dev {link} nodad
            ip route replace {prefix} via {WAN_LINK_IP} dev {link}
        """)
        for number, machine in enumerate(machines):
            ip = _HOST_IPV6.format(home=home.index, host=_FIRST_HOST + number)
            machine.run(f"""
                {"ip -4 address flush dev eth0" if is_alone else ""}
                ip address add {ip}/64 dev eth0 nodad
                ip -6 route add default via {ROUTER_LINK_IP} dev eth0
            """)
            if is_alone:
                home.hosts[number] = Location(ip, namespace=machine)


@contextlib.contextmanager
def open_lab(leash: Leash) -> Iterator[Lab]:
    """Open an internet without hosts; raises `NamespaceError` if this system lacks what it needs."""
    require("nft")
    with contextlib.ExitStack() as stack:
        internet = stack.enter_context(open_namespace(leash))
        internet.run(
            "ip route add blackhole default; ip -6 route add blackhole default; echo 1 > /proc/sys/net/ipv4/ip_forward"
        )
        yield Lab(internet, leash, _stack=stack)

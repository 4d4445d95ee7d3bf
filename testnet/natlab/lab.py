"""An internet of namespaces: public hosts, and homes behind routers.

    host eth0 -- port0 (bridge "lan") home's router "wan" -- "lan" carrier's router "wan" -- "to1" internet
                                                            (where there is one)

The internet knows the way to the address of each home, and nothing else: what goes elsewhere disappears (blackhole), so
nothing leaves the machine. Its addresses count as global, for Python and for libp2p; homes use the same private ones,
as homes do. IPv4 only, and no router leads from the inside to its own outer address (hairpinning).

A home's line is that of its outermost router: rates are the kernel's (tbf), either side of the link; loss is nftables';
the delay, for which the kernels that we meet lack netem, a process (`farandole.testnet.link_forwarder`): the internet
sends the home's packets, both ways, through a TUN device that gives them back later.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from ..leash import Leash
from ..links import shape
from ..namespace import Namespace, Place, held, open_namespace, open_tun, require
from .kinds import Kind, Mapping, kind_named
from .router import Router
from .rules import LAN, WAN, line_rules

# A home's address is 5.<home>.<lease>.1: each in another network, as homes are. The bounds keep numbers within a byte.
_PUBLIC: Final = "5.{home}.{lease}.1"
_MAX_HOMES: Final = 250
_MAX_LEASES: Final = 250
_MAX_HOSTS: Final = 200
_INTERNET_IP: Final = "5.255.255.254"
# Between a carrier and its customers (RFC 6598).
_CARRIER_IP, _CUSTOMER_IP = "100.64.0.1", "100.64.0.2"
_ROUTER_IP: Final = "192.168.1.1"
_HOST_IP: Final = "192.168.1.{host}"
_FIRST_HOST: Final = 10
# Routing tables of a home with a delay: for what it sends, and for what has been delayed.
_UP_TABLE, _DOWN_TABLE = 1_000, 2_000


@dataclass
class Line:
    """What a home's link to the internet is like; None: as fast as the machine."""

    up_mbit: float | None = None
    down_mbit: float | None = None
    delay_ms: float = 0.0
    """One way."""
    loss: float = 0.0
    """A packet's chance to be lost, either way."""
    is_cut: bool = False


@dataclass
class Home:
    """Hosts behind a router, or two; made by `Lab.add_home`."""

    kind: Kind
    index: int
    hosts: list[Place]
    internet: Namespace
    routers: list[Router]
    """The outermost first."""
    leash: Leash
    line: Line = field(default_factory=Line)
    _lease: int = 1
    _late: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def address(self) -> str:
        """By which the internet knows it."""
        return _PUBLIC.format(home=self.index, lease=self._lease)

    @property
    def host(self) -> Place:
        """The first one."""
        return self.hosts[0]

    def start(self) -> None:
        """Switch on all its routers."""
        for router in self.routers:
            self._switch_on(router)

    # The line

    def set_rate(self, up_mbit: float | None, down_mbit: float | None) -> None:
        """Mbit/s, out and in."""
        self.line.up_mbit, self.line.down_mbit = up_mbit, down_mbit
        _set_rate(self.routers[0].namespace, WAN, up_mbit)
        _set_rate(self.internet, self._link, down_mbit)

    def set_delay(self, delay_ms: float) -> None:
        """Of each packet, one way. Those that are on their way are lost."""
        self.line.delay_ms = delay_ms
        self._late.close()
        if delay_ms:
            tun = self._late.enter_context(open_tun(self.internet, self._late_link))
            forwarder = [sys.executable, "-m", "farandole.testnet.link_forwarder", "inf", str(delay_ms / 1e3)]
            self._late.enter_context(held([*forwarder, f"*={tun}"], self.leash, pass_fds=[tun]))
        self._route()

    def set_loss(self, loss: float) -> None:
        """Lose each packet with this chance, in and out."""
        self.line.loss = loss
        self._set_fate()

    def cut(self) -> None:
        """The internet is gone, and nobody says so."""
        self.line.is_cut = True
        self._set_fate()

    def heal(self) -> None:
        """Undo `cut`."""
        self.line.is_cut = False
        self._set_fate()

    def _set_fate(self) -> None:
        self.routers[0].namespace.run("nft -f -", line_rules(self.line.loss, is_cut=self.line.is_cut))

    # Hosts and routers

    def unplug(self, host: int = 0) -> None:
        """Pull the cable of a host, which sees it."""
        self.routers[-1].namespace.run(f"ip link set dev port{host} down")

    def plug(self, host: int = 0) -> None:
        """Undo `unplug`."""
        self.routers[-1].namespace.run(f"ip link set dev port{host} up")

    def switch_off(self) -> None:
        """Take the power from the home's router: it forgets all mappings and connections."""
        self.routers[-1].switch_off()

    def switch_on(self) -> None:
        """Undo `switch_off`."""
        self._switch_on(self.routers[-1])

    def change_address(self) -> None:
        """Get another public address, by a restart of the router that has it (with a carrier, that's the carrier's)."""
        if self._lease == _MAX_LEASES:
            raise ValueError(f"a home has at most {_MAX_LEASES} addresses, one after the other")
        self.routers[0].switch_off()
        self.internet.run(f"ip route del {self.address}")
        self._lease += 1
        self._route()
        self._switch_on(self.routers[0])

    def _switch_on(self, router: Router) -> None:
        if router is self.routers[0]:
            router.switch_on(self.address, _INTERNET_IP)
        else:
            router.switch_on(_CUSTOMER_IP, _CARRIER_IP)
        if not self.routers[-1].is_translating:
            outer = self.address if len(self.routers) == 1 else _CUSTOMER_IP
            self.hosts[0] = Place(outer, enter=self.hosts[0].enter)

    @property
    def _link(self) -> str:
        return f"to{self.index}"

    @property
    def _late_link(self) -> str:
        return f"late{self.index}"

    def _route(self) -> None:
        """Tell the internet the way to the home, and from it, by the detour that delays."""
        up, down = _UP_TABLE + self.index, _DOWN_TABLE + self.index
        self.internet.run(f"ip rule del lookup {up} 2>&- || true; ip rule del lookup {down} 2>&- || true")
        if not self.line.delay_ms:
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
        """End what runs for it."""
        self._late.close()
        for router in self.routers:
            router.close()


@dataclass
class Lab:
    """Made by `open_lab`."""

    internet: Namespace
    leash: Leash
    homes: list[Home] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def add_home(self, kind: str, hosts: int = 1) -> Home:
        """A home of one of `KINDS`, with hosts on one LAN; a public host is one in an open home.

        Raises `KindError`, `NamespaceError` if its router needs a tool that is missing, `ValueError` for too many.
        """
        home_kind, index = kind_named(kind), len(self.homes) + 1
        if any(nat.has_upnp for nat in home_kind.nats):
            require("miniupnpd")
        if index > _MAX_HOMES or hosts not in range(1, _MAX_HOSTS + 1):
            raise ValueError(f"a lab has up to {_MAX_HOMES} homes, a home 1 to {_MAX_HOSTS} hosts")
        if hosts > 1 and home_kind.nats[0].mapping is Mapping.NONE:
            raise ValueError(f"a home of kind {kind!r} has one address, and so one host")
        machines = [self._stack.enter_context(open_namespace(self.leash)) for _ in range(hosts)]
        boxes = [self._stack.enter_context(open_namespace(self.leash)) for _ in home_kind.nats]
        routers = [Router(boxes[0], home_kind.nats[0], _ROUTER_IP, machines[0], self.leash)]
        for box, nat in zip(boxes[1:], home_kind.nats[1:], strict=True):
            routers.insert(0, Router(box, nat, _CARRIER_IP, boxes[0], self.leash, customer_ip=_CUSTOMER_IP))
        home = Home(home_kind, index, [], self.internet, routers, self.leash)
        self._stack.callback(home.close)
        self._wire(home, machines)
        self.homes.append(home)
        return home

    def _wire(self, home: Home, machines: list[Namespace]) -> None:
        outermost, innermost = home.routers[0], home.routers[-1]
        self.internet.run(f"""
            ip link add to{home.index} type veth peer name {WAN} netns {outermost.namespace.holder}
            ip address add {_INTERNET_IP}/32 dev to{home.index}
            ip link set dev to{home.index} up
            ip route replace {home.address} dev to{home.index}
        """)
        if innermost is not outermost:
            outermost.namespace.run(f"""
                ip link add {LAN} type veth peer name {WAN} netns {innermost.namespace.holder}
                ip address add {_CARRIER_IP}/32 dev {LAN}
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
            home.hosts.append(Place(ip, enter=machine.enter))
        home.start()


@contextlib.contextmanager
def open_lab(leash: Leash) -> Iterator[Lab]:
    """An internet with nobody on it; raises `NamespaceError` if this system has not what it takes."""
    require("nft")
    with contextlib.ExitStack() as stack:
        internet = stack.enter_context(open_namespace(leash))
        internet.run("ip route add blackhole default; echo 1 > /proc/sys/net/ipv4/ip_forward")
        yield Lab(internet, leash, _stack=stack)


def _set_rate(namespace: Namespace, device: str, mbit: float | None) -> None:
    if mbit is None:
        namespace.run(f"tc qdisc del dev {device} root 2>&- || true")
    else:
        shape(namespace, device, mbit)

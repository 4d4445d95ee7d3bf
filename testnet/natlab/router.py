"""A router in a namespace of its own, between what is upstream and its inner side.

Where it translates, its outer interface has an address; where it does not, the inner host has it, and the router
answers for it (proxy ARP, at once: the kernel would wait for up to 0.8 s). In both cases upstream sends this one
address to one link.
"""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass, field
from typing import Final

from .groups import Leash
from .kinds import Mapping, Nat
from .namespace import Namespace, held
from .rules import LAN, TABLE, UPNP_CHAINS, WAN, router_rules

# Link-local IPv6 addresses: of a router and of the internet towards those behind them, and of a router towards the
# internet.
ROUTER_LINK_IP, WAN_LINK_IP = "fe80::1", "fe80::2"
# It writes its process id to a file in /run, which is a private mount here and disappears with it.
_MINIUPNPD: Final = "mount -t tmpfs none /run && exec miniupnpd -d -f /dev/stdin"


@dataclass
class HomeRouter:
    """The router of a home; off until `switch_on`."""

    namespace: Namespace
    nat: Nat
    inner_ip: str
    """The router's address on the inner side."""
    inner_host: Namespace
    """The host that gets the outer address where the router does not translate."""
    first_host: str
    """The address to which the router forwards ports."""
    leash: Leash
    customer_ip: str | None = None
    """Address of the router behind this one, if this is a carrier's."""
    prefix: str = ""
    """The home's IPv6 network, if it has one."""
    _num_lives: int = 0
    _services: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def is_translating(self) -> bool:
        """Return whether the outer address is the router's own."""
        return self.nat.mapping is not Mapping.NONE

    def switch_on(self, address: str, gateway: str) -> None:
        """Switch on, with this outer address, and upstream's as gateway."""
        self._num_lives += 1
        inner_ip = self.customer_ip if self.is_translating else address
        if self.is_translating:
            self.namespace.run(f"ip address add {address}/32 dev {WAN}")
        else:
            self.inner_host.run(f"""
                ip address add {address}/32 dev eth0
                ip route replace {self.inner_ip} dev eth0
                ip route replace default via {self.inner_ip} src {address}
            """)
        self.namespace.run(
            f"""
            echo 1 > /proc/sys/net/ipv4/ip_forward
            echo 1 > /proc/sys/net/ipv4/conf/{WAN}/proxy_arp
            echo 0 > /proc/sys/net/ipv4/neigh/{WAN}/proxy_delay
            nft -f -
            ip link set dev {LAN} up
            ip link set dev {WAN} up
            ip route add {gateway} dev {WAN}
            ip route add default via {gateway}
            {f"ip route replace {inner_ip} dev {LAN}" if inner_ip else ""}
        """,
            router_rules(self.nat, self.first_host, self._num_lives),
        )
        if self.prefix:
            self.namespace.run(f"""
                echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
                ip address replace {WAN_LINK_IP}/64 dev {WAN} nodad
                ip address replace {ROUTER_LINK_IP}/64 dev {LAN} nodad
                ip route replace {self.prefix} dev {LAN}
                ip -6 route replace default via {ROUTER_LINK_IP} dev {WAN}
            """)
        if self.nat.has_upnp:
            self._serve_upnp()

    def switch_off(self) -> None:
        """Switch off: forget connections and mappings, and forward nothing."""
        self._services.close()
        self.namespace.run(f"""
            ip link set dev {WAN} down
            ip link set dev {LAN} down
            ip address flush dev {WAN}
            nft delete table inet {TABLE}
        """)
        if not self.is_translating:
            self.inner_host.run("ip address flush dev eth0")

    def close(self) -> None:
        """End the processes that run in the router."""
        self._services.close()

    def _serve_upnp(self) -> None:
        forward, prerouting, postrouting = UPNP_CHAINS
        settings = f"""
            ext_ifname={WAN}
            listening_ip={LAN}
            enable_upnp=yes
            enable_natpmp=yes
            secure_mode=yes
            system_uptime=no
            uuid=5fa1dab1-0000-4000-8000-000000000001
            upnp_table_name={TABLE}
            upnp_nat_table_name={TABLE}
            upnp_forward_chain={forward}
            upnp_nat_chain={prerouting}
            upnp_nat_postrouting_chain={postrouting}
            allow 1024-65535 0.0.0.0/0 1024-65535
            deny 0-65535 0.0.0.0/0 0-65535
        """
        command = [*self.namespace.enter, "unshare", "--mount", "sh", "-c", _MINIUPNPD]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        daemon = self._services.enter_context(held(command, self.leash, stdin=subprocess.PIPE, **quiet))
        assert daemon.stdin is not None
        daemon.stdin.write("\n".join(line.strip() for line in settings.splitlines()).encode())
        daemon.stdin.close()

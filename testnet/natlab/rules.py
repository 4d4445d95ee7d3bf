"""What a router does, as nftables rules.

The kernel's own NAT keeps a connection's port where it can, and lets in nothing but answers: it is port-restricted.
Symmetric is the same with a random port for each connection. For the kinds that let more in, the rules remember what
the inner hosts have sent: `mapped` has the host of each port, `contacted` the addresses that it has sent to. Packets to
those ports are forwarded to the host. Where two hosts of a home use one port, it belongs to the first.

Ports that the owner forwards are the first host's. Over IPv6 nothing is translated: a router lets in what it lets in
over IPv4.

What is not let in is dropped without an answer, and before connection tracking records it: so it neither ends the
attempts of the other side, nor takes the port from an inner host that dials there a moment later.
"""

from __future__ import annotations

from typing import Final

from .kinds import HTTPS_PORT, Egress, Filtering, Mapping, Nat

WAN: Final = "wan"
LAN: Final = "lan"
# Names that are passed to miniupnpd.
TABLE: Final = "router"
UPNP_CHAINS: Final = ("upnp_forward", "upnp_prerouting", "upnp_postrouting")

# RFC 4787 wants a mapping of UDP to last for 2 minutes at least, and recommends 5 (REQ-5).
_MAPPING_TIMEOUT: Final = "5m"
# One per port, of each of two protocols.
_MAX_MAPPINGS: Final = 131_072

_REMEMBERED: Final = f"""
  map mapped {{
    type inet_proto . inet_service : ipv4_addr; flags dynamic, timeout; timeout {_MAPPING_TIMEOUT}; size {_MAX_MAPPINGS}
  }}
  set contacted {{
    type inet_proto . inet_service . ipv4_addr
    flags dynamic, timeout; timeout {_MAPPING_TIMEOUT}; size {_MAX_MAPPINGS}
  }}
  chain remember {{
    type filter hook forward priority mangle
    iifname {LAN} meta l4proto {{ tcp, udp }} update @mapped {{ meta l4proto . th sport : ip saddr }}
    iifname {LAN} meta l4proto {{ tcp, udp }} update @contacted {{ meta l4proto . th sport . ip daddr }}
  }}"""
_TO_MAPPED: Final = "dnat ip to meta l4proto . th dport map @mapped"
_INWARD: Final = {
    Filtering.ENDPOINT_INDEPENDENT: f"iifname {WAN} meta l4proto {{ tcp, udp }} {_TO_MAPPED}",
    Filtering.ADDRESS_DEPENDENT: f"iifname {WAN} meta l4proto . th dport . ip saddr @contacted {_TO_MAPPED}",
}
_FORBIDDEN: Final = {
    Egress.NO_UDP: f"iifname {LAN} meta l4proto udp drop",
    Egress.ONLY_HTTPS: f"iifname {LAN} tcp dport != {HTTPS_PORT} drop\n    iifname {LAN} meta l4proto != tcp drop",
}
_OUTWARD: Final = {
    Mapping.NONE: "",
    Mapping.ENDPOINT_INDEPENDENT: f"oifname {WAN} meta nfproto ipv4 masquerade",
    Mapping.ADDRESS_AND_PORT_DEPENDENT: f"oifname {WAN} meta nfproto ipv4 masquerade random,fully-random",
}
# One outer port for each inner one, which peers cannot guess. One pair of inner ports in 40,000 shares an outer one,
# and cannot reach the same destination at once.
_RENUMBER: Final = (
    f"oifname {WAN} meta nfproto ipv4 meta l4proto {{ tcp, udp }} "
    "masquerade to :jhash th sport mod 40000 seed 0x5 offset 20000"
)


def router_rules(nat: Nat, first_host: str, life: int) -> str:
    """Return input for ``nft -f``: it replaces the table `TABLE`, between the interfaces `WAN` and `LAN`.

    ``first_host``: the IPv4 address to which ports are forwarded. ``life``: the number of the router's starts;
    connections of an earlier life are in another zone, and so forgotten.
    """
    forward, prerouting, postrouting = UPNP_CHAINS
    is_remembering = nat.mapping is Mapping.ENDPOINT_INDEPENDENT and nat.filtering in _INWARD
    return f"""table inet {TABLE}
delete table inet {TABLE}
table inet {TABLE} {{{_REMEMBERED if is_remembering else ""}
  chain {forward} {{ }}
  chain {prerouting} {{ }}
  chain {postrouting} {{ }}
  chain life {{
    type filter hook prerouting priority raw
    ct zone set {life}
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop
    ct state invalid drop
    {_FORBIDDEN.get(nat.egress, "")}
    ct state established,related accept
    iifname {LAN} accept
    ct status dnat accept
    {"accept" if nat.filtering is Filtering.NONE else ""}
    {f"meta nfproto ipv6 tcp dport {nat.forwarded} accept" if nat.forwarded else ""}
    jump {forward}
  }}
  chain input {{
    type filter hook input priority filter
    meta l4proto ipv6-icmp accept
    iifname {WAN} ct state != established,related drop
  }}
  chain inward {{
    type nat hook prerouting priority dstnat
    jump {prerouting}
    {_INWARD[nat.filtering] if is_remembering else ""}
    {f"iifname {WAN} tcp dport {nat.forwarded} dnat ip to {first_host}" if nat.forwarded else ""}
  }}
  chain outward {{
    type nat hook postrouting priority srcnat
    jump {postrouting}
    {_RENUMBER if nat.is_renumbering else ""}
    {_OUTWARD[nat.mapping]}
  }}
}}
"""


def line_rules(loss: float) -> str:
    """Return the rules for the line, both ways, in a table of their own; ``loss`` is a packet's chance to be lost."""
    millionths = round(loss * 1e6)
    fate = f"numgen random mod 1000000 < {millionths} drop" if millionths < 1e6 else "drop"  # nft refuses what is sure
    return f"""table inet line
delete table inet line
table inet line {{
  chain incoming {{
    type filter hook prerouting priority raw - 100
    iifname {WAN} {fate}
  }}
  chain outgoing {{
    type filter hook postrouting priority srcnat + 100
    oifname {WAN} {fate}
  }}
}}
"""

"""The kinds of homes, in RFC 4787's terms, and which connections between two of them theory allows.

A NAT maps an inner address and port to an outer one, and filters what comes to the outer one. Both depend on where
packets went to before: not at all (endpoint-independent), on the address, or on address and port. Names such as "full
cone" are from RFC 3489, which most people know; for TCP the same words hold (RFC 5382). The predictions are for hosts
that have not asked their router for a port (UPnP).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from farandole.protocol.wire.errors import FarandoleError

HTTPS_PORT: Final = 443


class Mapping(IntEnum):
    """A router's mapping of an inner address and port to an outer one; greater is stricter."""

    NONE = 0
    """No translation: the inner address is public."""
    ENDPOINT_INDEPENDENT = 1
    """One outer port, for all destinations."""
    ADDRESS_AND_PORT_DEPENDENT = 2
    """Another outer port for each destination."""


class Filtering(IntEnum):
    """A router's filter of incoming packets that are not answers; greater is stricter."""

    NONE = 0
    ENDPOINT_INDEPENDENT = 1
    """Anything to an existing mapping gets in."""
    ADDRESS_DEPENDENT = 2
    """Packets to a mapping get in from addresses that it has sent to."""
    ADDRESS_AND_PORT_DEPENDENT = 3
    """Only answers get in: from an address and port that the mapping has sent to."""


class Egress(IntEnum):
    """A router's filter of outgoing packets."""

    ANY = 0
    NO_UDP = 1
    ONLY_HTTPS = 2
    """TCP to port 443."""


@dataclass(frozen=True)
class Nat:
    """The behaviour of one router."""

    mapping: Mapping = Mapping.NONE
    filtering: Filtering = Filtering.NONE
    egress: Egress = Egress.ANY
    is_renumbering: bool = False
    """The outer port differs from the inner one, also where the mapping is endpoint-independent."""
    has_upnp: bool = False
    """The router opens ports for hosts that ask (miniupnpd: UPnP and NAT-PMP)."""
    forwarded: str = ""
    """TCP ports that its owner forwards to the first host, or lets in to it over IPv6: ``4001``, or ``1-65535``."""


@dataclass(frozen=True)
class HomeKind:
    """A home: the routers between its hosts and the internet, the innermost first."""

    name: str
    nats: tuple[Nat, ...]

    @property
    def mapping(self) -> Mapping:
        """Return the mapping of all routers together, which is the strictest of them."""
        return max(nat.mapping for nat in self.nats)

    @property
    def filtering(self) -> Filtering:
        """Return the filtering of all routers together, which is the strictest of them."""
        return max(nat.filtering for nat in self.nats)

    def lets_out(self, port: int) -> bool:
        """Return whether a TCP packet to this port of another host leaves the home."""
        return port == HTTPS_PORT or Egress.ONLY_HTTPS not in [nat.egress for nat in self.nats]


class KindError(FarandoleError, ValueError):
    """There is no such kind of home; the message names those there are."""


_PORT_RESTRICTED = Nat(Mapping.ENDPOINT_INDEPENDENT, Filtering.ADDRESS_AND_PORT_DEPENDENT)
# RFC 6888 requires carriers to map endpoint-independently; this filter is the strictest that they have.
_CARRIER = _PORT_RESTRICTED
KINDS: Final[dict[str, tuple[Nat, ...]]] = {
    "open": (Nat(),),
    "firewall": (Nat(Mapping.NONE, Filtering.ADDRESS_AND_PORT_DEPENDENT),),
    "full-cone": (Nat(Mapping.ENDPOINT_INDEPENDENT, Filtering.ENDPOINT_INDEPENDENT),),
    "address-restricted": (Nat(Mapping.ENDPOINT_INDEPENDENT, Filtering.ADDRESS_DEPENDENT),),
    "port-restricted": (_PORT_RESTRICTED,),
    "symmetric": (Nat(Mapping.ADDRESS_AND_PORT_DEPENDENT, Filtering.ADDRESS_AND_PORT_DEPENDENT),),
    "carrier": (_PORT_RESTRICTED, _CARRIER),  # a home of the commonest kind, behind a carrier's NAT
    "udp-blocked": (replace(_PORT_RESTRICTED, egress=Egress.NO_UDP),),
    "https-only": (replace(_PORT_RESTRICTED, egress=Egress.ONLY_HTTPS),),
    "upnp": (replace(_PORT_RESTRICTED, has_upnp=True),),
}
"""The ten kinds of the tables, in their order."""
# What owners set up by hand. A cloud machine has a private address, to which a public one is mapped one to one; Docker
# publishes a port of a container, here on such a machine.
_FORWARDED: Final = replace(_PORT_RESTRICTED, forwarded="4001")
_ONE_TO_ONE: Final = replace(_PORT_RESTRICTED, forwarded="1-65535")
OTHER_KINDS: Final[dict[str, tuple[Nat, ...]]] = {
    "forwarded": (_FORWARDED,),
    "one-to-one": (_ONE_TO_ONE,),
    "docker": (_FORWARDED, _ONE_TO_ONE),
    "renumbering": (replace(_PORT_RESTRICTED, is_renumbering=True),),
}
"""Most NATs preserve ports. ``renumbering`` is port-restricted and does not, as carriers' NATs and some routers: theory
says the same of both, and who takes its own port for the outer one is found out."""


def kind_named(name: str) -> HomeKind:
    """Return one of `KINDS` or `OTHER_KINDS`; raises `KindError`."""
    every = KINDS | OTHER_KINDS
    if name not in every:
        raise KindError(f"no kind of home {name!r}: say one of {', '.join(every)}")
    return HomeKind(name, every[name])


# Ports above this one stand for any port but HTTPS's.
ANY_PORT: Final = 50_000


def can_connect(near: HomeKind, far: HomeKind, port: int = ANY_PORT) -> bool:
    """Return whether a TCP connection from near reaches a far host at the far host's observed address and port."""
    return near.lets_out(port) and far.filtering <= Filtering.ENDPOINT_INDEPENDENT


def can_punch_tcp(near: HomeKind, far: HomeKind) -> bool:
    """Return whether TCP connects when both dial at once, from the ports that a third host has observed of each."""
    return _gets_in(near, far) or _gets_in(far, near)


def _gets_in(near: HomeKind, far: HomeKind) -> bool:
    """Return whether near's first packet passes far's filter, when far has sent to the address observed of near.

    Answers to it pass any filter.
    """
    if not near.lets_out(ANY_PORT) or far.mapping is Mapping.ADDRESS_AND_PORT_DEPENDENT:
        return False  # it does not leave; or it goes to a port at which far receives packets from the third alone
    match far.filtering:
        case Filtering.NONE | Filtering.ENDPOINT_INDEPENDENT:
            return True
        case Filtering.ADDRESS_DEPENDENT:
            return far.lets_out(ANY_PORT)
        case Filtering.ADDRESS_AND_PORT_DEPENDENT:
            return far.lets_out(ANY_PORT) and near.mapping is not Mapping.ADDRESS_AND_PORT_DEPENDENT

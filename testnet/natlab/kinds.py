"""The kinds of homes, in RFC 4787's terms, and what theory says of two of them.

A NAT maps an inner address and port to an outer one, and filters what comes to the outer one. Both depend on where
packets went to before: not at all (endpoint-independent), on the address, or on address and port. Names such as
"full cone" are those of RFC 3489, which most people know; for TCP the same words hold (RFC 5382). Theory speaks of
hosts that have not asked their router for a port (UPnP).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Final, Literal

from farandole.protocol.errors import FarandoleError

Protocol = Literal["tcp", "udp"]
HTTPS_PORT: Final = 443


class Mapping(IntEnum):
    """Where an inner address and port appears outside; the greater, the stricter."""

    NONE = 0
    """No translation: the inner address is public."""
    ENDPOINT_INDEPENDENT = 1
    """At one outer port, wherever the packets go."""
    ADDRESS_AND_PORT_DEPENDENT = 2
    """At another outer port for each destination."""


class Filtering(IntEnum):
    """What gets in that is no answer; the greater, the stricter."""

    NONE = 0
    ENDPOINT_INDEPENDENT = 1
    """Anything to a mapping that exists."""
    ADDRESS_DEPENDENT = 2
    """What comes to a mapping from an address that it has sent to."""
    ADDRESS_AND_PORT_DEPENDENT = 3
    """Nothing but answers: from an address and port that the mapping has sent to."""


class Egress(IntEnum):
    """What gets out."""

    ANY = 0
    NO_UDP = 1
    ONLY_HTTPS = 2
    """TCP to port 443."""


@dataclass(frozen=True)
class Nat:
    """What one router does."""

    mapping: Mapping = Mapping.NONE
    filtering: Filtering = Filtering.NONE
    egress: Egress = Egress.ANY
    is_renumbering: bool = False
    """The outer port is another than the inner one, also where the mapping is endpoint-independent."""
    has_upnp: bool = False
    """It opens ports for hosts that ask (miniupnpd: UPnP and NAT-PMP)."""


@dataclass(frozen=True)
class HomeKind:
    """A home: the routers between its hosts and the internet, the innermost first."""

    name: str
    nats: tuple[Nat, ...]

    @property
    def mapping(self) -> Mapping:
        """Of all the routers together: the strictest shows."""
        return max(nat.mapping for nat in self.nats)

    @property
    def filtering(self) -> Filtering:
        """Of all the routers together."""
        return max(nat.filtering for nat in self.nats)

    def lets_out(self, protocol: Protocol, port: int) -> bool:
        """Whether a packet to that port of another host leaves."""
        egress = max(nat.egress for nat in self.nats)
        match egress:
            case Egress.ANY:
                return True
            case Egress.NO_UDP:
                return protocol == "tcp"
            case Egress.ONLY_HTTPS:
                return protocol == "tcp" and port == HTTPS_PORT


class KindError(FarandoleError):
    """There is no such kind of home; the message names those there are."""


_PORT_RESTRICTED = Nat(Mapping.ENDPOINT_INDEPENDENT, Filtering.ADDRESS_AND_PORT_DEPENDENT)
# RFC 6888 wants carriers to map endpoint-independently; of their filters this is the strictest.
_CARRIER = _PORT_RESTRICTED
_CARRIER_PREFIX: Final = "carrier-"

_SINGLE: Final = {
    "open": Nat(),
    "firewall": Nat(Mapping.NONE, Filtering.ADDRESS_AND_PORT_DEPENDENT),
    "full-cone": Nat(Mapping.ENDPOINT_INDEPENDENT, Filtering.ENDPOINT_INDEPENDENT),
    "address-restricted": Nat(Mapping.ENDPOINT_INDEPENDENT, Filtering.ADDRESS_DEPENDENT),
    "port-restricted": _PORT_RESTRICTED,
    "symmetric": Nat(Mapping.ADDRESS_AND_PORT_DEPENDENT, Filtering.ADDRESS_AND_PORT_DEPENDENT),
    "udp-blocked": Nat(_PORT_RESTRICTED.mapping, _PORT_RESTRICTED.filtering, Egress.NO_UDP),
    "https-only": Nat(_PORT_RESTRICTED.mapping, _PORT_RESTRICTED.filtering, Egress.ONLY_HTTPS),
    "renumbering": Nat(_PORT_RESTRICTED.mapping, _PORT_RESTRICTED.filtering, is_renumbering=True),
    "upnp": Nat(_PORT_RESTRICTED.mapping, _PORT_RESTRICTED.filtering, has_upnp=True),
}
# The ten of tables, in their order; "carrier" is a home of the commonest kind behind a carrier's NAT.
KINDS: Final = (
    "open",
    "firewall",
    "full-cone",
    "address-restricted",
    "port-restricted",
    "symmetric",
    "carrier",
    "udp-blocked",
    "https-only",
    "upnp",
)
"""Most NATs preserve ports. ``renumbering`` is port-restricted and does not, as carriers' NATs and some routers: theory
says the same of both, and who takes its own port for the outer one is found out."""
CARRIER_KINDS: Final = tuple(f"{_CARRIER_PREFIX}{name}" for name in _SINGLE)
"""The same, each with a carrier's NAT in front."""


def kind_named(name: str) -> HomeKind:
    """One of `KINDS` or `CARRIER_KINDS`; raises `KindError`."""
    if name == "carrier":
        return HomeKind(name, (_PORT_RESTRICTED, _CARRIER))
    nat = _SINGLE.get(name.removeprefix(_CARRIER_PREFIX))
    if nat is None:
        raise KindError(f"no kind of home {name!r}: say one of {', '.join(chain(KINDS, CARRIER_KINDS))}")
    return HomeKind(name, (nat, _CARRIER) if name.startswith(_CARRIER_PREFIX) else (nat,))


# Ports above this one stand for any but that of HTTPS.
_ANY_PORT: Final = 50_000


def can_connect(near: HomeKind, far: HomeKind, port: int = _ANY_PORT) -> bool:
    """Whether a TCP connection from near reaches a far host, of which near knows the observed address and port."""
    return near.lets_out("tcp", port) and far.filtering <= Filtering.ENDPOINT_INDEPENDENT


def can_punch_tcp(near: HomeKind, far: HomeKind) -> bool:
    """Whether a connection comes about when both connect at once, from the port that a third has observed of each."""
    return _can_punch(near, far, "tcp")


def can_punch_udp(near: HomeKind, far: HomeKind) -> bool:
    """The same for datagrams."""
    return _can_punch(near, far, "udp")


def _can_punch(near: HomeKind, far: HomeKind, protocol: Protocol) -> bool:
    return _gets_in(near, far, protocol) or _gets_in(far, near, protocol)


def _gets_in(near: HomeKind, far: HomeKind, protocol: Protocol) -> bool:
    """Whether near's first packet passes far's filter, when far has sent to the address observed of near.

    The answers to it pass whatever is in the way.
    """
    if not near.lets_out(protocol, _ANY_PORT) or far.mapping is Mapping.ADDRESS_AND_PORT_DEPENDENT:
        return False  # it does not leave; or it goes to a port at which far receives from nobody but the third
    match far.filtering:
        case Filtering.NONE | Filtering.ENDPOINT_INDEPENDENT:
            return True
        case Filtering.ADDRESS_DEPENDENT:
            return far.lets_out(protocol, _ANY_PORT)
        case Filtering.ADDRESS_AND_PORT_DEPENDENT:
            return far.lets_out(protocol, _ANY_PORT) and near.mapping is not Mapping.ADDRESS_AND_PORT_DEPENDENT

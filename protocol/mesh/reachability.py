"""Find out whether others can dial this node, from peers that tried: public, punchable, or through relays alone.

    asker     Request: these ports of mine listen                 over a libp2p stream
    witness   dials them, at the IP address from which the asker's connection comes and no other, from a fresh port
    witness   Answer: as which address it sees the asker, and which ports it reached

A witness authenticates the node that it reaches: neither a router's login page nor a neighbour behind the same address
counts. A request without ports asks for the address alone: over a connection that was dialled from the listening port,
this is the NAT's mapping of that port. If several witnesses see the same mapping (endpoint-independent mapping, RFC
4787), the node can offer it to others; if not, a hole cannot be punched from here (RFC 5128, 3.3).

A witness on the internet knows more than one in the same network: where there is one on the internet, only such ones
count.

A peer also tells the time by its clock, by which others check theirs: the asker opens a stream, and the answer is one
frame. The offset of a clock is known to within half the round trip (Cristian 1989).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from ..wire.errors import RemoteProtocolError
from ..wire.messagepack import MessageDecoder
from .dialling import MAX_IP_CHARS, Address, is_open_to_peers

CLOCK_PROTOCOL: Final = "/farandole/clock/1"
DIALBACK_PROTOCOL: Final = "/farandole/dialback/1"
# A node listens in two families, at most on a port of its own and on one that its router has opened for it.
MAX_PORTS: Final = 4
MAX_MESSAGE_BYTES: Final = 256


class ReachabilityKind(StrEnum):
    """The ways in which others reach a node."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    PUNCHABLE = "punchable"
    RELAY_ONLY = "relay only"


Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Ask a witness to dial these ports of the sender, and to report the address that it sees."""

    ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=MAX_PORTS)]


class DialBackAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The witness's report."""

    ip: Annotated[str, msgspec.Meta(max_length=MAX_IP_CHARS)]
    """IP address of the asker's connection; empty where a relay carries it."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    has_dialled: bool
    """False if the witness is too busy, or has dialled this asker a moment ago."""
    reached: Annotated[tuple[Port, ...], msgspec.Meta(max_length=MAX_PORTS)]
    """The ports that the witness reached, of the ones asked for."""


_decode_request = MessageDecoder[Request](Request, "a request to be dialled")
_decode_answer = MessageDecoder[DialBackAnswer](DialBackAnswer, "an answer")


def decode_request(payload: bytes) -> Request:
    """Parse a request and drop ports that must not be dialled; raise `RemoteProtocolError` if it is malformed."""
    request = _decode_request(payload)
    return Request(tuple(dict.fromkeys(filter(is_open_to_peers, request.ports))))


def decode_answer(payload: bytes, request: Request) -> DialBackAnswer:
    """Parse an answer to this request; raise `RemoteProtocolError` if it is not one."""
    answer = _decode_answer(payload)
    try:
        if answer.ip:
            ipaddress.ip_address(answer.ip)
    except ValueError as error:
        raise RemoteProtocolError(f"not an answer: {error}") from error
    if not set(answer.reached) <= set(request.ports):
        raise RemoteProtocolError("it reached what it was not asked for")
    return answer


@dataclass(frozen=True, slots=True)
class Witness:
    """One peer's answer."""

    ip: str
    """The witness's own IP address, as we see it."""
    answer: DialBackAnswer


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conclusion from all answers."""

    kind: ReachabilityKind
    addresses: tuple[Address, ...] = ()
    """If public, where others reach us; else the NAT's mappings of the listening port."""


def classify(dialled: Sequence[Witness], observed: Sequence[Witness]) -> Verdict:
    """Classify by the witnesses that tried to dial, and by the ones that saw a connection from the listening port."""
    dialled = _weightiest([witness for witness in dialled if witness.answer.has_dialled])
    observed = _weightiest(observed)
    answers = [witness.answer for witness in dialled]
    if reached := [answer for answer in answers if answer.reached and _is_public(answers, ":" in answer.ip)]:
        found = ((answer.ip, port) for answer in reached for port in answer.reached if answer.ip)
        return Verdict(ReachabilityKind.PUBLIC, tuple(dict.fromkeys(found)))
    seen = tuple(dict.fromkeys((witness.answer.ip, witness.answer.port) for witness in observed if witness.answer.ip))
    if not dialled and not seen:
        return Verdict(ReachabilityKind.UNKNOWN)
    by_ip = {ip: [port for other, port in seen if other == ip] for ip, _ in seen}
    # One witness alone does not show whether the NAT's mapping depends on the endpoint; then punching is tried.
    is_punchable = bool(seen) and all(len(ports) == 1 for ports in by_ip.values())
    return Verdict(ReachabilityKind.PUNCHABLE if is_punchable else ReachabilityKind.RELAY_ONLY, seen)


def is_closed(announced: str, verdict: Verdict) -> bool:
    """Return whether peers did not reach this node at an announced multiaddr, as far as they could try."""
    _, _, ip, _, port = announced.split("/")
    # Peers dial only the IP address that they see, and not every port.
    is_tried = ip in {seen_ip for seen_ip, _ in verdict.addresses} and is_open_to_peers(int(port))
    return is_tried and (verdict.kind is not ReachabilityKind.PUBLIC or (ip, int(port)) not in verdict.addresses)


def has_moved(announced: str, verdict: Verdict) -> bool:
    """Return whether peers on the internet see this node at other IP addresses than an announced multiaddr has."""
    _, kind, ip, _, _ = announced.split("/")
    seen = {seen_ip for seen_ip, _ in verdict.addresses if kind == ("ip6" if ":" in seen_ip else "ip4")}
    return any(map(is_global, seen)) and ip not in seen


def _is_public(answers: Sequence[DialBackAnswer], is_ipv6: bool) -> bool:
    """Return whether most witnesses have reached us, or at least two and most of those that use this version of IP.

    A router may let in one version and not the other. No witness decides alone if others disagree.
    """
    alike = [answer for answer in answers if (":" in answer.ip) == is_ipv6]
    num_reached, num_alike = (sum(bool(answer.reached) for answer in each) for each in (answers, alike))
    return 2 * num_reached > len(answers) or (num_alike > 1 and 2 * num_alike > len(alike))


def _weightiest(witnesses: Sequence[Witness]) -> list[Witness]:
    far = [witness for witness in witnesses if is_global(witness.ip)]
    return far or list(witnesses)


def is_global(ip: str) -> bool:
    """Return whether an IP address is globally reachable."""
    try:
        return ipaddress.ip_address(ip.partition("%")[0]).is_global
    except ValueError:
        return False


ClockAnswer = tuple[Annotated[int, msgspec.Meta(ge=0, le=2**50)]]
"""The time by the witness's clock: milliseconds since 1970, UTC."""
decode_clock = MessageDecoder[ClockAnswer](ClockAnswer, "a clock's answer")

"""Whether others can dial this node, by what others say who tried: public, punchable, or through relays alone.

    asker     Request: these ports of mine listen                 over a libp2p stream
    witness   dials them, at the IP address from which the asker's connection comes and no other, from a fresh port
    witness   Answer: as which address it sees the asker, and which ports it reached

A witness authenticates whom it reaches: neither a router's login page nor a neighbour behind the same address counts.
Without ports a request asks for the address alone: over a connection that was dialled from the port that listens, this
is what the NAT has made of that port. If it makes the same of it for several witnesses (endpoint-independent mapping,
RFC 4787), others can be told where to meet; if not, a hole cannot be punched from here (RFC 5128, 3.3).

A witness on the internet knows more than one next door: where there are any of the first kind, only those count.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from .bulk import MAX_IP_CHARS
from .errors import RemoteProtocolError
from .wire import MessageDecoder

DIALBACK_PROTOCOL: Final = "/farandole/dialback/1"
# A node listens in two families, at most on a port of its own and on one that its router has opened for it.
MAX_PORTS: Final = 4
MAX_MESSAGE_BYTES: Final = 256
# Below are the ports of system services, where nobody is to be made to knock; web servers are knocked at by everybody.
MIN_PORT: Final = 1_024
HTTPS_PORT: Final = 443

Address = tuple[str, int]
"""An IP address in words, and a TCP port."""


class ReachabilityKind(StrEnum):
    """How others reach a node."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    PUNCHABLE = "punchable"
    RELAY_ONLY = "relay only"


Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Try these ports of mine, and tell me as whom you see me."""

    ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=MAX_PORTS)]


class DialBackAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the witness saw."""

    ip: Annotated[str, msgspec.Meta(max_length=MAX_IP_CHARS)]
    """Of the asker's connection; empty where a relay carries it."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    has_dialled: bool
    """False where the witness has too much to do, or has done it for this asker a moment ago."""
    reached: Annotated[tuple[Port, ...], msgspec.Meta(max_length=MAX_PORTS)]
    """Of the ports asked for."""


_decode_request = MessageDecoder[Request](Request, "a request to be dialled")
_decode_answer = MessageDecoder[DialBackAnswer](DialBackAnswer, "an answer")


def decode_request(payload: bytes) -> Request:
    """A request without ports where nobody is to knock; `RemoteProtocolError` if it is none."""
    request = _decode_request(payload)
    return Request(tuple(dict.fromkeys(port for port in request.ports if port >= MIN_PORT or port == HTTPS_PORT)))


def decode_answer(payload: bytes, request: Request) -> DialBackAnswer:
    """An answer to this request; `RemoteProtocolError` if it is none."""
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
    """What one peer answered."""

    ip: str
    """Its own, as we see it."""
    answer: DialBackAnswer


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all of them said."""

    kind: ReachabilityKind
    addresses: tuple[Address, ...] = ()
    """Public: where others reach us. Else: what the NAT makes of the port that listens."""


def classify(dialled: Sequence[Witness], observed: Sequence[Witness]) -> Verdict:
    """From the witnesses that tried to dial, and from those that saw a connection from the port that listens."""
    dialled = _weightiest([witness for witness in dialled if witness.answer.has_dialled])
    observed = _weightiest(observed)
    reached = [witness.answer for witness in dialled if witness.answer.reached]
    if 2 * len(reached) > len(dialled):
        found = ((answer.ip, port) for answer in reached for port in answer.reached if answer.ip)
        return Verdict(ReachabilityKind.PUBLIC, tuple(dict.fromkeys(found)))
    seen = tuple(dict.fromkeys((witness.answer.ip, witness.answer.port) for witness in observed if witness.answer.ip))
    if not dialled and not seen:
        return Verdict(ReachabilityKind.UNKNOWN)
    by_ip = {ip: [port for other, port in seen if other == ip] for ip, _ in seen}
    # One witness alone cannot tell: then the attempts will.
    is_punchable = bool(seen) and all(len(ports) == 1 for ports in by_ip.values())
    return Verdict(ReachabilityKind.PUNCHABLE if is_punchable else ReachabilityKind.RELAY_ONLY, seen)


def _weightiest(witnesses: Sequence[Witness]) -> list[Witness]:
    far = [witness for witness in witnesses if is_global(witness.ip)]
    return far or list(witnesses)


def is_global(ip: str) -> bool:
    """Whether an IP address is one of the internet's."""
    try:
        return ipaddress.ip_address(ip.partition("%")[0]).is_global
    except ValueError:
        return False

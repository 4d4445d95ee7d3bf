"""Which peers' releases this node can average with: those that share a version of each protocol that averaging needs.

A protocol's id ends in its version, ``/farandole/exchange/1``, and a node may serve several. What a peer runs it says
itself (libp2p's identify), so a lie costs nobody but the liar its partners.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

Standing = Literal["older", "newer"]

_PROTOCOL: Final = re.compile(r"(/farandole/[a-z-]{1,32})/([0-9]{1,4})")
_AGENT: Final = re.compile(r"farandole/([0-9A-Za-z.+!-]{1,32})")


@dataclass(frozen=True, slots=True)
class Software:
    """The software of a peer, as it says."""

    version: str
    """Release of farandole; empty: it is not farandole, or not known."""
    protocols: frozenset[str]
    """The protocols of farandole that it serves."""


class ReleaseConflict(msgspec.Struct, frozen=True):
    """The releases of connected peers that this node cannot average with, one for each peer; empty: not known."""

    older: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.older or self.newer)


def software_of(agent: str, protocols: Iterable[str]) -> Software:
    """Return what a peer says in identify, without anything that is not farandole's."""
    found = _AGENT.fullmatch(agent)
    own = (protocol for protocol in protocols if _PROTOCOL.fullmatch(protocol))
    return Software(found[1] if found else "", frozenset(own))


def _versions(protocols: Iterable[str]) -> dict[str, set[int]]:
    """Return the versions of each protocol by its name."""
    versions: dict[str, set[int]] = {}
    for protocol in protocols:
        if found := _PROTOCOL.fullmatch(protocol):
            versions.setdefault(found[1], set()).add(int(found[2]))
    return versions


def is_incomplete(theirs: Software | None, needed: Iterable[str]) -> bool:
    """Return whether a peer serves no version of a needed protocol: it may be starting, or be no member."""
    return theirs is None or not _versions(needed).keys() <= _versions(theirs.protocols).keys()


def standing(own: Iterable[str], theirs: Software, needed: Iterable[str]) -> Standing | None:
    """Return whether a peer's release is too old or too new for this node; None while nothing shows that it is.

    ``needed``: the protocols that averaging needs, in this node's newest version; ``own``: all that it serves. A
    protocol of which the peer serves no version shows nothing.
    """
    wanted = _versions(needed)
    ours, others = _versions((*own, *needed)), _versions(theirs.protocols)
    apart = [name for name in wanted if name in others and ours[name].isdisjoint(others[name])]
    if not apart:
        return None
    return "newer" if any(max(others[name]) > max(ours[name]) for name in apart) else "older"

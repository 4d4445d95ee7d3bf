"""Packing: entries and proofs in as few messages as their bound allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ..wire.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from .entries import MAX_DELTA_BYTES, Delta, Proof, Signed

_DELTA_OVERHEAD = 16


def _wire_bytes(item: Signed | Proof) -> int:
    """Return an upper bound of an item's encoded size: an entry's three lengths and its array take at most 8 bytes."""
    if isinstance(item, Proof):
        return _wire_bytes(item.a) + _wire_bytes(item.b) + 1
    return len(item.body) + PUBLIC_KEY_BYTES + SIGNATURE_BYTES + 8


_Item = TypeVar("_Item")


def packed(items: Iterable[_Item], cost_of: Callable[[_Item], int], max_bytes: int) -> Iterator[tuple[_Item, ...]]:
    """Yield the items in their order, in groups that cost at most ``max_bytes`` each (or have a single item)."""
    pack: list[_Item] = []
    size = 0
    for item in items:
        cost = cost_of(item)
        if pack and size + cost > max_bytes:
            yield tuple(pack)
            pack, size = [], 0
        pack.append(item)
        size += cost
    if pack:
        yield tuple(pack)


def deltas_of(entries: Iterable[Signed], proofs: Iterable[Proof] = (), max_bytes: int = MAX_DELTA_BYTES) -> list[Delta]:
    """Pack entries and proofs into as few deltas as possible, each of at most ``max_bytes``; proofs come first."""
    items: list[Signed | Proof] = [*proofs, *entries]
    return [
        Delta(tuple(i for i in pack if isinstance(i, Signed)), tuple(i for i in pack if isinstance(i, Proof)))
        for pack in packed(items, _wire_bytes, max_bytes - _DELTA_OVERHEAD)
    ]

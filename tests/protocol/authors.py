"""Authors for tests: they sign anything, as an attacker with its own key can."""

from __future__ import annotations

from functools import lru_cache

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.state.entries import (
    DOMAIN,
    RULES,
    Beat,
    CheckpointNotice,
    Delta,
    Kind,
    Member,
    Payload,
    Progress,
    Signed,
    encode_body,
)
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.identity import public_bytes, sign

RUN_ID = b"r" * 32
NOW = 1_750_000_000.0


@lru_cache(maxsize=256)
def key_of(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


@lru_cache(maxsize=256)
def author_of(number: int) -> bytes:
    return public_bytes(key_of(number))


CREATOR = author_of(255)


def tick_at(kind: Kind, at: float = NOW) -> int:
    return int(at // RULES[kind].quantum)


def sign_body(number: int, body: bytes, run_id: bytes = RUN_ID) -> Signed:
    return Signed(author_of(number), body, sign(key_of(number), DOMAIN, run_id, body))


@lru_cache(maxsize=4_096)
def signed(number: int, kind: Kind, index: int, tick: int, payload: Payload, run_id: bytes = RUN_ID) -> Signed:
    return sign_body(number, encode_body(kind, index, tick, payload), run_id)


def member(number: int, tick: int | None = None, device: str = "cpu", left: bool = False) -> Signed:
    tick = tick_at(Kind.MEMBER) if tick is None else tick
    return signed(number, Kind.MEMBER, 0, tick, Member(device=device, left=left))


def beat(number: int, tick: int | None = None) -> Signed:
    return signed(number, Kind.BEAT, 0, tick_at(Kind.BEAT) if tick is None else tick, Beat(1, 1, 3_000_000, 100))


def notice(number: int, index: int = 0, tick: int | None = None) -> Signed:
    tick = tick_at(Kind.CHECKPOINT) if tick is None else tick
    return signed(number, Kind.CHECKPOINT, index, tick, CheckpointNotice(1, 0, bytes(32), 1, 1, 1))


def progress(number: int, tokens: int, tick: int | None = None) -> Signed:
    tick = tick_at(Kind.PROGRESS) if tick is None else tick
    return signed(number, Kind.PROGRESS, 0, tick, Progress(1, 1, tokens, 0, 0))


def state_of(*items: Signed, now: float = NOW) -> RunState:
    state = RunState(RUN_ID, CREATOR)
    state.merge(Delta(items), now)
    return state


def everything(state: RunState) -> Delta:
    """Return all entries and proofs of a state, as one delta."""
    proofs = tuple(proof for author in state.authors if (proof := state.proof_of(author)) is not None)
    return Delta(tuple(entry.signed for entry in state), proofs)


def contents(state: RunState) -> set[tuple[bytes, int, int, bytes]]:
    """Return a state's contents in comparable form; a forked author counts by its name alone."""
    held = {(entry.author, entry.slot, entry.tick, entry.id) for entry in state}
    return held | {(author, -1, -1, b"") for author in state.authors if state.proof_of(author) is not None}


def flipped(item: Signed, bit: int) -> Signed:
    """Return the entry with one bit of its encoding changed; unchanged if that does not decode to an entry."""
    raw = bytearray(msgspec.msgpack.encode(item))
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    try:
        return msgspec.msgpack.decode(raw, type=Signed)
    except (msgspec.MsgspecError, ValueError):
        return item

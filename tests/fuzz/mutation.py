"""Mutations that know MessagePack and frames: the result is still well formed, so it gets past the parser."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from farandole.protocol.wire.framing import LENGTH_BYTES

# Values at the edges of types and bounds, and of other types.
_EDGES: list[Any] = [
    *(0, 1, -1, 2**7, 2**8, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *(None, True, False, "", "x", "\x00", "\u20ac" * 40, b"", b"\0", b"\xff" * 32, b"\0" * 64, [], [[]], {}, {"": []}),
]
_MAX_NESTING = 1_500
# A list is repeated so many times, if it is no longer than `_MAX_REPEATED_BYTES` then: three repetitions of lists in
# lists would turn a kilobyte into a gigabyte.
_MANY = 100
_MAX_REPEATED_BYTES = 1 << 16


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a message, or a conversation in frames, in one or a few places; return other data unchanged."""
    frames = _split(data)
    if frames is None:
        return _mutate_message(data, rng) or data
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not frames:
            break
        at = rng.randrange(len(frames))
        match rng.choice(("change", "change", "change", "drop", "twice", "swap")):
            case "drop":
                del frames[at]
            case "twice":
                frames.insert(at, frames[at])
            case "swap":
                frames[at - 1], frames[at] = frames[at], frames[at - 1]
            case _:
                frames[at] = _mutate_frame(frames[at], rng)
    return b"".join(len(payload).to_bytes(LENGTH_BYTES, "big") + payload for payload in frames)


def _split(data: bytes) -> list[bytes] | None:
    """Return the frames of a conversation (`farandole.protocol.wire.framing`), or None if it is none."""
    frames = []
    while data:
        size = int.from_bytes(data[:LENGTH_BYTES], "big")
        frames.append(data[LENGTH_BYTES : LENGTH_BYTES + size])
        if len(frames[-1]) != size or len(data) < LENGTH_BYTES:
            return None
        data = data[LENGTH_BYTES + size :]
    return frames


def _mutate_frame(payload: bytes, rng: random.Random) -> bytes:
    """Mutate a frame: a message, or a byte for its kind and a message."""
    for head in (0, 1):
        if (mutant := _mutate_message(payload[head:], rng)) is not None:
            return payload[:head] + mutant
    return payload


def _mutate_message(data: bytes, rng: random.Random) -> bytes | None:
    try:
        value = msgspec.msgpack.decode(data)
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = _changed(value, rng)
        return msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, TypeError):
        return None


def _changed(value: Any, rng: random.Random) -> Any:
    """Return the value with one place changed; the larger the value, the deeper the place."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.8:
            return [*value[:at], _changed(value[at], rng), *value[at + 1 :]]
        return rng.choice((value[:at] + value[at + 1 :], [*value, value[at]], [*value[:at], value, *value[at:]]))
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.8:
            return {**value, key: _changed(value[key], rng)}
        return {name: item for name, item in value.items() if name != key}
    if isinstance(value, bytes) and rng.random() < 0.3:  # bytes may contain a message
        inner = _mutate_message(value, rng)
        return value if inner is None else inner
    return rng.choice(_CHANGES)(value, rng)


def _near(value: Any, rng: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + rng.choice((-1, 1))
        case bytes():
            return rng.choice((value[:-1], value + b"\0", bytes(len(value)), rng.randbytes(len(value)), value * 2))
        case str():
            return rng.choice((value[:-1], value + "x", value * 2, value[::-1]))
        case list():
            is_short = len(msgspec.msgpack.encode(value)) * _MANY <= _MAX_REPEATED_BYTES
            return rng.choice((value * 2, value[::-1], value * _MANY if is_short else value))
        case _:
            return rng.choice(_EDGES)


def _nested(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 2, 100, _MAX_NESTING))):
        value = [value]
    return value


_CHANGES: list[Callable[[Any, random.Random], Any]] = [
    _near,
    _near,
    lambda value, rng: rng.choice(_EDGES),
    lambda value, rng: rng.choice(_EDGES),
    _nested,
]

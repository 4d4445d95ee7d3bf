"""Rounds as TensorBoard reads them: one scalar for each figure, over the rounds, at the time when each was over.

A file of events is a TFRecord file (its length, the record and their checksums, one after the other) of protocol
buffers, `tensorboard/compat/proto/event.proto`. Of those this takes four fields, so it writes them itself: TensorBoard,
which brings a dozen packages, is needed by those alone who look.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from ...status.round_log import RoundRecord

# TensorBoard looks for files with "tfevents" in their names; one that is written again takes the place of the old one.
FILE_NAME: Final = "events.out.tfevents.0.farandole"
_VERSION: Final = b"brain.Event:2"
# CRC-32C (Castagnoli), bits reflected, and what TFRecord adds to it (tensorflow/core/lib/hash/crc32c.h).
_POLYNOMIAL: Final = 0x82F63B78
_MASK: Final = 0xA282EAD8
# Of protocol buffers: the kinds of what follows a field's number.
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5


def write_events(records: Iterable[RoundRecord], folder: Path) -> Path:
    """Write them into a file in ``folder``, which is made if need be; its path. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    with path.open("wb") as file:
        for number, record in enumerate(records):
            if not number:
                file.write(_tf_record(_tag(1, _DOUBLE) + struct.pack("<d", record.at) + _bytes(3, _VERSION)))
            file.write(_tf_record(_event(record)))
    return path


def _scalars(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """Those that are known."""
    if record.loss is not None:
        yield "loss/training", record.loss
    if record.validation is not None:
        yield "loss/held out", record.validation
    yield "round/inner steps", record.inner_steps
    yield "round/tokens", record.tokens
    if record.seconds > 0:
        yield "round/tokens a second", record.tokens / record.seconds
    yield "exchange/committed", record.verdict == "committed"
    if record.verdict == "committed":
        yield "exchange/seconds", record.exchange_seconds
        yield "exchange/megabytes sent", record.bytes_sent / 1e6
        yield "exchange/megabytes received", record.bytes_received / 1e6
        yield "exchange/inner steps late", record.late_steps


def _event(record: RoundRecord) -> bytes:
    """``wall_time`` = 1, ``step`` = 2, ``summary`` = 5: of values = 1, each with a tag = 1 and a simple_value = 2."""
    values = (
        _bytes(1, _bytes(1, name.encode()) + _tag(2, _FLOAT) + struct.pack("<f", value))
        for name, value in _scalars(record)
    )
    step = _tag(2, _VARINT) + _varint(record.round)
    return _tag(1, _DOUBLE) + struct.pack("<d", record.at) + step + _bytes(5, b"".join(values))


def _tag(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _bytes(field: int, data: bytes) -> bytes:
    return _tag(field, _BYTES) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _tf_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """As in RFC 3720, appendix B.4."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _row(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
    return number


_TABLE: Final = [_row(number) for number in range(256)]

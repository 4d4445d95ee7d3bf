"""Frames of yamux: a header, and the data of a stream behind it."""

from __future__ import annotations

import struct

HEADER = struct.Struct("!BBHII")  # version, type, flags, stream, length
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8

# Header and data fill one Noise message: 65,535 - 16 of tag.
MAX_MESSAGE_BYTES = 65_519
PIECE_BYTES = MAX_MESSAGE_BYTES - HEADER.size


class YamuxError(Exception):
    """The other end broke the protocol, or takes nothing from us."""

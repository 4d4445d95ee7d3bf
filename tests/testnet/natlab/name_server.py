"""A name server at 192.168.1.1, the router's address: any name has the IPv4 address in a file, read for each question.

python name_server.py FILE
"""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

_HEADER = struct.Struct("!HHHHHH")  # RFC 1035, 4.1.1
_A, _RESPONSE = 1, 0x8180


def answer(query: bytes, address: str) -> bytes:
    """Return the answer to a query with one question: one address, or none if it asks for another kind of record."""
    number, *_ = _HEADER.unpack_from(query)
    end = query.index(b"\0", _HEADER.size) + 5
    (kind,) = struct.unpack_from("!H", query, end - 4)
    record = b""
    if kind == _A:  # a pointer to the name, type, class, 0 seconds to live, 4 bytes
        record = struct.pack("!HHHIH", 0xC00C, _A, 1, 0, 4) + socket.inet_aton(address)
    return _HEADER.pack(number, _RESPONSE, 1, bool(record), 0, 0) + query[_HEADER.size : end] + record


if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("192.168.1.1", 53))
        print("serving", flush=True)
        while True:
            question, asker = server.recvfrom(512)
            server.sendto(answer(question, Path(sys.argv[1]).read_text()), asker)

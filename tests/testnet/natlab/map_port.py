"""Ask the router for a TCP port, from a host behind it: ``map_port.py PORT``. Prints the answer as JSON.

The router is found by UPnP's discovery (SSDP), and asked by NAT-PMP (RFC 6886), since that takes four lines.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import sys

SEARCH = (
    'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
    "ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n\r\n"
)
ATTEMPTS = 20


def ask(sock: socket.socket, message: bytes, address: tuple[str, int]) -> bytes:
    """Ask repeatedly: the router's daemon may have only just started."""
    for _ in range(ATTEMPTS):
        sock.sendto(message, address)
        try:
            return sock.recv(4096)
        except (TimeoutError, ConnectionRefusedError):
            continue
    raise SystemExit(f"{address} does not answer")


def main() -> None:
    port = int(sys.argv[1])
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.5)
        found = re.search(r"(?i)location: (\S+)", ask(sock, SEARCH.encode(), ("239.255.255.250", 1900)).decode())
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.5)
        router = ("192.168.1.1", 5351)
        answer = ask(sock, struct.pack(">BB", 0, 0), router)
        external = socket.inet_ntoa(answer[8:12])
    with socket.socket(type=socket.SOCK_DGRAM) as sock:  # a new one: a second answer to the first may come
        sock.settimeout(0.5)
        answer = ask(sock, struct.pack(">BBHHHI", 0, 2, 0, port, port, 3600), router)
        _, _, result, _, _, mapped, _ = struct.unpack(">BBHIHHI", answer)
        assert result == 0, f"result {result}"
    print(json.dumps({"location": found and found[1], "external": external, "port": mapped}))


if __name__ == "__main__":
    main()

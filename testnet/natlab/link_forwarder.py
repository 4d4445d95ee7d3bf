"""The wire between a testnet's nodes, a process of its own: it delays packets and limits the rate.

Each node has a TUN device, whose packets are read and written here (`testnet/play/places.py`). Or there is one device
to which packets are routed for a delay, and which returns all of them (`testnet/natlab/home.py`). The kernel limits
each node's sending rate (tbf); here a packet waits until the receiver's link is free, and then for the delay. Standard
library only, and no other work in the process: a packet takes about 20 microseconds.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import sys
import time

# A packet that would wait longer for the receiver's link is dropped, as by a router whose buffer is full.
MAX_QUEUE_SECONDS = 0.2
OTHERS = "*"
_MAX_PACKET = 65_536
_DESTINATION = slice(16, 20)  # in the header of IPv4 (RFC 791, section 3.1)


def forward(ports: dict[str, int], down_bytes_per_second: float, delay: float) -> None:
    """Forward between the ports until the process is killed.

    A port is an IPv4 address, or `OTHERS`, and the descriptor of a TUN device.
    """
    poller = select.poll()
    for descriptor in ports.values():
        os.set_blocking(descriptor, False)
        poller.register(descriptor, select.POLLIN)
    free_at = dict.fromkeys(ports.values(), 0.0)
    others = ports.get(OTHERS)
    targets = {bytes(map(int, ip.split("."))): fd for ip, fd in ports.items() if ip != OTHERS}
    due: list[tuple[float, int, int, bytes]] = []  # (at, number, descriptor, packet)
    number = 0
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) * 1e3 if due else None
        for descriptor, _ in poller.poll(wait):
            packet = os.read(descriptor, _MAX_PACKET)
            target = targets.get(packet[_DESTINATION], others)
            if target is None:
                continue
            now = time.monotonic()
            at = max(now, free_at[target]) + len(packet) / down_bytes_per_second
            if at - now <= MAX_QUEUE_SECONDS:
                free_at[target] = at
                number += 1
                heapq.heappush(due, (at + delay, number, target, packet))
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, target, packet = heapq.heappop(due)
            with contextlib.suppress(OSError):  # the namespace is gone with its node
                os.write(target, packet)


def main() -> None:
    """Entry point; its arguments are DOWN_BYTES_PER_SECOND DELAY ADDRESS=DESCRIPTOR..."""
    down, delay, *ports = sys.argv[1:]
    addresses = (port.split("=") for port in ports)
    forward({ip: int(fd) for ip, fd in addresses}, float(down), float(delay))


if __name__ == "__main__":
    main()

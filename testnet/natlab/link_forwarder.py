"""The wire between a home and the internet, a process of its own: it delays packets.

Packets are routed for a delay to one TUN device, and are written back to it later (`testnet/natlab/home.py`). Standard
library only, and no other work in the process: a packet takes about 20 microseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_MAX_PACKET = 65_536
# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


def forward(descriptor: int, delay: float) -> None:
    """Return each packet of a TUN device to it after ``delay`` seconds, until the process is killed."""
    os.set_blocking(descriptor, False)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    late: deque[tuple[float, bytes]] = deque()  # when each is due, in order
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) * 1e3 if late else None
        if poller.poll(wait):
            late.append((time.monotonic() + delay, os.read(descriptor, _MAX_PACKET)))
        while late and late[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the namespace is gone with its home
                os.write(descriptor, late.popleft()[1])


if __name__ == "__main__":
    device, delay = sys.argv[1:]
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    print(flush=True)
    forward(descriptor, float(delay))

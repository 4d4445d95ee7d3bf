"""Delete all tracked connections of this network namespace, as a router does when it reboots.

    python -m farandole.testnet.natlab.conntrack

It uses netlink, so that the package conntrack is not needed.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

# linux/netlink.h, linux/netfilter/nfnetlink.h, nfnetlink_conntrack.h
_NETLINK_NETFILTER: Final = 12
_NFNL_SUBSYS_CTNETLINK: Final = 1
_IPCTNL_MSG_CT_DELETE: Final = 2
_NLM_F_REQUEST, _NLM_F_ACK = 1, 4
_HEADER: Final = "=IHHII"
_GENERIC: Final = "=BBH"


def flush() -> None:
    """Delete every entry; raises `OSError`."""
    size = struct.calcsize(_HEADER) + struct.calcsize(_GENERIC)
    kind = _NFNL_SUBSYS_CTNETLINK << 8 | _IPCTNL_MSG_CT_DELETE
    request = struct.pack(_HEADER, size, kind, _NLM_F_REQUEST | _NLM_F_ACK, 1, 0)
    request += struct.pack(_GENERIC, socket.AF_UNSPEC, 0, 0)  # no attributes: all of them
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
        netlink.sendto(request, (0, 0))
        answer = netlink.recv(4096)
    (error,) = struct.unpack_from("=i", answer, struct.calcsize(_HEADER))
    if error:
        raise OSError(-error, os.strerror(-error))


if __name__ == "__main__":
    flush()

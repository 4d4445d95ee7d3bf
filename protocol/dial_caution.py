"""Which addresses to dial that this node knows from others alone, and how often.

Any peer may say that it is at any address: at a printer's in this home, or at a third party's that many nodes would
then dial. So what others say leads to addresses on the internet, and into a network of this machine only where this
node has business already: next to an address that it has dialled before, or listens at by address. Well-known ports are
never dialled. An address where no peer proves itself is tried a few times, and then after ever longer pauses, whichever
peer is said to be there: so a third party gets few connections from the whole run.

What this node's user says (an invite, a setting) and where a peer has proved itself needs no caution.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from .bulk import MIN_PORT, are_neighbours, unicast_ip

# Attempts in a row at one port, or at one machine, that may be in vain; then the pauses in seconds, doubling.
FREE_OF_PORT, FREE_OF_IP = 4, 16
FIRST_PAUSE, MAX_PAUSE = 30.0, 3_600.0
# Targets that are remembered, those tried last.
MAX_TARGETS: Final = 8_192

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def may_dial(ip_text: str, port: int, in_use: Iterable[str]) -> bool:
    """Whether a peer's word is enough to dial this; ``in_use``: IP addresses where this node has business already."""
    ip = unicast_ip(ip_text)
    if ip is None or not MIN_PORT <= port < 65_536:
        return False
    used = (other for text in in_use if (other := unicast_ip(text)) is not None)
    return ip.is_global or any(are_neighbours(ip, other) for other in used)


class DialBudget:
    """Attempts in vain, by target. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._vain: OrderedDict[tuple[str, int], tuple[int, float]] = OrderedDict()
        """(IP address, port, or 0 for all of its ports) -> (attempts in a row, when the last one was)."""

    def take(self, ip: str, port: int, now: float) -> bool:
        """Count an attempt, in vain unless `succeed` follows; False if it is too early for another one."""
        limits = (((ip, port), FREE_OF_PORT), ((ip, 0), FREE_OF_IP))
        if any(now < self._next_at(target, free) for target, free in limits):
            return False
        for target, _ in limits:
            self._vain[target] = (self._vain.get(target, (0, 0.0))[0] + 1, now)
            self._vain.move_to_end(target)
        while len(self._vain) > MAX_TARGETS:
            self._vain.popitem(last=False)
        return True

    def succeed(self, ip: str, port: int) -> None:
        """A peer has proved itself there."""
        self._vain.pop((ip, port), None)
        self._vain.pop((ip, 0), None)

    def _next_at(self, target: tuple[str, int], free: int) -> float:
        number, last_at = self._vain.get(target, (0, 0.0))
        return last_at if number < free else last_at + min(FIRST_PAUSE * 2.0 ** min(number - free, 30), MAX_PAUSE)

"""The plan of a hostile process, and the limits that keep it from harming its machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import msgspec

from farandole.protocol.run.invite import split_address
from farandole.protocol.wire.errors import FarandoleError

from ..play.launch import PLAN, TARGETS
from ..play.scenario import HostileSettings

# For programs that send as fast as they can: below everything else on the machine, the honest nodes included.
NICENESS: Final = 10
# A play takes five minutes; the kernel ends a process that outlives it, or runs wild.
MAX_CPU_SECONDS: Final = 600
# Of one file, such as a log or a checkpoint.
MAX_FILE_BYTES: Final = 256 * 1024 * 1024
# No hostile process dials anything but this machine.
_LOOPBACK: Final = "/ip4/127.0.0.1/tcp/"


class HostileError(FarandoleError):
    """A hostile process was started with what it must not do."""


def plan_of(environment: Mapping[str, str] = os.environ) -> HostileSettings:
    """Return this process's plan; `HostileError` if it was not started by a testnet."""
    if PLAN not in environment:
        raise HostileError("hostile members are started by farandole testnet run hostile-..., and by nothing else")
    return msgspec.json.decode(environment[PLAN], type=HostileSettings)


def targets_of(environment: Mapping[str, str] = os.environ) -> dict[bytes, str]:
    """Return the honest nodes' keys and addresses; `HostileError` if one is not on the loopback interface."""
    targets = {}
    for address in environment.get(TARGETS, "").split():
        if not address.startswith(_LOOPBACK):
            raise HostileError(f"{address} is not on the loopback interface: hostile programs dial nothing else")
        targets[split_address(address)[1]] = address
    return targets


def tame(niceness: int = 0) -> None:
    """Limit this process and its children: processor time, files, and for floods the priority."""
    import resource

    os.nice(niceness)
    for limit, most in ((resource.RLIMIT_CPU, MAX_CPU_SECONDS), (resource.RLIMIT_FSIZE, MAX_FILE_BYTES)):
        resource.setrlimit(limit, (most, most))

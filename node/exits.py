"""The exit codes of ``farandole``: stable, scripts rely on them."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """How a command ended."""

    OK = 0
    NOT_WELL = 1
    """`farandole doctor` found what keeps a node from working."""
    USAGE = 2
    """Wrong options or arguments."""
    BAD_INPUT = 3
    """A manifest, an invite, a run file or a scenario is not valid."""
    NO_NODE = 4
    """No node runs in this home folder."""
    CANNOT_JOIN = 5
    """The node could not join; the last lines say which step failed and what to do."""
    HOME_IN_USE = 6
    """Another node holds this home's key."""
    TRAINER_FAILED = 7
    """The trainer process cannot run here: device, memory, data."""
    VERDICT_FAILED = 8
    """The testnet ran, and its verdict is not a pass."""
    INTERRUPTED = 130
    """Ctrl-C before the command was through."""

"""Errors of the network edge: foreign exceptions stop in node/mesh/host.py and become these. And exit codes."""

from __future__ import annotations

import enum

from farandole.protocol.wire.errors import FarandoleError


class PeerUnreachableError(FarandoleError):
    """No connection to a peer, or no stream of the protocol asked for, in the time given; the message says why."""


class NotAdmittedError(PeerUnreachableError):
    """A run's members do not admit this node, or this node does not admit a peer; the message says why."""


class StrangerError(PeerUnreachableError):
    """Another peer than the one that was dialled is at this address."""


class ListenError(FarandoleError):
    """This node cannot listen on an address that it was told to listen on."""


class JoinError(FarandoleError):
    """This node cannot join; the message says which step failed and what to do."""


class Exit(enum.IntEnum):
    """The exit code of a command: stable, scripts rely on them. docs/errors.md says what each means."""

    OK = 0
    NOT_WELL = 1
    USAGE = 2
    BAD_INPUT = 3
    NO_NODE = 4
    CANNOT_JOIN = 5
    HOME_IN_USE = 6
    TRAINER_FAILED = 7
    VERDICT_FAILED = 8
    INTERRUPTED = 130

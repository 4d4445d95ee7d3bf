"""The exit codes of ``farandole``: stable, scripts rely on them. docs/errors.md says what each means."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """The exit code of a command."""

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

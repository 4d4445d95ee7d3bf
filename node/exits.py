"""The exit codes of ``farandole``: stable, scripts rely on them."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """How a command ended."""

    meaning: str
    """For people, in the reference."""

    def __new__(cls, code: int, meaning: str) -> Exit:
        """A member from its line below."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    OK = 0, "Done; of `join` and `relay`: left in good order."
    NOT_WELL = 1, "`farandole doctor` found what keeps a node from working."
    USAGE = 2, "Wrong options or arguments."
    BAD_INPUT = 3, "A manifest, an invite, a run file, a settings file or a scenario is not valid."
    NO_NODE = 4, "No node runs in this home folder, or it does not answer."
    CANNOT_JOIN = 5, "The node could not join; the last lines say which step failed and what to do."
    HOME_IN_USE = 6, "Another node holds this home's key."
    TRAINER_FAILED = 7, "The trainer process cannot run here: device, memory, data."
    VERDICT_FAILED = 8, "The testnet ran, and its verdict is not a pass."
    INTERRUPTED = 130, "Ctrl-C before the command was through, or a node that was told to leave a second time."

"""The exit codes of ``farandole``: stable, scripts rely on them."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """The exit code of a command."""

    meaning: str
    """For people, in the reference."""
    remedy: str
    """What to do about it, for people; empty where there is nothing to do."""

    def __new__(cls, code: int, meaning: str, remedy: str = "") -> Exit:
        """Make a member from its line below: code, meaning, remedy."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.remedy = remedy
        return member

    OK = 0, "Done; of `join` and `relay`: left in good order."
    NOT_WELL = (
        1,
        "`farandole doctor` found what keeps a node from working.",
        "Do what it says behind `->`; each cause stands below.",
    )
    USAGE = 2, "Wrong options or arguments.", "`--help` behind the command lists them, with examples."
    BAD_INPUT = (
        3,
        "A manifest, an invite, a run file, a settings file or a scenario is not valid.",
        "The message names the line or the field, and what would be right. Of an invite: copy the whole line again.",
    )
    NO_NODE = (
        4,
        "No node runs in this home folder, or it does not answer.",
        "Start it (`farandole join`), or name its folder with `--home`. If one runs and is silent, see its log.",
    )
    CANNOT_JOIN = (
        5,
        "The node could not join; the last lines say which step failed and what to do.",
        "`farandole doctor INVITE` finds out why; ask for a newer invite: any member can make one.",
    )
    HOME_IN_USE = (
        6,
        "Another node holds this home's key.",
        "`farandole leave` ends it; or give this one a folder of its own with `--home`.",
    )
    TRAINER_FAILED = (
        7,
        "The trainer process cannot run here: device, memory, data.",
        "The last lines and the end of the log say what it lacks: `--device cpu`, a smaller `--microbatch`, `--data`.",
    )
    VERDICT_FAILED = (
        8,
        "The testnet ran, and its verdict is not a pass; or `run audit` found a round that is not as its author says.",
        "Of the testnet, the reasons stand above the verdict and in report.json; each node's log is beside it.",
    )
    INTERRUPTED = (
        130,
        "Ctrl-C before the command was through, or a node that was told to leave a second time.",
        "Nothing is lost but what was not saved: do it again.",
    )

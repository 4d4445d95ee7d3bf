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

    OK = 0, "Done; of `join` and `relay`: left cleanly."
    NOT_WELL = (
        1,
        "`farandole doctor` found a fault that keeps a node from working; or `run plan` found no settings that fit; or "
        "a defect of farandole (a traceback).",
        "Doctor: follow the remedy after each `->`. Plan: take a smaller model, or members with more memory or a "
        "faster line. A traceback: report it.",
    )
    USAGE = 2, "Wrong options or arguments.", "Run the command with `--help`."
    BAD_INPUT = (
        3,
        "The command cannot work with what it was given or found: an invite, a manifest, a run file, a settings file "
        "or a scenario that is not valid; a file that is there already; or no run, round or checkpoint yet.",
        "The message says which, and what to do. For an invite, copy the whole line again.",
    )
    NO_NODE = (
        4,
        "No node runs with this data directory, or it does not answer.",
        "Start it (`farandole join`), or name its data directory with `--home`. If it runs, see the end of its `log`.",
    )
    CANNOT_JOIN = (
        5,
        "The node could not join; the last lines say which step failed and what to do.",
        "Run `farandole doctor INVITE` to find the reason. If the invite is old, any member can make a newer one.",
    )
    HOME_IN_USE = (
        6,
        "Another node runs with this data directory.",
        "`farandole leave` ends it. To run both, give this one its own data directory with `--home`.",
    )
    TRAINER_FAILED = (
        7,
        "The trainer process cannot run here: device, memory, data.",
        "The last lines give the reason. Often `--device cpu` or another `--data` helps.",
    )
    VERDICT_FAILED = (
        8,
        "The testnet ran, and its verdict is not a pass.",
        "See the reasons in report.json, and the nodes' logs next to it.",
    )
    INTERRUPTED = (
        130,
        "Ctrl-C before the command had finished, a second request to leave while a node was leaving, or the answer to "
        "a question was no.",
        "Run the command again. A node loses only the training since its last checkpoint.",
    )

"""The catalogue of what can be wrong, made of the code itself: ``docs/errors.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ...base.exits import Exit
from ..doctor.causes import CAUSES, CHECKS, check_of
from .reference import table

_HEAD: Final = """\
# What can be wrong, and what to do

Every exit code of farandole, and everything that `farandole doctor` can find, with its remedy. Made by
`make reference`; do not edit it by hand.

The first line of `farandole status` says how a node that runs is; `farandole doctor INVITE` examines this machine, the
way to the run's members, and what they see of it. Codes and causes keep their names: scripts may rely on them.
"""
_DOCTOR: Final = """\
## What the doctor finds

`failed` must be mended before a node works; with `warning` it works, but less well than it could; `skipped` says that
there was nothing to look at. `farandole doctor --json` gives the names of causes. What stands *so* is filled in.
"""
_FIELD: Final = re.compile(r"\{(\w+)[^}]*\}")


def catalogue() -> Iterator[str]:
    """The page, in paragraphs."""
    yield _HEAD
    exits = ((str(code.value), code.name, code.meaning, code.remedy) for code in Exit)
    yield "## Exit codes\n"
    yield table("| code | name | meaning | what to do |", exits) + "\n"
    yield _DOCTOR
    for check, about in CHECKS.items():
        yield f"### {check}: {about}\n"
        rows = (
            (f"`{name}`", cause.level, _fields(cause.found), _fields(cause.remedy))
            for name, cause in CAUSES.items()
            if check_of(name) == check
        )
        yield table("| cause | | it says | what to do |", rows) + "\n"


def _fields(text: str) -> str:
    """What is filled in, marked as such."""
    return _FIELD.sub(r"*\1*", text)

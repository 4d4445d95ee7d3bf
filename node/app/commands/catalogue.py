"""The catalogue of possible problems, generated from the code itself: ``docs/errors.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ...base.exits import Exit
from ..doctor.causes import CAUSES, CHECKS, check_of
from .markdown_table import table

_HEAD: Final = """\
# What can be wrong, and what to do

Every exit code of farandole, and everything that `farandole doctor` can find, with its remedy. Made by
`make reference`; do not edit it by hand.

The first line of `farandole status` shows the state of a running node; `farandole doctor INVITE` examines this machine,
the way to the run's members, and what they see of it. Exit codes and names of causes are stable: scripts may rely on
them.
"""
_DOCTOR: Final = """\
## What the doctor finds

The report shows failures first, then warnings, each with its remedy, and one line with the checks that passed. Its
last line lists the checks that were skipped, and why; `--verbose` shows a line for every check. Fix each `failed`
first: the node does not work until then. With a `warning` it works, but not as well as it could. `farandole doctor
--json` gives all findings with the names of their causes. Words *in italics* are filled in.
"""
_FIELD: Final = re.compile(r"\{(\w+)[^}]*\}")


def catalogue() -> Iterator[str]:
    """Yield the page, in paragraphs."""
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
    """Return the text with its placeholders set in italics."""
    return _FIELD.sub(r"*\1*", text)

"""The doctor's findings: the schema of ``farandole doctor --json``, whose fields are only added to."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A node works, but less well than it could, or the check could not decide."""
    FAILED = "failed"
    """A node cannot work before this is fixed."""
    SKIPPED = "skipped"
    """There was nothing to check, or no way to check it."""


class Finding(msgspec.Struct, frozen=True):
    """One result of one check."""

    check: str
    """Such as ``key``."""
    cause: str
    """Such as ``key-readable-by-others``: a name for scripts, of `farandole.node.app.doctor.causes`."""
    level: Level
    found: str
    """The result in a line for people."""
    remedy: str = ""
    """What to do about it, in a line; empty where there is nothing to do."""


class Diagnosis(msgspec.Struct, frozen=True):
    """The findings of all checks, in the order in which a node needs the checked things."""

    findings: tuple[Finding, ...]
    is_well: bool
    """Nothing failed."""
    schema: int = 1


def conclude(findings: Iterable[Finding]) -> Diagnosis:
    """Make a diagnosis of all findings."""
    found = tuple(findings)
    return Diagnosis(found, all(finding.level is not Level.FAILED for finding in found))

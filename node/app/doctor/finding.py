"""What the doctor says: the schema of ``farandole doctor --json``, which only ever gains fields."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """A node works, but less well than it could, or it cannot be told."""
    FAILED = "failed"
    """A node cannot work before this is mended."""
    SKIPPED = "skipped"
    """There was nothing to look at, or no way to."""


class Finding(msgspec.Struct, frozen=True):
    """One result of one check."""

    check: str
    """Such as ``key``."""
    cause: str
    """Such as ``key-readable-by-others``: a name for scripts, of `farandole.node.app.doctor.causes`."""
    level: Level
    found: str
    """What was found, in a line for people."""
    remedy: str = ""
    """What to do about it, in a line; empty where there is nothing to do."""


class Diagnosis(msgspec.Struct, frozen=True):
    """All findings, in the order in which a node needs what they are about."""

    findings: tuple[Finding, ...]
    is_well: bool
    """Nothing failed."""
    schema: int = 1


def conclude(findings: Iterable[Finding]) -> Diagnosis:
    """The whole of what was found."""
    found = tuple(findings)
    return Diagnosis(found, all(finding.level is not Level.FAILED for finding in found))

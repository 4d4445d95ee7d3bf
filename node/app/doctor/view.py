"""A diagnosis on the terminal: failures first, then warnings, then what passed, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from .causes import Diagnosis, Finding, Level

_STYLES = {Level.FAILED: "bold red", Level.WARNING: "yellow", Level.OK: "green", Level.SKIPPED: "dim"}
"""The levels in the order of the report."""


def diagnosis_screen(diagnosis: Diagnosis, *, is_verbose: bool = False) -> RenderableType:
    """Return a line for each failure and warning with its remedy, one line for all checks that passed, and the verdict.

    ``is_verbose``: a line for each finding.
    """
    by_level = {level: [each for each in diagnosis.findings if each.level is level] for level in _STYLES}
    table = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for level in _STYLES if is_verbose else (Level.FAILED, Level.WARNING):
        for finding in by_level[level]:
            table.add_row(finding.check, Text(level, _STYLES[level]), _what(finding))
    others = _checks(each for each in diagnosis.findings if each.level is not Level.OK)
    passed = [check for check in _checks(by_level[Level.OK]) if check not in others]
    parts: list[RenderableType] = [table] if table.row_count else []
    if passed and not is_verbose:
        parts.append(Text(f"{_number(passed)} passed: {', '.join(passed)}"))
    return Group(*parts, _verdict(by_level))


def _verdict(by_level: dict[Level, list[Finding]]) -> Text:
    """Return the last line: what failed, and what was not examined and why."""
    failed, warned = _checks(by_level[Level.FAILED]), _checks(by_level[Level.WARNING])
    if failed:
        verdict = Text(f"{_number(failed)} failed: {', '.join(failed)}", _STYLES[Level.FAILED])
    elif warned or by_level[Level.SKIPPED]:
        verdict = Text("no check failed", _STYLES[Level.OK])
    else:
        verdict = Text("all checks passed", _STYLES[Level.OK])
    reasons: dict[str, list[Finding]] = {}
    for finding in by_level[Level.SKIPPED]:
        reasons.setdefault(finding.found, []).append(finding)
    if reasons:
        skipped = (f"{', '.join(_checks(findings))} ({_why(findings)})" for findings in reasons.values())
        verdict.append(f"; not examined: {'; '.join(skipped)}", "not bold default")
    return verdict


def _why(findings: Sequence[Finding]) -> str:
    """Return why checks were skipped, all for one reason, and what to do about it."""
    remedy = next((finding.remedy for finding in findings if finding.remedy), "")
    return f"{findings[0].found}: {remedy}" if remedy else findings[0].found


def _checks(findings: Iterable[Finding]) -> list[str]:
    return list(dict.fromkeys(finding.check for finding in findings))


def _number(checks: Sequence[str]) -> str:
    return "1 check" if len(checks) == 1 else f"{len(checks)} checks"


def _what(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.remedy and finding.level is not Level.OK:
        text.append(f"\n-> {finding.remedy}", "italic")
    return text

"""How a diagnosis looks at the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from .finding import Diagnosis, Finding, Level

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "bold red", Level.SKIPPED: "dim"}


def diagnosis_screen(diagnosis: Diagnosis) -> RenderableType:
    """A line for each finding with its remedy below it, and the sum of it all."""
    table = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for finding in diagnosis.findings:
        table.add_row(finding.check, Text(finding.level, _STYLES[finding.level]), _what(finding))
    failed = [finding.check for finding in diagnosis.findings if finding.level is Level.FAILED]
    if failed:
        end = Text(f"to be mended: {', '.join(dict.fromkeys(failed))}", _STYLES[Level.FAILED])
    else:
        end = Text("nothing stands in the way", _STYLES[Level.OK])
    return Group(table, "", end)


def _what(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.remedy and finding.level is not Level.OK:
        text.append(f"\n-> {finding.remedy}", "italic")
    return text

"""The documents of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
# Some pages are generated from the code's own texts, or written by commands; their links and commands are checked too.
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))

"""`make reference` has been run: docs/reference.md, docs/errors.md and figures of docs/faq.md match the code."""

from __future__ import annotations

import runpy
from pathlib import Path

from farandole.node.base.causes import CAUSES
from farandole.node.base.config.file import SETTINGS
from farandole.node.base.errors import Exit

DOCS = Path(__file__).parents[3] / "docs"
PAGES = runpy.run_path(str(DOCS / "reference.py"))
UPDATED = runpy.run_path(str(DOCS / "figures.py"))["updated"]


def test_the_reference_is_up_to_date() -> None:
    text = PAGES["reference"]()
    assert text == (DOCS / "reference.md").read_text(), "make reference"
    for heading in ("join", "run create", "config show", "testnet run"):
        assert f"\n## farandole {heading}\n" in text
    assert all(f"\n| `{setting.name}` |" in text for setting in SETTINGS if not setting.is_hidden)
    assert all(f"`{variable}`" in text for variable in ("FARANDOLE_HOME", "FARANDOLE_CONFIG"))


def test_the_catalogue_of_errors_is_up_to_date() -> None:
    text = PAGES["catalogue"]()
    assert text == (DOCS / "errors.md").read_text(), "make reference"
    assert all(f"| {code.value} | {code.name} | " in text for code in Exit)
    assert all(meaning and (remedy or code is Exit.OK) for code, (meaning, remedy) in PAGES["EXITS"].items())
    assert all(f"\n| `{name}` | {level} |" in text for name, (level, _, remedy) in CAUSES.items() if remedy)
    assert "{" not in text


def test_figures_of_traffic_are_up_to_date() -> None:
    page = (DOCS / "faq.md").read_text()
    assert UPDATED(page) == page, "make reference"
    assert UPDATED(page.replace("MB", "pounds")).replace("pounds", "MB") == page, "nothing else is replaced"

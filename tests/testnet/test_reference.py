"""docs/reference.md says what the commands say; `make reference` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.node.config.file import SETTINGS
from farandole.node.exits import Exit
from farandole.testnet.cli import main


def test_the_reference_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reference"])
    text = capsys.readouterr().out
    kept = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    assert text == kept, "make reference"
    for heading in ("join", "run create", "config show", "testnet run"):
        assert f"\n## farandole {heading}\n" in text
    assert all(f"\n| `{setting.name}` |" in text for setting in SETTINGS)
    assert all(f"\n| {code.value} | {code.name} |" in text for code in Exit)

"""What only Linux has is used in few places, each of which does without it on macOS.

Names of modules are checked by ``make lint-platforms``, where mypy takes the part of macOS.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
FOLDERS: Final = ("/proc", "/sys", "/var")
ALLOWED: Final = {
    "node/trainer/channel.py": "on Linux; elsewhere shared memory has a name",
    "node/base/system/processes.py": "where there is none, nothing is known",
    "training/base/determinism.py": "where there is none, other words name the processor",
}


def test_files_that_only_linux_has_are_read_where_that_is_known() -> None:
    found = set()
    for package in ("node", "protocol", "training"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match item:
                    case ast.Constant(value=str(text)) if (
                        text.partition(" ")[0].startswith(tuple(f"{folder}/" for folder in FOLDERS)) or text in FOLDERS
                    ):
                        found.add(path.relative_to(ROOT).as_posix())
    assert sorted(found - set(ALLOWED)) == []
    assert sorted(set(ALLOWED) - found) == [], "no longer used: take it off the list"

"""The shells complete commands, options and choices, by the script of `farandole --show-completion`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("farandole")


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("farandole jo", ["join"]),
        ("farandole testnet compa", ["compare"]),
        ("farandole join --log-level w", ["warning"]),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None or not PROGRAM.exists(), reason="needs bash, and farandole installed")
def test_bash_completes(line: str, completed: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("a wrong file, which is not looked at")
    *words, last = line.split(" ")
    script = (
        'eval "$(_FARANDOLE_COMPLETE=source_bash farandole)"\n'
        f"COMP_WORDS=({' '.join([*words, repr(last)])}); COMP_CWORD={len(words)}\n"
        '_farandole_completion farandole; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    result = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "FARANDOLE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (result.stdout.split(), result.stderr) == (completed, "")

"""Changes of the code as pages show them: ``diff`` blocks without line numbers, since the code moves.

    --- training/outer/codec.py
    +++ training/outer/codec.py
         "fp16": _Plain("fp16", torch.float16, MAX_FP16),
    +    "fp8": _Plain("fp8", torch.float8_e4m3fn, 448.0),
    @@
    ...

The lines of a hunk that are in the file now must occur there exactly once, so an outdated page fails.
"""

from __future__ import annotations

import re
from pathlib import Path

_HEAD = re.compile(r"--- (?P<old>\S+)\n\+\+\+ (?P<new>\S+)\n(?P<hunks>.*)", re.DOTALL)


def apply(change: str, folder: Path) -> None:
    """Apply a change to one file below the folder; ``--- /dev/null`` makes a new file."""
    head = _HEAD.fullmatch(change)
    assert head, f"begins with --- and +++, a file's name behind each:\n{change}"
    path = folder / head["new"]
    text = "" if head["old"] == "/dev/null" else path.read_text()
    for hunk in head["hunks"].split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        assert all(line[0] in " +-\n" for line in lines), hunk
        old = "".join(line[1:] or line for line in lines if line[0] != "+")
        new = "".join(line[1:] or line for line in lines if line[0] != "-")
        if head["old"] != "/dev/null":
            assert text.count(old) == 1, f"{path} has {text.count(old)} times:\n{old}"
        text = text.replace(old, new) if old else new
    path.write_text(text)

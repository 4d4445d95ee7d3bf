"""The example that teaches NoLoCo runs, and averaging keeps its replicas close to each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "noloco_in_200_lines.py"


def test_noloco_in_200_lines_keeps_replicas_closer_than_training_alone() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 200
    command = [sys.executable, str(EXAMPLE), "--rounds", "8", "--inner-steps", "4"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spreads = {name: float(share) for name, share in re.findall(r"^(\w+) +held-out.* ([\d.]+)% apart$", printed, re.M)}
    assert spreads["NoLoCo"] < spreads["alone"]
    exchanges = re.search(r"^(\d+) of 32 outer steps had a partner", printed, re.M)
    assert exchanges is not None
    assert int(exchanges[1]) >= 16, "a volunteer goes alone only when the others are done"

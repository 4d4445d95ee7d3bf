"""A process returns the memory of past peaks."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PEAKS = """
import os, sys
from farandole.node.base.system.tuning import give_memory_back
from farandole.node.base.system.processes import resident_bytes

if sys.argv[1] == "back":
    give_memory_back()
bytearray(1_000_000)  # from which glibc learns
before = resident_bytes(os.getpid())
kept = []
for _ in range(40):
    large = [bytearray(900_000) for _ in range(4)]
    kept.append(bytearray(3_000))
    other = bytearray(700_000)
    del large
del other
print(resident_bytes(os.getpid()) - before)
"""

FREED_BETWEEN = """
import os, sys
from farandole.node.base.system.tuning import give_free_memory_back, keep_memory
from farandole.node.base.system.processes import resident_bytes

keep_memory()
before = resident_bytes(os.getpid())
kept = []
for _ in range(40):
    large = bytearray(1_000_000)
    kept += [large, bytearray(3_000)]
kept = kept[1::2]
del large
if sys.argv[1] == "back":
    give_free_memory_back()
print(resident_bytes(os.getpid()) - before)
"""
ONLY_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told")


@ONLY_GLIBC
@pytest.mark.parametrize("program", [PEAKS, FREED_BETWEEN])
def test_memory_is_given_back(program: str) -> None:
    def grown(how: str) -> int:
        told = subprocess.run(
            [sys.executable, "-c", program, how], capture_output=True, text=True, check=True, timeout=60
        )
        return int(told.stdout)

    assert grown("back") < 1_000_000 < grown("as ever")

"""Timeouts of tests."""

from __future__ import annotations

from typing import Final

# Seconds for anything that should happen soon: only a hang takes longer, even on a very busy machine.
PATIENCE: Final = 300.0

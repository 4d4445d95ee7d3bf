"""How long tests wait."""

from __future__ import annotations

from typing import Final

# For what should happen soon, in seconds: a hang takes longer, and nothing else does, on a machine as busy as can be.
PATIENCE: Final = 300.0

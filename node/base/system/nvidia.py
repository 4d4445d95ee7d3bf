"""Whether an NVIDIA GPU's driver is here: known without asking it, which takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# Linux's driver makes the first; in WSL2, Windows' driver brings the second, and there is no device of that name.
_PLACES: Final = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))


def has_nvidia_driver() -> bool:
    """Return whether the driver of an NVIDIA GPU is here."""
    return any(place.exists() for place in _PLACES)

"""Virtual environments for the projects that farandole is compared with: built once, kept in a cache folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .process import BenchError, Say

# Most of it is for torch.
INSTALL_TIMEOUT: Final = 1_200.0
MAX_REASON_CHARS: Final = 500

REQUIREMENTS: Final = {
    # Its 8-bit averaging changes nothing with later numpy. Without a pinned torch, pip fetches gigabytes of CUDA.
    "hivemind": ("hivemind==1.1.12", "numpy==2.2.6", "torch==2.13.0"),
    "lattica": ("lattica==1.0.21", "numpy==2.2.6"),
}


def obtain_python(name: str, cache: Path, say: Say) -> Path:
    """Return the interpreter of a project's environment; install it if needed. `BenchError` if that fails."""
    folder = cache.absolute() / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    requirements = REQUIREMENTS[name]
    if not stamp.exists() or stamp.read_text() != "\n".join(requirements):
        say(f"installing {requirements[0]} into {folder}, once")
        folder.mkdir(parents=True, exist_ok=True)
        _run(name, [sys.executable, "-m", "venv", "--clear", str(folder)])
        _run(name, [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
        stamp.write_text("\n".join(requirements))
    return python


def _run(name: str, command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT)
    except subprocess.CalledProcessError as error:
        raise BenchError(f"{name} could not be installed: {error.stderr.strip()[-MAX_REASON_CHARS:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{name} could not be installed: {error}") from error

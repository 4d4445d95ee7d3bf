"""Records which files of farandole run on a walk: below the functions that carry one thing from here to there.

Run by Python if PYTHONPATH has the folder. ``FARANDOLE_WALKS`` names a folder: its ``walks.json`` has each walk's
functions, ``{walk: [[file, qualified name], ...]}``; recording begins once there is a file ``begin``, and each process
writes ``WALK-PID.txt``, the files in the order in which they first ran.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any


class Recorder:
    """Counts, for each thread, how many frames of a walk's functions are on its stack."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        walks: dict[str, list[list[str]]] = json.loads((folder / "walks.json").read_text())
        self._walk_of = {(file, name): walk for walk, functions in walks.items() for file, name in functions}
        self._seen: dict[str, list[str]] = {walk: [] for walk in walks}
        self._thread = threading.local()
        self._sources: dict[str, str] = {}

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the frame's file in each walk under way; an awaited function returns and is called again."""
        if event not in ("call", "return"):
            return
        depths: dict[str, int] = self._thread.__dict__.setdefault("depths", {})
        source = self._source(frame.f_code.co_filename)
        walk = self._walk_of.get((source, frame.f_code.co_qualname)) if source else None
        if walk is not None and (walk in depths or (self._folder / "begin").exists()):
            depths[walk] = max(0, depths.get(walk, 0) + (1 if event == "call" else -1))
        if source and event == "call":
            for each, depth in depths.items():
                if depth > 0 and source not in self._seen[each]:
                    self._seen[each].append(source)
                    (self._folder / f"{each}-{os.getpid()}.txt").write_text("\n".join(self._seen[each]))

    def _source(self, path: str) -> str:
        """Return a file's path in the package, or "" for others' code."""
        if path not in self._sources:
            self._sources[path] = path.rpartition("/src/farandole/")[2] if "/src/farandole/" in path else ""
        return self._sources[path]


if "FARANDOLE_WALKS" in os.environ:
    recorder = Recorder(Path(os.environ["FARANDOLE_WALKS"]))
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)

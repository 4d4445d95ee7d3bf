"""The kept corpus: for each decoder the inputs that together reach most of its code and all its refusals."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from .decoders import DECODERS, Decoder

CORPUS = Path(__file__).parent / "corpus"
# Limits for one decoder. Longer inputs, or more of them, add little.
MAX_INPUTS, MAX_INPUT_BYTES = 20, 1_024
MAX_CORPUS_BYTES = 300_000


def read(name: str) -> list[bytes]:
    """Return the kept inputs of a decoder: a line of hexadecimal digits each."""
    path = CORPUS / f"{name}.hex"
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []


def verdict_on(decoder: Decoder, data: bytes) -> str:
    """Return a decoder's result for an input, without numbers and names. Any error but its refusals is raised."""
    try:
        decoder.decode(data)
    except decoder.refusal as error:
        return re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "#", f"{type(error).__name__}: {error}")[:200]
    return "accepted"


def features(decoder: Decoder, data: bytes) -> set[object]:
    """Return the verdict, and the lines of farandole that were run."""
    lines: set[object] = set()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        code: CodeType = frame.f_code
        if "/protocol/" not in code.co_filename and "/node/" not in code.co_filename:
            return None
        if event == "line":
            lines.add((code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        verdict = verdict_on(decoder, data)
    finally:
        sys.settrace(before)
    return lines | {verdict}


def keep(name: str, found: Iterable[bytes]) -> int:
    """Keep inputs that reach something new, the shortest first; return the number of bytes now kept."""
    decoder = DECODERS[name]
    reached: set[object] = set()
    kept: list[bytes] = []
    for data in sorted({*read(name), *decoder.seeds, *found}, key=lambda data: (len(data), data)):
        if len(kept) < MAX_INPUTS and len(data) <= MAX_INPUT_BYTES and not (new := features(decoder, data)) <= reached:
            reached |= new
            kept.append(data)
    (CORPUS / f"{name}.hex").write_text("".join(f"{data.hex()}\n" for data in kept))
    return sum(map(len, kept))

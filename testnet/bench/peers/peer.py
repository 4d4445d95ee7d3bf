"""Another project's peer in the benchmark: a script for a virtual environment that has that project and not farandole.

``peer.py NAME PIPE``: the class ``Peer`` of ``NAME.py``, next to this file, answers requests on the pipe with that
descriptor; times are of `time.monotonic`, which processes of one machine share.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_ERROR_CHARS = 300  # some errors bring their stack


def vector(index: int, num_elements: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a peer's initial vector: (n,) fp32."""
    return np.random.default_rng(index).standard_normal(num_elements, dtype=np.float32)


def serve(descriptor: int, peer: object) -> None:
    """Answer requests until the other end closes."""
    with Connection(descriptor) as control, contextlib.suppress(EOFError):
        while True:
            request = control.recv()
            try:
                act: Callable[..., dict[str, Any] | None] = getattr(peer, request.pop("do"))
                answer = act(**request)
            except Exception as error:  # the benchmark shows any error, and continues
                answer = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
            control.send(answer or {})


if __name__ == "__main__":
    name, control = sys.argv[1:]
    made = runpy.run_path(str(Path(__file__).with_name(f"{name}.py")))
    serve(int(control), made["Peer"](vector))

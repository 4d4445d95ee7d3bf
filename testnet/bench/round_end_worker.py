"""A trainer that ends rounds, and times each part of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from farandole.node.base.system.tuning import TRAINING_NICENESS, lower_priority
from farandole.protocol.run.manifest import manifest_from_dict
from farandole.training.engine.learner import Learner, build_learner
from farandole.training.screening.rule import Encounter

from .meter import memory_mb
from .server import Server

RUN_ID: Final = bytes(32)
# A partner that the guard has not met before, and of whose contribution it asks for the losses.
_PARTNER: Final = Encounter(b"partner".ljust(32), own_tokens=1, partner_tokens=1, chance=0.0)
Result = TypeVar("Result")


class RoundEndTrainer:
    """One engine; call `begin` first, once."""

    _learner: Learner

    def __init__(self, server: Server) -> None:
        lower_priority(TRAINING_NICENESS)
        self._seconds: dict[str, float] = {}

    def begin(self, manifest: dict[str, Any], device: str, path: str) -> dict[str, Any]:
        """Build the engine and take the first step, which allocates."""
        self._learner = build_learner(manifest_from_dict(manifest), run_id=RUN_ID, author=bytes(32), device=device)
        self._path = Path(path)
        self._learner.learn()
        self._outgoing, self._incoming = (bytearray(self._learner.round_end.contribution_bytes) for _ in range(2))
        for memory in (self._outgoing, self._incoming):
            self._learner.round_end.pin(memoryview(memory))
        return {
            "num_parameters": self._learner.checkpoint.layout.num_elements,
            "device": self._learner.device.description,
        }

    def play(self) -> dict[str, Any]:
        """End a round with a partner whose contribution equals this one; return each part's seconds, and the memory."""
        learner, self._seconds = self._learner, {}
        with self._timing("inner step"):
            learner.learn()
        size = self._time("encode", self._encode)
        incoming = memoryview(self._incoming)[:size]
        with self._timing("copy"):
            incoming[:] = memoryview(self._outgoing)[:size]
        self._time("decode", lambda: learner.round_end.take_in(incoming, size))
        self._time("judge", lambda: learner.round_end.screen(incoming, _PARTNER))
        self._time("outer step", lambda: learner.round_end.apply(incoming, _PARTNER))
        saved = self._time("save", lambda: learner.checkpoint.save(self._path))
        self._time("load", lambda: learner.checkpoint.load(self._path, saved.hashes))
        weights = learner.round_end.weights.flat.cpu()
        other = torch.empty_like(weights)
        other.fill_(0.0)  # its pages are mapped before the copy is timed
        self._time("copy of the weights", lambda: other.copy_(weights))
        memory = memory_mb("VmHWM")
        return {
            "seconds": self._seconds,
            "contribution_bytes": size,
            "checkpoint_bytes": self._path.stat().st_size,
            "peak_mb": memory,
        }

    def _encode(self) -> int:
        size = self._learner.round_end.contribution()
        self._learner.round_end.encode(memoryview(self._outgoing)[:size])
        return size

    def _time(self, part: str, call: Callable[[], Result]) -> Result:
        with self._timing(part):
            return call()

    @contextmanager
    def _timing(self, part: str) -> Iterator[None]:
        began_at = time.perf_counter()
        yield
        if self._learner.device.torch_device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds[part] = time.perf_counter() - began_at

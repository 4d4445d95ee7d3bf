"""One hivemind peer of the benchmark, served by ``peer.py``: two average by `DecentralizedAverager`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import NoCompression, Uniform8BitQuantization

if TYPE_CHECKING:
    from collections.abc import Callable

COMPRESSIONS = {"fp32": NoCompression, "8-bit": Uniform8BitQuantization}
# A group of two is complete as soon as both have met; this limits how long a peer listens for more.
MATCHMAKING_SECONDS, REQUEST_SECONDS = 2.0, 1.5
STEP_TIMEOUT = 60.0
POLL_INTERVAL = 0.001  # a step's stage has no event, so poll it


class Peer:
    """Holds the ``index``-th of two vectors and averages it with the other peer's."""

    def __init__(self, vector: Callable[[int, int], np.ndarray[Any, np.dtype[np.float32]]]) -> None:
        self._vector = vector
        self._averagers: dict[str, Any] = {}
        self._step: Any = None

    def open(self, index: int, num_elements: int, peers: list[str]) -> dict[str, Any]:
        """Join the other peer, if there is one yet."""
        self._index = index
        dht = DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
        for name, compression in COMPRESSIONS.items():
            self._averagers[name] = DecentralizedAverager(
                [torch.empty(num_elements)],
                dht,
                start=True,
                prefix=name.replace("-", ""),
                target_group_size=2,
                min_matchmaking_time=MATCHMAKING_SECONDS,
                request_timeout=REQUEST_SECONDS,
                compression=compression(),
            )
        return {"addresses": [str(address) for address in dht.get_visible_maddrs()]}

    def find(self, codec: str) -> None:
        """Set the vector, and find the other peer."""
        averager = self._averagers[codec]
        with averager.get_tensors() as (tensor,):
            tensor.copy_(torch.from_numpy(self._vector(self._index, tensor.numel())))
        self._step = averager.step(wait=False, require_trigger=True, timeout=STEP_TIMEOUT)
        while self._step.stage != AveragingStage.AWAITING_TRIGGER:
            if self._step.done():
                self._step.result()
            time.sleep(POLL_INTERVAL)

    def average(self) -> dict[str, Any]:
        """Run the all-reduce itself."""
        started_at = time.monotonic()
        self._step.allow_allreduce()
        self._step.result(STEP_TIMEOUT)
        return {"started_at": started_at, "ended_at": time.monotonic()}

    def join(self) -> dict[str, Any]:
        """Load the other peer's state, as a newcomer does."""
        averager = self._averagers["fp32"]
        started_at = time.monotonic()
        if averager.load_state_from_peers(timeout=STEP_TIMEOUT) is None:
            raise ConnectionError("nobody gave its state")
        return {"started_at": started_at, "ended_at": time.monotonic()}

    def check(self, codec: str) -> dict[str, Any]:
        """Return the vector's distance from the mean of both: 8-bit averaging may succeed and change nothing."""
        with self._averagers[codec].get_tensors() as (tensor,):
            mean = (self._vector(0, tensor.numel()) + self._vector(1, tensor.numel())) / 2
            return {"rms_error": float(np.sqrt(np.square(tensor.numpy() - mean).mean()))}

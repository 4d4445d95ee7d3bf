"""A trainer process of the benchmark: encodes its vector for the mesh process, decodes the partner's, averages.

It does so either before and after the exchange, on request, or during it, as a daemon's trainer does: with a replica of
one parameter whose new slow weights are the mean.
"""

from __future__ import annotations

import socket
import time
from functools import partial
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from farandole.node.base.system.memory import SharedCounter
from farandole.node.base.system.tuning import keep_memory
from farandole.node.trainer.channel import TrainerSocket
from farandole.node.trainer_process.process import LOOK_INTERVAL
from farandole.protocol.run.outer_rules import Codec, NoLoCoConfig
from farandole.protocol.run.screening_rules import GuardConfig, SimilarityConfig
from farandole.protocol.run.vectors import SLOW
from farandole.protocol.trainer import trainer_messages as messages
from farandole.training.base.device import choose_device
from farandole.training.engine.replica import Recipe, Replica
from farandole.training.outer.codec import decode, encode, encoded_size
from farandole.training.screening.rule import Refuse

from .peer import vector
from .server import Server, map_payload


class BenchTrainer:
    """Holds the ``index``-th of two vectors."""

    def __init__(self, server: Server, outgoing: int, incoming: int, link: int) -> None:
        self._channel = TrainerSocket(socket.socket(fileno=link))
        self._outgoing, self._incoming = map_payload(outgoing), map_payload(incoming)
        self._vector = torch.empty(0)
        self._mean = torch.empty(0)
        self._common = torch.empty(0)
        self._replica: Replica | None = None

    def begin(self, index: int, num_elements: int) -> dict[str, Any]:
        """Draw fresh vectors; both trainers share the machine, so each has one thread."""
        torch.set_num_threads(1)
        keep_memory()
        self._vector = random_vector(index, num_elements)
        self._common = random_vector(2, num_elements)
        self._mean = (random_vector(0, num_elements) + random_vector(1, num_elements)) / 2
        return {}

    def contribute(self, codec: str) -> dict[str, Any]:
        """Encode, and hash for the offer."""
        started_at = time.monotonic()
        size = encode(codec, self._vector, self._outgoing)
        digest = blake3(self._outgoing[:size]).hexdigest()
        return {"started_at": started_at, "ended_at": time.monotonic(), "size": size, "digest": digest}

    def average(self, codec: str) -> dict[str, Any]:
        """Decode and average; return the distance from the mean of both vectors."""
        started_at = time.monotonic()
        size = encoded_size(codec, len(self._vector))
        mean = decode(codec, self._incoming[:size], len(self._vector)).add_(self._vector).mul_(0.5)
        ended_at = time.monotonic()
        error = float((mean - self._mean).square().mean().sqrt())
        return {"started_at": started_at, "ended_at": ended_at, "rms_error": error}

    def learn(self, codec: Codec, is_guarded: bool) -> dict[str, Any]:
        """Prepare the end of a round's inner steps, which both began with the same weights.

        No loss is known here, so the guard judges by distance alone.
        """
        self._replica = None  # there is memory for one
        module = nn.Module()
        module.register_parameter("vector", nn.Parameter(self._vector + self._common))
        outer = NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0, codec=codec)
        device = choose_device("cpu")
        recipe = Recipe(outer=outer, screening=GuardConfig() if is_guarded else SimilarityConfig())
        self._replica = Replica(module, recipe, run_id=bytes(32), device=device)
        self._replica.checkpoint.vectors()[SLOW].copy_(self._common)
        self._replica.round_end.count_step(1)  # the guard's yardstick is what inner steps have moved
        return {}

    def take_round(self, is_first: bool) -> dict[str, Any]:
        """Contribute, receive, screen and average, on the mesh process's commands."""
        replica, channel = self._replica, self._channel
        assert replica is not None, "it has learned"
        started_at = time.monotonic()
        encoded, arrived = SharedCounter(self._outgoing), SharedCounter(self._incoming)
        encoded.store(0, 0)
        taken = arrived.read()
        channel.send(messages.Contributed(0, replica.round_end.contribution_bytes, 1, 1, 1, 1, 1, 0.0, 0.0, 0, 1.0))

        size, digest = replica.round_end.contribute(self._outgoing, progress=partial(encoded.store, 0))
        channel.send(messages.Encoded(0, digest))
        while True:
            if (now := arrived.read()) != taken:
                taken = now
                replica.round_end.take_in(self._incoming[:size], now.value)
            match channel.poll(LOOK_INTERVAL):
                case messages.Screen():
                    verdict = replica.round_end.screen(self._incoming[:size])
                    channel.send(messages.Screened(verdict.reason if isinstance(verdict, Refuse) else ""))
                case messages.TakeOuterStep():
                    averaging_at = time.monotonic()
                    replica.round_end.apply(self._incoming[:size], own_first=is_first)
                    break
        ended_at = time.monotonic()
        channel.send(messages.OuterStepTaken(0))
        error = float((replica.round_end.slow_weights() - self._common - self._mean).square().mean().sqrt())
        return {
            "started_at": started_at,
            "averaging_at": averaging_at,
            "ended_at": ended_at,
            "size": size,
            "rms_error": error,
        }


def random_vector(index: int, num_elements: int) -> Tensor:
    """Return (n,) fp32, the same initial vector as the other projects' peers have."""
    return torch.from_numpy(vector(index, num_elements))

"""Text from a model in stages, over streams between threads; between nodes in `tests/node/store/test_own_model.py`."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from farandole.node.inspect import remote_stages
from farandole.node.inspect.remote_stages import LaterStages, answer
from farandole.node.programs.stream import MeshError, MeshStream
from farandole.protocol.run.manifest import Manifest
from farandole.training.base.device import choose_device
from farandole.training.model.generation import generate
from farandole.training.model.model import build_model
from farandole.training.model.sampling import Sampling
from farandole.training.model.stages import build_stage

from ...patience import PATIENCE
from ..small_runs import TINY, small_manifest

CUT: Manifest = small_manifest(model=TINY | {"num_layers": 3, "num_stages": 3}, pipeline={"codec": "fp32"})
WIDTH = CUT.model.width
Serve = Callable[[MeshStream], object]


def honest(stage: int, note: Callable[[tuple[bool, int]], None] = lambda computed: None) -> Serve:
    module = build_stage(CUT.model, CUT.seed, stage)

    def compute(rows: Tensor, begins: bool) -> Tensor:
        note((begins, len(rows)))
        with torch.no_grad():
            return module.advance(rows[None])[0]

    return lambda stream: answer(stream, CUT, compute, threading.Lock())


class Streams(contextlib.ExitStack):
    """In place of a mesh: each member computes a stage, and is a function that is given the streams to it."""

    def __init__(self, members: dict[str, tuple[int, Serve]]) -> None:
        super().__init__()
        self._members = members
        self.asked: list[str] = []

    def notes(self, name: str) -> dict[str, bytes]:
        return {peer: str(stage).encode() for peer, (stage, _) in self._members.items()}

    def open(self, peer: str, name: str) -> MeshStream:
        self.asked.append(peer)
        ours, theirs = (MeshStream(end) for end in socket.socketpair())
        ours.peer = peer
        self.callback(ours.close)

        def serve() -> None:
            with contextlib.closing(theirs), contextlib.suppress(*remote_stages.FAULTS):
                self._members[peer][1](theirs)

        threading.Thread(target=serve, daemon=True).start()
        return ours


def text_of(module: torch.nn.Module) -> Iterator[int]:
    greedy, cpu = Sampling(0.0, 0, 0), choose_device("cpu")
    return islice(generate(module.eval(), b"what is it?", context=16, vocabulary=256, sampling=greedy, device=cpu), 12)


def text_by(streams: Any) -> Iterator[int]:
    first = build_stage(CUT.model, CUT.seed, 0)
    first.onward = LaterStages(CUT, streams)
    return text_of(first)


WHOLE = list(text_of(build_model(CUT.model, CUT.seed)))


def test_it_is_the_whole_models_text_and_a_stage_is_sent_what_is_new() -> None:
    """Beyond the context all positions are."""
    computed: list[tuple[bool, int]] = []
    with Streams({"bob": (1, honest(1)), "cyd": (2, honest(2, computed.append))}) as streams:
        assert list(text_by(streams)) == WHOLE
    assert streams.asked == ["bob", "cyd"]
    assert computed == [(True, 11), *((False, rows) for rows in range(12, 17)), *[(True, 16)] * 6]


def falls_silent(stream: MeshStream) -> None:
    while stream.receive() is not None:
        pass


def lies(stream: MeshStream) -> None:
    while (message := stream.receive()) is not None:
        stream.send(struct.pack("<f", float("nan")) * (len(message[5:]) // 4))


def leaves(stream: MeshStream) -> None:
    """After the prompt."""
    message = stream.receive() or b""
    rows = torch.frombuffer(bytearray(message[5:]), dtype=torch.float32).view(1, -1, WIDTH)
    stream.send(build_stage(CUT.model, CUT.seed, 1).advance(rows).detach().numpy().tobytes())


@pytest.mark.parametrize("bad", [falls_silent, lies, leaves])
def test_another_member_goes_on_where_one_fails(bad: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    if bad is falls_silent:
        monkeypatch.setattr(remote_stages, "ANSWER_SECONDS", 0.2)
    with Streams({"bad": (1, bad), "bob": (1, honest(1)), "cyd": (2, honest(2))}) as streams:
        assert list(text_by(streams)) == WHOLE
    assert streams.asked == (["bad", "cyd", "bob"] if bad is leaves else ["bad", "bob", "cyd"])


ROW = bytes(4 * WIDTH)


@pytest.mark.parametrize(
    "message",
    [
        *(b"", struct.pack("<?I", True, 0), struct.pack("<?I", True, 1), struct.pack("<?I", True, 2) + ROW),
        *(struct.pack("<?I", True, 17) + 17 * ROW, struct.pack("<?I", False, 16) + 16 * ROW, bytes(10_000)),
        struct.pack("<?I", True, 1) + struct.pack("<f", float("inf")) * WIDTH,
    ],
)
def test_what_is_no_row_ends_the_text_of_who_sends_it(message: bytes) -> None:
    with Streams({"bob": (1, honest(1))}) as streams:
        stream = streams.open("bob", "stage/1")
        stream.send(struct.pack("<?I", True, 1) + ROW)
        assert len(stream.receive(PATIENCE) or b"") == len(ROW)
        stream.send(message)
        with pytest.raises(MeshError):
            stream.receive(PATIENCE)

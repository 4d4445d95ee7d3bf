"""Text from a model in stages that no member has whole: what `farandole serve` does at a member of each stage.

A member of stage 0 makes the text: it has the embedding and the head, so tokens never leave it. Its activations pass
the other stages in turn, each at a member that computes its own for others. A stage keeps what it was given of a text,
so a further token costs one row there and back, as large as a token's activations are in training.

Whoever computes a stage may send anything: it must be finite, and is not judged further. Whoever asks costs time and
memory: a stage computes for one text at a time, and the number of texts, their rows and idle times have bounds.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from farandole.protocol.programs import MAX_MESSAGE_BYTES
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.wire.bounds import Latest
from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.errors import CodecError, TrainingError
from farandole.training.outer.codec import FORMS, decode, encode

from ..programs.mesh import Mesh
from ..programs.stream import MeshError, MeshStream

# The name at which a member is asked that computes its stage, and of its note, which has the stage's number.
NAME: Final = "stage/1"
# Texts of which a stage keeps the rows: one of 1,024 tokens at width 2,048 takes 8 MiB, and a member has 16 at most.
MAX_TEXTS: Final = 64
# A stage forgets a text after this time without a further token; its asker then sends all rows again.
IDLE_SECONDS: Final = 600.0
# For a stage's answer: a text of 1,024 tokens on a slow line and a slow machine. Then another member is asked.
ANSWER_SECONDS: Final = 60.0
# More members than compute a stage of one run.
MAX_FAILED: Final = 256
# Before rows: whether a text begins with them, and their number.
_HEAD: Final = struct.Struct("<?I")
# What goes wrong with one stream; `CodecError` is a ValueError, as that of a text which is too long for a message.
FAULTS: Final = (MeshError, TimeoutError, ValueError, struct.error)
Compute = Callable[[Tensor, bool], Tensor]  # see `farandole.node.inspect.loaded_model.LoadedModel.compute`


class LaterStages:
    """The stages after the first of one model, at other members. One thread at a time may use it."""

    def __init__(self, manifest: Manifest, mesh: Mesh) -> None:
        self._manifest = manifest
        self._mesh = mesh
        self._streams: dict[int, MeshStream] = {}
        self._tokens: list[int] = []
        """Those that all stages have had."""
        self._given: dict[int, Tensor] = {}
        """The rows (T, C) that each stage was given of them; the last one's results as if to another."""
        self._failures = Latest[str, int](MAX_FAILED)
        """Of members: those with fewer are asked first."""

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the last stage's (1, T, C) of tokens and the first's; raise `TrainingError` if one is silent."""
        given, had = tokens[0].tolist(), self._tokens
        num_new = 1 if had and given[:-1] == had else len(given)
        self._tokens = []  # until all stages have answered
        rows, end = x[0, -num_new:].float().cpu(), self._manifest.model.num_stages
        for stage in range(1, end + 1):
            self._given[stage] = rows if num_new == len(given) else torch.cat((self._given[stage], rows))
            rows = rows if stage == end else self._pass(stage, num_new)
        self._tokens = given
        return self._given[end][None].to(x.device)

    def _pass(self, stage: int, num_new: int) -> Tensor:
        """Return what a stage makes of the new rows, by the member that was asked last or else by another."""
        given, reasons = self._given[stage], list[str]()
        if (stream := self._streams.pop(stage, None)) is not None:
            try:
                return self._ask(stage, stream, given[-num_new:], begins=num_new == len(given))
            except FAULTS:
                self._failures[stream.peer] = self._failures.get(stream.peer, 0) + 1
        offering = (peer for peer, value in self._mesh.notes(NAME).items() if value == str(stage).encode())
        for peer in sorted(offering, key=lambda peer: self._failures.get(peer, 0)):
            try:
                return self._ask(stage, self._mesh.open(peer, NAME), given, begins=True)[-num_new:]
            except FAULTS as error:
                self._failures[peer] = self._failures.get(peer, 0) + 1
                reasons.append(f"{peer[-8:]}: {error or 'it is silent'}")
        raise TrainingError(
            f"nobody computes stage {stage} of this model ({'; '.join(reasons) or 'no member offers to'}): ask one "
            "that holds it to run `farandole serve`, and try again"
        )

    def _ask(self, stage: int, stream: MeshStream, rows: Tensor, *, begins: bool) -> Tensor:
        try:
            stream.send(_HEAD.pack(begins, len(rows)) + encoded(self._manifest, rows), ANSWER_SECONDS)
            made = decoded(self._manifest, stream.receive(ANSWER_SECONDS) or b"", len(rows))
        except BaseException:  # Ctrl-C too: the answer that is still to come is not the next one's
            stream.close()
            raise
        self._streams[stage] = stream
        return made


def encoded(manifest: Manifest, rows: Tensor) -> bytes:
    """Encode rows (t, C). Raises `CodecError` if they are not finite."""
    out = bytearray(FORMS[manifest.pipeline.codec].size(rows.numel()))
    encode(manifest.pipeline.codec, rows.flatten(), out)
    return bytes(out)


def decoded(manifest: Manifest, data: bytes, num_rows: int) -> Tensor:
    """Return rows (t, C) that another member has sent. Raises `CodecError` if they are fewer, more, or not finite."""
    return decode(manifest.pipeline.codec, data, num_rows * manifest.model.width).view(num_rows, -1)


def serve_stage(home: Path, stage: int, manifest: Manifest, compute: Compute) -> None:
    """Compute a node's stage for other members until Ctrl-C. Raises `FarandoleError`."""
    turn, places, broken = threading.Lock(), threading.Semaphore(MAX_TEXTS), list[FarandoleError]()

    def serve(stream: MeshStream) -> None:
        try:
            # A peer that is gone, silent or sends anything else ends its own text; a stage that moved ends all.
            with contextlib.suppress(*FAULTS), stream:
                answer(stream, manifest, compute, turn)
        except FarandoleError as error:
            broken.append(error)
            listener.close()
        finally:
            places.release()

    with Mesh(home=home) as mesh, mesh.listen(NAME) as listener:
        mesh.note(NAME, str(stage).encode())
        for stream in listener:
            if places.acquire(blocking=False):
                threading.Thread(target=serve, args=(stream,), name="farandole-stage", daemon=True).start()
            else:
                stream.close()
    raise (broken or [MeshError("the node has ended: start it again with `farandole join`, and then this")])[0]


def answer(stream: MeshStream, manifest: Manifest, compute: Compute, turn: threading.Lock) -> None:
    """Compute a stage for the texts of one stream until it ends; raise what is wrong with it."""
    width, context, num_kept = manifest.model.width, manifest.model.context, 0
    rows, most = torch.empty(context, width), _HEAD.size + FORMS[manifest.pipeline.codec].size(context * width)
    while (message := stream.receive(IDLE_SECONDS, min(most, MAX_MESSAGE_BYTES))) is not None:
        begins, num_rows = _HEAD.unpack_from(message)
        first = 0 if begins else num_kept
        if not 0 < num_rows <= context - first:
            raise CodecError(f"{num_rows} rows are none, or more than the model can see")
        num_kept = first + num_rows
        rows[first:num_kept] = decoded(manifest, message[_HEAD.size :], num_rows)
        with turn:
            made = compute(rows[:num_kept], begins)[first:]
        stream.send(encoded(manifest, made), ANSWER_SECONDS)

"""The two contributions of a round: a replica's own, and its partner's.

The own one is frozen, encoded slice by slice, and kept as the partner decodes it.

The partner's is decoded and fed to the screening rule slice by slice while it arrives. When the last byte arrives, only
the last slice remains to be processed. Decoded data is used once: another judgement, or bytes at another address,
decode everything again.

Both lie in host memory that is shared with the mesh process. On a CPU the shared memory is the device's: codecs read
and write it directly, without copies. On other devices codecs run on the device, and the encoded bytes are copied. On
CUDA both run on a side stream, behind the inner steps that are queued on the default stream. The shared memory is
page-locked, so that copies need no CPU time, and an event after each copy signals that its bytes are final.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from farandole.protocol.run.rules import OuterConfig

from ..base.errors import CodecError, DataError
from ..screening.rule import Encounter, Histories, Partner, Refuse, ScreeningRule, Verdict
from .codec import FORMS, Buffer, bytes_of, bytes_to_fill, bytes_to_read, in_order, one_thread, slices
from .momentum import Momentum
from .rule import OuterRule, OwnVectors

_log = logging.getLogger(__name__)

Wait = Callable[[], None]


class Copier:
    """A copier for the CPU, where the host's memory is the device's. Tensors of shape (bytes,) are uint8."""

    is_host = True
    """Whether codecs read and write the host's memory, so that several threads may encode."""
    depth = 0
    """Number of slices that may be in flight to the host while the next one is encoded."""
    is_aside = False
    """Whether another thread may take inner steps while a contribution is encoded."""

    def pin(self, memory: Buffer) -> None:
        """Prepare memory that is used repeatedly for copies."""

    def fork(self) -> None:
        """Order later work inside `aside` after the work that is queued now."""

    def aside(self) -> AbstractContextManager[object]:
        """Return a context whose work waits for work queued before `fork`, and delays no other work."""
        return contextlib.nullcontext()

    def join(self) -> None:
        """Order later work after the work that was queued inside `aside`."""

    def to_fill(self, host: Tensor) -> Tensor:
        """Return device memory (bytes,) to fill with the bytes for ``host`` (bytes,)."""
        return host

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        """Begin to copy filled memory from `to_fill`; the result, when called, waits until ``host`` has it."""
        return lambda: None

    def fetch(self, host: Tensor) -> Tensor:
        """Return the bytes of ``host`` (bytes,) on the device."""
        return host

    def keep(self, source: Tensor, host: Tensor) -> Wait:
        """Begin to copy the current ``source`` (n,) to ``host`` (n,); the result waits until ``host`` has it."""
        host.copy_(source)
        return lambda: None


class DeviceCopier(Copier):
    """A copier for any device, with synchronous copies."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_fill(self, host: Tensor) -> Tensor:
        """Return new memory."""
        return torch.empty(len(host), dtype=torch.uint8, device=self._device)

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        """Copy synchronously."""
        host.copy_(filled)
        return lambda: None

    def fetch(self, host: Tensor) -> Tensor:
        """Return a copy."""
        return host.to(self._device, copy=True)


class CudaCopier(DeviceCopier):
    """A copier for CUDA that works on a side stream."""

    depth = 2  # one is being copied while one is encoded and one is hashed
    is_aside = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def pin(self, memory: Buffer) -> None:
        """Page-lock the memory until this copier is gone; if CUDA refuses, copies go through pinned staging memory.

        Memory that is given back while it is page-locked would be a trap: what gets its addresses next could not be
        page-locked, and the GPU would write to the old place. So it is kept until then.
        """
        array, cudart = np.frombuffer(memory, dtype=np.uint8), torch.cuda.cudart()
        result = cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0)
        if int(result) == 0:
            weakref.finalize(self, _unpin, array).atexit = False
            return
        _log.debug("cudaHostRegister of %d bytes failed with %s: copies take a detour", array.nbytes, result)
        with contextlib.suppress(RuntimeError):  # otherwise the next CUDA call would raise this error
            torch.zeros(1, device=self._device)

    def fork(self) -> None:
        """Make the side stream wait for the work that is on the current stream now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def aside(self) -> AbstractContextManager[object]:
        """Return a context on the side stream."""
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        """Queue the copy; the result waits for its event."""
        target = host if host.is_pinned() else torch.empty(len(host), dtype=torch.uint8, pin_memory=True)
        target.copy_(filled, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> None:
            copied.synchronize()
            if target is not host:
                host.copy_(target)

        return wait

    def fetch(self, host: Tensor) -> Tensor:
        """Queue the copy; ``host`` must not change until later work on this stream has been waited for."""
        source = host if host.is_pinned() else host.pin_memory()
        return source.to(self._device, non_blocking=True)

    def keep(self, source: Tensor, host: Tensor) -> Wait:
        """Queue the copy; work that is queued later may change ``source``."""
        return self.send(source.view(torch.uint8), host.view(torch.uint8))


def _unpin(array: npt.NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)


def copier_for(device: torch.device) -> Copier:
    """Return the copier for a device."""
    if device.type == "cpu":
        return Copier()
    return CudaCopier(device) if device.type == "cuda" else DeviceCopier(device)


# A replica's own


@dataclass(frozen=True, slots=True)
class Contribution:
    """A contribution: the n elements of one fragment, as they were and as they were sent."""

    part: slice
    """Where the fragment lies in the flat vectors."""
    theta: Tensor
    """The fast weights as they were (n,)."""
    sent: Tensor
    """The contribution as the partner decodes it (n,)."""
    momentum: Tensor
    """The momenta as they were, and once they are encoded as the partner decodes them (m,)."""


class Contributor:
    """Makes contributions of a replica's own weights and vectors, (n,) fp32 each, as they are then, and its momenta.

    Each is good until the next one is made: the memory for it is kept, as getting it from the system every time takes
    longer than filling it.
    """

    def __init__(
        self, outer: OuterConfig, rule: OuterRule, own: OwnVectors, copier: Copier, momentum: Momentum | None
    ) -> None:
        self.momentum = momentum
        self._own = own
        self._copier = copier
        self.form = FORMS[outer.codec]
        self._rule = rule
        largest = -(-len(own.fast) // outer.fragments)
        self._frozen = own.fast.new_empty(largest)
        is_exact = outer.codec == "fp32" and rule.sends_fast_weights
        self._sent = self._frozen if is_exact else own.fast.new_empty(largest)

    def freeze(self, part: slice) -> Contribution:
        """A contribution of one fragment of the weights, as they are now, to be encoded.

        Where nothing goes on aside, they are copied while they are encoded, and must stay as they are until then.
        """
        num_elements = part.stop - part.start
        frozen, sent = self._frozen[:num_elements], self._sent[:num_elements]
        if self._copier.is_aside:
            frozen.copy_(self._own.fast[part])
        momentum = frozen.new_empty(0) if self.momentum is None else self.momentum.freeze(part)
        self._copier.fork()
        return Contribution(part, frozen, sent, momentum)

    def num_bytes(self, part: slice) -> int:
        """Return the encoded size of a fragment's contribution."""
        size = self.form.size(part.stop - part.start)
        return size if self.momentum is None else size + self.momentum.num_bytes(part)

    def encode(self, frozen: Contribution, out: Buffer, progress: Callable[[int], None]) -> bytes:
        """Encode what `freeze` gave into ``out``; returns the BLAKE3 of that.

        ``progress`` is called with how many of the first bytes of ``out`` are final, every slice. Raises `CodecError`
        if ``out`` is too small or a weight is not finite.
        """
        part, digest = frozen.part, blake3()
        target, first = bytes_to_fill(self.num_bytes(part), out), self.form.size(len(frozen.theta))

        def encode(work: tuple[slice, Momentum | None]) -> tuple[Wait, slice]:
            piece, momentum = work
            place = bytes_of(self.form, piece) if momentum is None else bytes_of(momentum.form, piece, first)
            filled = self._copier.to_fill(target[place])
            if momentum is not None:
                momentum.form.encode(frozen.momentum[piece], filled)
                momentum.form.decode(filled, frozen.momentum[piece])
            else:
                self._encode(piece, slice(part.start + piece.start, part.start + piece.stop), filled)
            return self._copier.send(filled, target[place]), place

        def add(place: slice) -> None:
            digest.update(target[place].numpy().data)
            progress(place.stop)

        work: list[tuple[slice, Momentum | None]] = [(piece, None) for piece in slices(len(frozen.theta))]
        work += [(piece, self.momentum) for piece in slices(len(frozen.momentum))]
        if self._copier.is_host:
            for _, place in in_order(encode, work):
                add(place)
            return digest.digest()
        on_their_way: deque[tuple[Wait, slice]] = deque()

        def finish() -> None:
            wait, place = on_their_way.popleft()
            wait()
            add(place)

        with self._copier.aside():
            for each in work:
                on_their_way.append(encode(each))
                while len(on_their_way) > self._copier.depth:
                    finish()
            while on_their_way:
                finish()
        return digest.digest()

    def _encode(self, piece: slice, place: slice, encoded: Tensor) -> None:
        """A slice of the fragment, at ``place`` in the flat vectors: freeze, mean, encode, decode."""
        frozen, sent = self._frozen[piece], self._sent[piece]
        if not self._copier.is_aside:  # now that it is in the processor's cache
            frozen.copy_(self._own.fast[place])
        if self._sent is self._frozen:
            self.form.encode(sent, encoded)
            return
        own = self._own.piece(place)
        sent.copy_(self._rule.contribution(replace(own, fast=frozen)))
        self.form.encode(sent, encoded)
        self.form.decode(encoded, sent)


# The partner's

# Tokens on which a loss is taken, where there is time for them: enough to tell a thousandth of a loss from noise, since
# all losses of a contribution are of the same text. So many are judged at least, which take less than an inner step: on
# 32, 2 of 60 honest contributions to young replicas counted for nothing, and liars cost up to 2 % of the loss.
JUDGED_TOKENS: Final = 2_048
LEAST_TOKENS: Final = 256
# Seconds that judging takes at most, as far as they are foreseen, and their share of an exchange's time: no inner step
# is taken meanwhile. Of 3 M parameters on half a core, a quarter of that time took a tenth of rounds of 10 s.
_MAX_SECONDS: Final = 3.0
_TIME_SHARE: Final = 0.025
# Losses that a rule asks for, usually; so many windows are taken that there is time for them.
_NUM_LOSSES: Final = 3

Measure = Callable[[int, bytes], float]
"""Returns the loss of the present weights on a number of windows of text, which a key determines.

Raises `DataError` if there is no text.
"""


class Exam:
    """The text and the time of one judgement: as many windows as can be measured in a share of an exchange's time.

    All losses of a contribution are of the same windows, which the exchange's own chance determines. A machine that
    was slow takes fewer the next time, down to a few. When the contribution came makes no difference: its sender can
    choose that.
    """

    def __init__(
        self, context: int = JUDGED_TOKENS, *, shares_text: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``context``: tokens of a window. ``shares_text``: see `Partner.shares_text`. ``clock``: seconds."""
        self.shares_text = shares_text
        self._most, self._least = (max(tokens // context, 1) for tokens in (JUDGED_TOKENS, LEAST_TOKENS))
        self._clock = clock
        self._seconds = 0.0  # for one window, when a loss was measured last; 0: not known
        self._ends_at = self._budget = 0.0
        self._key = b""
        self._num_windows = 0  # of this judgement, once it is chosen
        self._has_measured = False
        self.has_text = True
        """Whether a loss can be measured, as far as is known."""
        self.late_seconds = 0.0
        """Seconds that this judgement would take, if there was too little time; else 0."""

    def begin(self, chance: float, seconds: float) -> None:
        """Begin a judgement with text that ``chance`` determines; it may take as long as an exchange, ``seconds``."""
        self._key = struct.pack("<d", chance)
        self._budget = min(_TIME_SHARE * seconds, _MAX_SECONDS)
        self._ends_at = self._clock() + seconds
        self._num_windows = 0
        self._has_measured = False
        self.late_seconds = 0.0

    def loss(self, measure: Measure) -> float | None:
        """Return the present weights' loss; None where there is no time or text for it."""
        if not self.has_text or self.late_seconds:
            return None
        try:
            if not self._seconds:
                measure(1, self._key)  # a warm-up
                self._measured(measure, 1)
            if not self._num_windows:
                affordable = self._budget / _NUM_LOSSES / self._seconds
                self._num_windows = int(min(max(affordable, self._least), self._most))
            seconds = self._num_windows * self._seconds
            if self._clock() + seconds > self._ends_at:
                self.late_seconds = _NUM_LOSSES * seconds
                if not self._has_measured:
                    self._seconds /= 2  # a machine that was busy once is tried again soon
                return None
            return self._measured(measure, self._num_windows)
        except DataError:
            self.has_text = False
            return None

    def _measured(self, measure: Measure, num_windows: int) -> float:
        started_at = self._clock()
        loss = measure(num_windows, self._key)
        self._seconds = max(self._clock() - started_at, 1e-9) / num_windows
        self._has_measured = True
        return loss


Describe = Callable[[Encounter, Tensor], Partner]
"""Returns what a rule may know of a partner, given its decoded contribution (n,).

It is an argument of each judgement, because a replica that is part of a reference cycle would keep its memory until the
garbage collector runs.
"""

_NO_OWN = Refuse("no contribution of this replica's own awaits one")


@dataclass(eq=False)
class PartnerContribution:
    """The partners' contributions, one per round, decoded into ``memory`` (n,) and compared with this replica's own.

    Their momenta are decoded when everything is there: distances and losses are of the weights alone.
    """

    _rule: ScreeningRule
    _contributor: Contributor
    _memory: Tensor
    _copier: Copier
    exam: Exam

    def __post_init__(self) -> None:
        self.histories = Histories()
        """What the rule remembers of peers."""
        self._form = self._contributor.form
        self._own: Contribution | None = None
        self._begin()

    def expect(self, own: Contribution | None) -> None:
        """Expect a partner's contribution for ``own``, once it is encoded; None: expect no contribution."""
        self._own = own
        self._begin()

    def _begin(self) -> None:
        self._rule.begin()
        self._num_taken = 0
        self._address = 0
        self._available = 0
        self._problem: CodecError | None = None
        self._judged: tuple[Partner, Verdict] | None = None

    def take_in(self, data: Buffer, available: int) -> None:
        """Decode the complete slices in the first ``available`` bytes of ``data``; see `RoundEnd.take_in`."""
        if self._own is None:
            return
        source = np.frombuffer(data, dtype=np.uint8)
        address = source.ctypes.data
        if address != self._address or available < self._available or self._judged is not None:
            self._begin()
        self._address, self._available = address, available
        own = self._own
        with self._copier.aside(), one_thread():
            for piece in slices(len(own.sent), self._num_taken):
                place = bytes_of(self._form, piece)
                if place.stop > available or self._problem is not None:
                    return
                self._num_taken = piece.stop
                try:
                    values = self._memory[piece]
                    self._form.decode(self._copier.fetch(bytes_to_read(source[place])), values)
                except CodecError as error:
                    self._problem = error
                else:
                    self._rule.feed(own.sent[piece], values)

    def judge(self, data: Buffer, encounter: Encounter, describe: Describe) -> Verdict:
        """Decode the rest and judge the whole contribution. A refusal is remembered at once."""
        if self._own is None:
            return _NO_OWN
        size = np.frombuffer(data, dtype=np.uint8).size
        try:
            if size != (own_size := self._contributor.num_bytes(self._own.part)):
                raise CodecError(f"it has {size} bytes, mine {own_size}")
            self.take_in(data, size)
            if self._problem is not None:
                raise self._problem
            if (momentum := self._contributor.momentum) is not None:
                source, first = np.frombuffer(data, dtype=np.uint8), self._form.size(len(self._own.sent))
                received = momentum.received(self._own.momentum)
                with self._copier.aside():
                    for piece in slices(len(received)):
                        encoded = bytes_to_read(source[bytes_of(momentum.form, piece, first)])
                        momentum.form.decode(self._copier.fetch(encoded), received[piece])
        except CodecError as error:
            self._begin()
            return Refuse(f"the contribution cannot be used: {error}")
        return self._ask(self._own.sent, encounter, describe)

    def verdict(self, data: Buffer, encounter: Encounter, describe: Describe) -> Verdict:
        """Return the verdict on the contribution that was just judged, without reading it again; otherwise `judge`."""
        source = np.frombuffer(data, dtype=np.uint8)
        is_same = (self._address, self._available) == (source.ctypes.data, source.size)
        if self._own is None or self._judged is None or not is_same:
            return self.judge(data, encounter, describe)
        partner, verdict = self._judged
        return verdict if partner.encounter == encounter else self._ask(self._own.sent, encounter, describe)

    def _ask(self, own: Tensor, encounter: Encounter, describe: Describe) -> Verdict:
        self._copier.join()
        partner = describe(encounter, self._memory[: len(own)])
        verdict = self._rule.judge(partner)
        self._judged = partner, verdict
        if isinstance(verdict, Refuse):
            self._rule.remember(partner, verdict)
            self._begin()
        return verdict

    def values(self) -> Tensor:
        """Return the contribution (n,) that was accepted last; the rule remembers that it is used."""
        assert self._judged is not None
        partner, verdict = self._judged
        self._rule.remember(partner, verdict)
        return partner.contribution

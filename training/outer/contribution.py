"""A replica's own contribution: frozen, encoded slice by slice, and as the partner decodes it.

topk remembers what it has last sent of every element. What no partner used was not passed on: only an outer step with a
partner changes that memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from blake3 import blake3
from torch import Tensor

from farandole.protocol.run.rules import SENT, OuterConfig

from ..base.workers import in_order
from .codec import Buffer, bytes_of, bytes_to_fill, form_of, slices
from .copying import Copier, Wait
from .rule import OuterRule, OwnVectors


@dataclass(frozen=True, slots=True)
class Contribution:
    """A contribution: the n elements of one fragment, as they were and as they were sent."""

    part: slice
    """Where the fragment lies in the flat vectors."""
    theta: Tensor
    """The fast weights as they were (n,)."""
    sent: Tensor
    """The contribution as the partner decodes it (n,). Where topk left something out, the partner takes its own."""
    memory: Tensor | None
    """What topk has sent last of every element once a partner has used this contribution (n,)."""


class Contributor:
    """Makes contributions of a replica's own weights and vectors, (n,) fp32 each, as they are then.

    Each is good until the next one is made: the memory for it is kept, as getting it from the system every time takes
    longer than filling it.
    """

    def __init__(self, outer: OuterConfig, rule: OuterRule, own: OwnVectors, copier: Copier) -> None:
        self._own = own
        self._copier = copier
        self.form = form_of(outer.codec, outer.topk)
        self._rule = rule
        largest = -(-len(own.fast) // outer.fragments)
        self.largest_bytes = self.form.size(largest)
        """Of the largest fragment's contribution."""
        self._frozen = own.fast.new_empty(largest)
        is_exact = outer.codec == "fp32" and rule.sends_fast_weights
        self._sent = self._frozen if is_exact else own.fast.new_empty(largest)
        self._last: Tensor | None = None
        if outer.remembers_sent:
            self._last = rule.contribution(own).clone()
        self._next_memory = None if self._last is None else own.fast.new_empty(largest)

    def freeze(self, part: slice) -> Contribution:
        """A contribution of one fragment of the weights, as they are now, to be encoded.

        Where nothing goes on aside, they are copied while they are encoded, and must stay as they are until then.
        """
        num_elements = part.stop - part.start
        frozen, sent = self._frozen[:num_elements], self._sent[:num_elements]
        if self._copier.is_aside:
            frozen.copy_(self._own.fast[part])
        self._copier.fork()
        memory = None if self._next_memory is None else self._next_memory[:num_elements]
        return Contribution(part, frozen, sent, memory)

    def encode(self, frozen: Contribution, out: Buffer, progress: Callable[[int], None]) -> bytes:
        """Encode what `freeze` gave into ``out``; returns the BLAKE3 of that.

        ``progress`` is called with how many of the first bytes of ``out`` are final, every slice. Raises `CodecError`
        if ``out`` is too small or a weight is not finite.
        """
        part, target, digest = frozen.part, bytes_to_fill(self.form, len(frozen.theta), out), blake3()

        def encode(piece: slice) -> tuple[Wait, slice]:
            place = bytes_of(self.form, piece)
            filled = self._copier.to_fill(target[place])
            self._encode(piece, slice(part.start + piece.start, part.start + piece.stop), filled)
            return self._copier.send(filled, target[place]), place

        def add(place: slice) -> None:
            digest.update(target[place].numpy().data)
            progress(place.stop)

        pieces = slices(len(frozen.theta))
        if self._copier.is_host:
            for _, place in in_order(encode, pieces):
                add(place)
            return digest.digest()
        on_their_way: deque[tuple[Wait, slice]] = deque()

        def finish() -> None:
            wait, place = on_their_way.popleft()
            wait()
            add(place)

        with self._copier.aside():
            for piece in pieces:
                on_their_way.append(encode(piece))
                while len(on_their_way) > self._copier.depth:
                    finish()
            while on_their_way:
                finish()
        return digest.digest()

    def _encode(self, piece: slice, place: slice, encoded: Tensor) -> None:
        """A slice of the fragment, at ``place`` in the flat vectors: freeze, mean, encode, decode, remember."""
        frozen, sent = self._frozen[piece], self._sent[piece]
        if not self._copier.is_aside:  # now that it is in the processor's cache
            frozen.copy_(self._own.fast[place])
        if self._sent is self._frozen:
            self.form.encode(sent, encoded)
            return
        own = self._own.piece(place)
        sent.copy_(self._rule.contribution(replace(own, fast=frozen)))
        if self._last is not None and self._next_memory is not None:
            self.form.encode(sent, encoded, self._last[place])
            self.form.decode(encoded, self._next_memory[piece].copy_(self._last[place]))
            self.form.decode(encoded, sent)
        else:
            self.form.encode(sent, encoded)
            self.form.decode(encoded, sent)

    def passed_on(self, contribution: Contribution) -> None:
        """Remember what a contribution left out, after a partner has used it."""
        if self._last is not None and contribution.memory is not None:
            last = self._last[contribution.part]
            for piece in slices(len(last)):
                last[piece] = contribution.memory[piece]

    def restart(self, *, forgets: bool = False) -> None:
        """Continue from weights that were just loaded; ``forgets``: with nothing remembered of earlier rounds.

        topk then takes the slow weights for what was sent last, so that it sends what moves from there. If it took
        zeros, it would send the largest weights instead.
        """
        if self._last is not None and (forgets or not bool(self._last.any())):
            self._last.copy_(self._rule.contribution(replace(self._own, fast=self._own.slow)))

    def saved(self) -> dict[str, Tensor]:
        """Return the contributor's vectors for a checkpoint: flat vectors (n,), by name."""
        return {} if self._last is None else {SENT: self._last}

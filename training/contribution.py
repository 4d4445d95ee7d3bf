"""A replica's own contribution: frozen, encoded slice by slice, and as the partner decodes it.

With error feedback, what the codec rounds away of a contribution is added to the next one (Karimireddy et al., arXiv
1901.09847), so over the rounds a replica passes on all of its weights' movement, and the mean over the
replicas is not biased. What no partner used was not passed on: only an outer step with a partner carries the error on.
topk remembers, in the same way, what it has last sent of every element.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from farandole.protocol.outer_rules import OuterConfig
from farandole.protocol.vectors import ERROR, SENT

from .codec import Buffer, bytes_of, bytes_to_fill, form_of, slices
from .copying import Copier, Wait
from .outer.rule import OuterRule
from .topk import TopK


@dataclass(frozen=True, slots=True)
class Contribution:
    """What was sent of the n elements of one fragment."""

    part: slice
    """Where the fragment lies in the flat vectors."""
    theta: Tensor
    """The fast weights as they were (n,)."""
    sent: Tensor
    """The contribution as the partner decodes it (n,); what topk left out, as it is."""
    memory: Tensor | None
    """What is to be remembered of it once a partner has used it (n,)."""


class Contributor:
    """Makes contributions of the fast and slow weights, (n,) fp32 each, as they are then.

    Each is good until the next one is made: the memory for it is kept, as getting it from the system every time takes
    longer than filling it.
    """

    def __init__(self, outer: OuterConfig, rule: OuterRule, fast: Tensor, slow: Tensor, copier: Copier) -> None:
        self._fast, self._slow = fast, slow
        self._copier = copier
        self.form = form_of(outer.codec, outer.topk)
        self._rule = rule
        largest = -(-len(fast) // outer.fragments)
        self.largest_bytes = self.form.size(largest)
        """Of the largest fragment's contribution."""
        self._frozen = fast.new_empty(largest)
        is_exact = outer.codec == "fp32" and rule.sends_fast_weights
        self._sent = self._frozen if is_exact else fast.new_empty(largest)
        self._last = rule.contribution(fast, slow).clone() if isinstance(self.form, TopK) else None
        self._error = fast.new_zeros(len(fast)) if outer.feeds_errors_back else None
        self._memory = self._error if self._last is None else self._last
        self._next_memory = None if self._memory is None else fast.new_empty(largest)

    def freeze(self, part: slice) -> Contribution:
        """A contribution of one fragment of the weights, as they are now, to be encoded.

        Where nothing goes on aside, they are copied while they are encoded, and must stay as they are until then.
        """
        num_elements = part.stop - part.start
        frozen, sent = self._frozen[:num_elements], self._sent[:num_elements]
        if self._copier.is_aside:
            frozen.copy_(self._fast[part])
        self._copier.fork()
        memory = None if self._next_memory is None else self._next_memory[:num_elements]
        return Contribution(part, frozen, sent, memory)

    def encode(self, frozen: Contribution, out: Buffer, progress: Callable[[int], None]) -> bytes:
        """Encode what `freeze` gave into ``out``; returns the BLAKE3 of that.

        ``progress`` is called with how many of the first bytes of ``out`` are final, every slice. Raises `CodecError`
        if ``out`` is too small or a weight is not finite.
        """
        part, num_elements = frozen.part, len(frozen.theta)
        target, digest = bytes_to_fill(self.form, num_elements, out), blake3()
        on_their_way: deque[tuple[Wait, slice]] = deque()

        def finish() -> None:
            wait, place = on_their_way.popleft()
            wait()
            digest.update(target[place].numpy().data)
            progress(place.stop)

        with self._copier.aside():
            for piece in slices(num_elements):
                place = bytes_of(self.form, piece)
                filled = self._copier.to_fill(target[place])
                self._encode(piece, slice(part.start + piece.start, part.start + piece.stop), filled)
                on_their_way.append((self._copier.send(filled, target[place]), place))
                while len(on_their_way) > self._copier.depth:
                    finish()
            while on_their_way:
                finish()
        return digest.digest()

    def _encode(self, piece: slice, place: slice, encoded: Tensor) -> None:
        """A slice of the fragment, at ``place`` in the flat vectors: freeze, mean, encode, decode, remember."""
        frozen, sent = self._frozen[piece], self._sent[piece]
        if not self._copier.is_aside:  # now that it is in the processor's cache
            frozen.copy_(self._fast[place])
        if self._sent is self._frozen:
            self.form.encode(sent, encoded)
            return
        sent.copy_(self._rule.contribution(frozen, self._slow[place]))
        if self._last is not None and self._next_memory is not None:
            self.form.encode(sent, encoded, self._last[place])
            self.form.decode(encoded, self._next_memory[piece].copy_(self._last[place]))
            self.form.decode(encoded, sent)
        elif self._error is not None and self._next_memory is not None:
            meant = sent.add_(self._error[place]).clone()
            self.form.encode(meant, encoded)
            self.form.decode(encoded, sent)
            self._next_memory[piece] = meant.sub_(sent)
        else:
            self.form.encode(sent, encoded)
            self.form.decode(encoded, sent)

    def passed_on(self, contribution: Contribution) -> None:
        """A partner has used it: what it left out or rounded away is remembered."""
        if self._memory is not None and contribution.memory is not None:
            self._memory[contribution.part] = contribution.memory

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint has of it: flat vectors (n,), by name."""
        if self._last is not None:
            return {SENT: self._last}
        return {} if self._error is None else {ERROR: self._error}

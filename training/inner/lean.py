"""Inner steps in 8 bytes a parameter: weights, gradient and running means in bf16, rounded at random.

The plain trainer holds these four vectors in fp32, 16 bytes a parameter. bf16 has 8 bits of precision: a weight rounded
to the nearest number stays as it is if a step changes it by less than 1/512 of it, and late in training most steps do.
So does a mean of squares, which a step changes by 1 - beta2 of it at most. *Stochastic rounding* rounds a number up or
down with chances by its distance from both neighbours, so the expected result is the number itself, and small changes
add up (Gupta et al., arXiv 1502.02551; for bf16 weights: Zamirai et al., arXiv 2010.06192).

Everything is computed in fp32, piece by piece (`PIECE`), with `adamw_` and `muon_` as in plain training. Only what is
stored between two steps is bf16. The gradient is rounded to nearest as backward passes add it up: it is read once.

Outer steps work on an fp32 copy of the weights in the host's memory, as on any GPU
(`farandole.training.engine.replica`). Slow weights, momentum and contributions are fp32, so partners notice nothing. At
a round's end the weights are read, which is exact. Afterwards they are written, also with stochastic rounding: the
difference that rounding makes counts as progress of the next round. Rounded to nearest it would pull the slow weights
to the bf16 grid round after round, where progress below half a step of the grid is lost; rounded at random it is noise
with mean 0, and exchanges average it. Numbers that are bf16 already are not changed by any of this.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import InnerConfig

from ..base.parameters import Layout, bind_
from ..base.permutation import keyed_digest
from .optimizer import CLIP_EPSILON, InnerOptimizer, adamw_, decay_, muon_

# Elements computed at a time. A piece has some ten fp32 temporaries: in a processor's cache, or 80 MB on a GPU, where
# smaller pieces cost more launches than arithmetic.
_CPU_PIECE: Final = 1 << 18
_GPU_PIECE: Final = 1 << 21
_NUM_DROPPED: Final = 1 << 16
"""An fp32 number is a bf16 number and 16 more bits of the significand."""


def pieces(vector: Tensor) -> list[slice]:
    """Return consecutive pieces of a vector (n,)."""
    size = _CPU_PIECE if vector.device.type == "cpu" else _GPU_PIECE
    return [slice(start, start + size) for start in range(0, len(vector), size)]


class Rounding:
    """Stochastic rounding with random bits that follow from the run, the author and the inner step."""

    def __init__(self, run_id: bytes, author: bytes, device: torch.device) -> None:
        self._key = (run_id, author)
        # On the device "meta" there are no numbers.
        self._generator = None if device.type == "meta" else torch.Generator(device)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin the random bits of inner step ``step``; what is rounded until the next one continues with them."""
        if self._generator is not None:
            digest = keyed_digest(b"farandole/rounding/1", (*self._key, step.to_bytes(8, "little")))
            self._generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def write_(self, target: Tensor, values: Tensor) -> None:
        """Round ``values``, fp32, to ``target``, bf16 of the same shape; ``values`` is overwritten.

        Random bits are added below bf16's last bit, and then cut off. Numbers are signed magnitudes, so this is
        symmetric about 0. Infinities stay as they are; NaNs are not allowed.
        """
        bits = values.view(torch.int32)
        noise = torch.randint(
            _NUM_DROPPED, bits.shape, dtype=torch.int32, device=bits.device, generator=self._generator
        )
        bits.add_(noise).bitwise_and_(-_NUM_DROPPED)
        target.copy_(values)  # exact


def flatten_lean_(module: nn.Module, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Move a module to the device, with bf16 parameters there, and its fp32 parameters into a vector of the host.

    Returns the host's vector (n,) fp32, and on the device, (n,) bf16 each, the parameters' and their gradients'. The
    parameters have no values yet.
    """
    theta = torch.empty(layout.num_elements, pin_memory=device.type == "cuda")
    views = layout.views(theta)
    for name, parameter in module.named_parameters():
        views[name].copy_(parameter.detach())
    weights, gradient = (torch.zeros(len(theta), dtype=torch.bfloat16, device=device) for _ in range(2))
    bind_(module, layout, weights, gradient)  # before the module moves: no fp32 parameter reaches the device
    module.to(device)
    return theta, weights, gradient


class LeanOptimizer(InnerOptimizer):
    """An `InnerOptimizer` whose vectors are (n,) bf16, rounded by ``rounding``; a step never waits for the device."""

    def __init__(
        self,
        rounding: Rounding,
        settings: InnerConfig,
        module: nn.Module,
        layout: Layout,
        weights: Tensor,
        gradient: Tensor,
    ) -> None:
        super().__init__(settings, module, layout, weights, gradient)
        self._rounding = rounding

    def step(self, steps: int, divisor: int) -> None:
        """Implement `InnerOptimizer.step`; the gradient stays as it is."""
        self._rate = rate = self.rate(steps)
        number = steps - self.begun_at
        self._rounding.begin(steps)
        norms = [torch.linalg.vector_norm(self._gradient[piece].float()) for piece in pieces(self._gradient)]
        norm = torch.linalg.vector_norm(torch.stack(norms)) / divisor
        is_fit = norm.isfinite()
        clip = self._settings.clip
        scale = ((clip / (norm + CLIP_EPSILON)).clamp(max=1.0) if clip else torch.ones_like(norm)) / divisor
        self._num_skipped = self._num_skipped + is_fit.logical_not()
        for span in self._spans:
            for piece in pieces(span.weights) if span.square is not None else [slice(None)]:
                weights, mean = span.weights[piece].float(), span.mean[piece].float()
                gradient = span.gradient[piece].float().mul_(scale)
                if span.is_decayed:
                    decay_(weights, rate, self._settings)
                if span.square is None:
                    muon_(weights, gradient, mean, rate, self._settings.momentum)
                else:
                    square = span.square[piece].float()
                    adamw_(weights, gradient, mean, square, number, rate, self._settings)
                    self._store(span.square[piece], square, is_fit)
                self._store(span.weights[piece], weights, is_fit)
                self._store(span.mean[piece], mean, is_fit)

    def _store(self, target: Tensor, values: Tensor, is_fit: Tensor) -> None:
        """Round ``values`` to ``target`` if ``is_fit``, a number on the device, says so."""
        self._rounding.write_(target, torch.where(is_fit, values, target))

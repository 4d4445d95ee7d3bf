"""The inner optimizer: AdamW, or Muon for matrices and AdamW for the rest, with linear warm-up and cosine decay.

AdamW's operations are elementwise, so a whole model is stepped as one flat tensor (a handful of kernels instead of a
handful for each parameter). They and their order are the same as in `torch.optim.AdamW` (foreach=False), which is the
oracle of the tests, bit for bit. `muon_` says what Muon's are; `farandole.training.inner.lean` takes the same steps
where weights, gradient and means are bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor, nn

from farandole.protocol.run.manifest import InnerConfig
from farandole.protocol.run.rules import OPTIMIZER_VECTORS

from ..base.parameters import Layout

# Of the iteration x <- a x + (b x x^T + c (x x^T)^2) x: the slope at 0 is as large as stability permits.
_A: Final = 3.4445
_B: Final = -4.7750
_C: Final = 2.0315
_ITERATIONS: Final = 5
_EPSILON: Final = 1e-7
# The root mean square of AdamW's steps, as a share of the rate.
_ADAMW_RMS: Final = 0.2

# Names of the modules at a model's ends, if they are no `nn.Embedding`: farandole's own, GPT-2's, Llama's.
_ENDS: Final = frozenset({"embedding", "lm_head", "head", "wte", "wpe"})


def matrices_of(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that Muon steps: all matrices but those of embedding and head.

    A row of these two belongs to one token, so their steps are AdamW's, as are the steps of norms and biases. A module
    of one's own has its embedding in an `nn.Embedding`, and calls its head ``head`` or ``lm_head``.
    """
    embeddings = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    return frozenset(
        name
        for name, parameter in module.named_parameters()
        if parameter.ndim == 2 and id(parameter) not in embeddings and not _ENDS & set(name.split("."))
    )


def muon_(
    weight: Tensor, gradient: Tensor, momentum: Tensor, rate: float, share: float, scale: Tensor | None = None
) -> None:
    """Take one Muon step in place, for a matrix (r, c); weight decay is `decay_`.

    Muon is momentum whose matrices are made orthogonal before each step (Jordan 2024,
    kellerjordan.github.io/posts/muon): a matrix's step is the momentum U S V^T with all singular values set to about 1.
    Newton-Schulz iterations compute it with products of matrices alone. The rate is scaled as in "Muon is Scalable for
    LLM Training" (arXiv 2502.16982, section 2.2), so that a step is as large as AdamW's, and one learning rate serves
    both.

    The operations and their order are the same as in `torch.optim.Muon` (``adjust_lr_fn="match_rms_adamw"``), which is
    the oracle of the tests, bit for bit. Only the dtype differs on a CPU: few CPUs have bf16 units, and without them
    bf16 products take 10 to 27 times as long as fp32's.

    ``momentum`` (r, c) is the running mean of the gradient, of which a step keeps ``share``; the step looks ahead, as
    Nesterov's momentum does. ``scale``, a number on the device, scales the step.
    """
    momentum.lerp_(gradient, 1 - share)
    step = orthogonalised(gradient.lerp(momentum, share))
    if scale is not None:
        step.mul_(scale)
    weight.add_(step, alpha=-rate * rms_factor(*weight.shape))


def rms_factor(rows: int, columns: int) -> float:
    """Return the factor that makes an orthogonalised step as large as AdamW's."""
    return _ADAMW_RMS * math.sqrt(max(rows, columns))


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrix to (r, c), roughly, (r, c); bf16, or fp32 on a CPU.

    Large singular values become 0.7 to 1.2; very small ones stay smaller.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16, copy=True)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=_EPSILON))
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


# How many times the memory of the mean of squares the rate is ramped up for (`ramp` says why).
RAMP_MEMORIES = 2
# Elements that `adamw_` takes at a time: its temporaries stay in a processor's cache, and are much smaller than the
# model.
PIECE: Final = 1 << 18
# Steps that `InnerOptimizer.look_ahead` goes: enough that the loss differs by more than rounding.
LOOK_AHEAD: Final = 4
# Added to a norm before division, as `torch.nn.utils.clip_grad_norm_` does.
CLIP_EPSILON: Final = 1e-6


def learning_rate(step: int, inner: InnerConfig) -> float:
    """The rate of inner step ``step`` (from 0): linear warm-up, to its least at ``total_steps``, then flat."""
    if step < inner.warmup_steps:
        return inner.learning_rate * (step + 1) / inner.warmup_steps
    least = inner.learning_rate * inner.min_learning_rate_ratio
    if inner.schedule == "wsd":
        left = (inner.total_steps - step) / (inner.decay_share * inner.total_steps)
        return least + (inner.learning_rate - least) * min(1.0, max(0.0, left))
    progress = (step - inner.warmup_steps) / max(1, inner.total_steps - inner.warmup_steps)
    return least + (inner.learning_rate - least) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def ramp(step: int, inner: InnerConfig) -> float:
    """Return the share of the rate for inner step ``step`` (from 0) after AdamW's means were reset: linear up to 1.

    Until the mean of squares has seen enough steps its estimate is bad, and full steps do harm; twice its memory, which
    is 1 / (1 - beta2) steps, is enough whatever the model (Ma and Yarats, arXiv 1910.04209).
    """
    return min(1.0, (step + 1) * (1 - inner.beta2) / RAMP_MEMORIES)


def adamw_(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, rate: float, inner: InnerConfig
) -> None:
    """One Adam step in place (arXiv 1412.6980), for tensors of one shape; ``step`` counts from 0.

    ``mean`` and ``square`` are the running means of the gradient and of its square. Decoupled weight decay
    (arXiv 1711.05101) is `decay_`, called before this.
    """
    mean.lerp_(gradient, 1 - inner.beta1)
    square.mul_(inner.beta2).addcmul_(gradient, gradient, value=1 - inner.beta2)
    bias1 = 1 - inner.beta1 ** (step + 1)
    bias2 = 1 - inner.beta2 ** (step + 1)
    denominator = (square.sqrt() / bias2**0.5).add_(inner.epsilon)
    weights.addcdiv_(mean, denominator, value=-rate / bias1)


def decay_(weights: Tensor, rate: float, inner: InnerConfig, fit: Tensor | float = 1.0) -> None:
    """Decoupled weight decay in place; none where ``fit``, a number on the device, is 0."""
    if inner.weight_decay:
        weights.mul_(1 - rate * inner.weight_decay * fit)


@dataclass(frozen=True, slots=True)
class Span:
    """What is stepped at once: a matrix (r, c) by Muon, or adjacent parameters (n,) by AdamW.

    All are views of the optimizer's vectors.
    """

    weights: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor | None
    """None for Muon."""
    is_decayed: bool


class InnerOptimizer:
    """The optimizer of all parameters of a replica: ``weights`` and ``gradient`` are flat, (n,) of one dtype.

    The module's parameters are views into ``weights``, and their gradients views into ``gradient``, by ``layout``.
    """

    def __init__(
        self, settings: InnerConfig, module: nn.Module, layout: Layout, weights: Tensor, gradient: Tensor
    ) -> None:
        self._settings = settings
        self._gradient = gradient
        self.is_queued = weights.is_cuda or weights.is_meta
        """Whether a step must not wait for the device. On "meta", where memory is counted, there is nothing to read."""
        self._parameters = list(module.parameters())
        self.mean = torch.zeros_like(weights)
        """The running mean of the gradient (n,): Muon's momentum where `muon_places` says so, AdamW's elsewhere."""
        by_muon = matrices_of(module) if settings.optimizer == "muon" else frozenset()
        self.muon_places = [place for name, place in layout.places().items() if name in by_muon]
        """Where the matrices that Muon steps are in the flat vectors."""
        squares = Layout({name: shape for name, shape in layout.shapes.items() if name not in by_muon}, layout.codec)
        self._square = weights.new_zeros(squares.num_elements)
        self.parts = {OPTIMIZER_VECTORS[1]: squares}
        """Layouts of the vectors that have not all parameters."""
        self._spans = list[Span]()
        views = [layout.views(flat) for flat in (weights, gradient, self.mean)]
        places, square_places = layout.places(), squares.places()
        runs = list[tuple[slice, slice, bool]]()  # of AdamW: adjacent parameters together
        for name, shape in layout.shapes.items():
            is_decayed = len(shape) > 1
            if name in by_muon:
                matrix, its_gradient, mean = (by_name[name] for by_name in views)
                self._spans.append(Span(matrix, its_gradient, mean, None, is_decayed))
                continue
            place, square_place = places[name], square_places[name]
            if runs and runs[-1][0].stop == place.start and runs[-1][2] == is_decayed:
                before, squares_before, _ = runs.pop()
                place, square_place = slice(before.start, place.stop), slice(squares_before.start, square_place.stop)
            runs.append((place, square_place, is_decayed))
        for place, square_place, is_decayed in runs:
            vectors = weights[place], gradient[place], self.mean[place], self._square[square_place]
            self._spans.append(Span(*vectors, is_decayed))
        self._rate = 0.0  # of the last step
        self._num_skipped: int | Tensor = 0
        self.begun_at = 0
        """Inner step at which the means began."""

    @property
    def num_skipped(self) -> int:
        """Return the number of steps that were skipped because their gradient was not finite; waits for the device."""
        return int(self._num_skipped)

    def rate(self, steps: int) -> float:
        """The learning rate of inner step ``steps`` (from 0): the schedule's, ramped up after a `restart`."""
        return learning_rate(steps, self._settings) * self.ramp(steps)

    def ramp(self, steps: int) -> float:
        """Return the share of the schedule's rate that inner step ``steps`` (from 0) is taken at."""
        return ramp(max(steps - self.begun_at, 0), self._settings) if self.begun_at else 1.0

    def step(self, steps: int, divisor: int) -> None:
        """Take inner step ``steps`` (from 0), with the gradient over ``divisor``, clipped.

        The gradient is changed. A gradient that is not finite changes nothing: one overflow would otherwise spoil
        weights and means for good.
        """
        self._rate = rate = self.rate(steps)
        if divisor != 1:
            self._gradient.div_(divisor)
        if self._settings.clip:
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.clip)
        else:
            norm = torch.linalg.vector_norm(self._gradient)
        is_fit = norm.isfinite()
        if self.is_queued:
            self._num_skipped = self._num_skipped + is_fit.logical_not()
            self._step(steps - self.begun_at, rate, is_fit.float())
        elif bool(is_fit):
            self._step(steps - self.begun_at, rate)
        else:
            self._num_skipped += 1

    def _step(self, number: int, rate: float, fit: Tensor | None = None) -> None:
        """Step every span; nothing changes where ``fit``, a number on the device, is 0: reading it would wait."""
        for span in self._spans:
            if span.is_decayed:
                decay_(span.weights, rate, self._settings, 1.0 if fit is None else fit)
            if span.square is None:
                gradient = span.gradient if fit is None else torch.where(fit > 0, span.gradient, span.mean)
                muon_(span.weights, gradient, span.mean, rate, self._settings.momentum, fit)
            elif fit is not None:  # PyTorch's fused kernel: the same to rounding, and faster on a GPU
                # Filled on the device: copied from here, it would wait for all that the device has yet to do.
                count = torch.full((), number + 1, dtype=torch.float32, device=span.weights.device)
                each = [span.weights], [span.gradient], [span.mean], [span.square]
                torch._fused_adamw_(
                    *each,
                    [],
                    [count],
                    lr=rate,
                    beta1=self._settings.beta1,
                    beta2=self._settings.beta2,
                    weight_decay=0.0,
                    eps=self._settings.epsilon,
                    amsgrad=False,
                    maximize=False,
                    found_inf=1 - fit,
                )
                # The kernel does not count as a change of the tensors, by which stages see that a copy of them is old.
                torch.autograd.graph.increment_version(span.weights)
            else:
                for start in range(0, len(span.weights), PIECE):
                    piece = slice(start, start + PIECE)
                    vectors = span.weights[piece], span.gradient[piece], span.mean[piece], span.square[piece]
                    adamw_(*vectors, number, rate, self._settings)

    def look_ahead(self, weights: Tensor) -> None:
        """Move weights (n,), on any device, by `LOOK_AHEAD` of Muon's steps along its momentum as it is."""
        momenta = [span.mean for span in self._spans if span.square is None]
        for place, momentum in zip(self.muon_places, momenta, strict=True):
            step = orthogonalised(momentum.float()).to(weights).mul_(rms_factor(*momentum.shape))
            weights[place].view_as(step).sub_(step, alpha=LOOK_AHEAD * self._rate)

    def restart(self, steps: int, begun_at: int) -> None:
        """Continue after ``steps`` inner steps with means that were loaded, and that began at ``begun_at``.

        If any of them is missing, all begin now, and the rate is ramped up.
        """
        means = [mean for mean in (self.mean, self._square) if len(mean)]
        if all(bool(mean.any()) for mean in means):
            self.begun_at = min(begun_at, steps)
            return
        self.begun_at = steps
        for mean in means:
            mean.zero_()

    def digest(self) -> bytes:
        """BLAKE3 of the running means, 32 bytes."""
        digest = blake3()
        for mean in (self.mean, self._square):
            digest.update(mean.cpu().view(torch.uint8).numpy().data)
        return digest.digest()

    def state(self) -> dict[str, Tensor]:
        """The running means, by name: flat vectors, the mean (n,), that of squares by `parts`."""
        return dict(zip(OPTIMIZER_VECTORS, (self.mean, self._square), strict=True))

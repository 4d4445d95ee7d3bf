"""The replicas of a comparison as one tensor: on a GPU, one small replica would keep few of its units busy.

A *trial* is a seed, a learning rate and R replicas. The replicas of a method's trials are rows of one tensor (N, W),
and every operation takes all of them at once: the model by `torch.func.vmap`, the inner optimizer, codecs and outer
rules by the node's own functions, which are elementwise or follow blocks, of which a row has a whole number (its last
elements belong to no parameter and stay zeros). The results differ from a node's by rounding; on a GPU Muon's
iterations are in bf16.

Synchronous data parallel training is one replica that trains on the batches of all replicas at once: the mean of the
gradients of equal batches is the gradient of their union. DiLoCo takes the mean over all replicas.

On CUDA everything up to an inner step's gradient is captured once as a graph: launching hundreds of small kernels takes
longer than running them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from farandole.protocol.run.manifest import InnerConfig
from farandole.protocol.run.rules import Codec, OuterConfig
from farandole.training.base.errors import TrainingError
from farandole.training.base.parameters import Layout, layout_of
from farandole.training.data.batches import draw
from farandole.training.inner.optimizer import (
    CLIP_EPSILON,
    adamw_,
    learning_rate,
    matrices_of,
    orthogonalised,
    rms_factor,
)
from farandole.training.outer.codec import FORMS, Form
from farandole.training.outer.rule import Meeting, OwnVectors

from .baselines import Group, Method, Trial, rule_for
from .diloco import DiLoCoConfig, in_two_bits
from .sparseloco import SparseLoCoConfig, few_of

# Inner steps before the graph is captured: libraries take their memory in the first ones.
_WARMUP_STEPS: Final = 3
_BLOCK: Final = 256  # the longest of a codec

Tokens = npt.NDArray[np.int64]


class Stack:
    """The replicas of several trials of one method, trial by trial: N rows; each trial has equally many samplers.

    The rows of a trial have equal initial weights.
    """

    def __init__(
        self,
        method: Method,
        modules: Sequence[nn.Module],
        inner: InnerConfig,
        trials: Sequence[Trial],
        device: torch.device,
    ) -> None:
        """``modules``: the model with each trial's initial weights."""
        outer, num_samplers = method.outer, len(trials[0].samplers)
        per_trial = 1 if method.is_synchronous else num_samplers
        inner = msgspec.structs.replace(inner, optimizer=method.optimizer, momentum=method.share)
        self.steps = 0
        self._num_trials = len(trials)
        self._model = _Model(modules[0].to(device), outer.codec)
        self._num_elements = self._model.num_elements
        width = -(-self._num_elements // _BLOCK) * _BLOCK  # whole blocks, of every codec
        self.theta = torch.zeros(len(trials) * per_trial, width, device=device)
        """Fast weights, (N, W) fp32."""
        for module, rows in zip(modules, self.theta.split(per_trial), strict=True):
            flat = torch.cat([each.detach().flatten() for each in module.parameters()])
            rows[:, : self._num_elements] = flat.to(device)
        self._gradients = _Gradients(self._model, self.theta, inner)
        factors = torch.tensor([[trial.rate] for trial in trials]).repeat_interleave(per_trial, 0).to(device)
        self._optimizer = _Optimizer(inner, self._model, self.theta, self._gradients, factors)
        self.outer = _Outer(outer, self.theta, self._model.layout)
        self.momenta = self._gradients.momentum
        """Muon's, (N, W) fp32."""
        self._sent_momenta = self.momenta

    def inner_step(self, tokens: Tokens) -> None:
        """Take one inner step of every replica on its batch; ``tokens`` (N, B, T + 1)."""
        self._gradients.compute(torch.from_numpy(tokens))
        with torch.no_grad():
            self._optimizer.step(self.steps)
        self.steps += 1

    @torch.no_grad()
    def contribute(self, fragment: int = 0) -> None:
        """Make every replica's contribution of a fragment, for the next `outer_step`."""
        self.outer.contribute(fragment)

    @torch.no_grad()
    def outer_step(self, groups: Sequence[Sequence[int]], *, is_late: bool = False) -> None:
        """Take the outer step of every replica with its group, with equal shares; ``groups`` partition the rows.

        ``is_late``: inner steps were taken since `contribute`.
        """
        for of_size in self._by_size(groups):
            self.outer.step(of_size, is_late=is_late)

    @torch.no_grad()
    def send_momenta(self, codec: Codec) -> None:
        """Send Muon's momenta, for the next `average_momenta`."""
        self._sent_momenta = _decoded(self.momenta, FORMS[codec])

    @torch.no_grad()
    def average_momenta(self, groups: Sequence[Sequence[int]], fade: float = 1.0) -> None:
        """Average what was sent in each group; what the codec loses of a row's own stays with the row.

        ``fade``: what is left of it, where inner steps were taken since.
        """
        for of_size in self._by_size(groups):
            received = self._sent_momenta[of_size]  # (G, R, W)
            self.momenta[of_size] += fade * (received.mean(1, keepdim=True) - received)

    def _by_size(self, groups: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return groups as tensors (G, R), one for each of their sizes R."""
        sizes = sorted({len(group) for group in groups})
        by_size = ([list(group) for group in groups if len(group) == size] for size in sizes)
        return [torch.tensor(of_size, device=self.theta.device) for of_size in by_size]

    @torch.no_grad()
    def losses(self, batches: Sequence[Tokens], merged: bool = False) -> list[float]:
        """Return each trial's loss, the mean over its replicas and the batches, each (B, T + 1).

        ``merged``: the loss of the mean of its replicas' weights. Raises `TrainingError` if a gradient was not finite:
        a replica would skip such a step, a stack cannot.
        """
        theta = self._by_trial().mean(1) if merged else self.theta
        if bool(self._gradients.have_failed):  # waits for the device
            raise TrainingError("a gradient was not finite: leave out the highest rate")
        by_trial: list[float] = self.losses_by_row(theta, batches).mean(0).view(self._num_trials, -1).mean(1).tolist()
        return by_trial

    @torch.no_grad()
    def losses_by_row(self, theta: Tensor, batches: Sequence[Tokens]) -> Tensor:
        """Return the loss (K, N) of each row of ``theta`` (N, W) on each of K batches (B, T + 1)."""
        loss, views = vmap(self._model.loss, (0, None)), self._model.views(theta)
        return torch.stack([loss(views, torch.from_numpy(each).to(theta.device)) for each in batches])

    def views(self) -> dict[str, Tensor]:
        """Return all rows' parameters (N, ...) by name, as views."""
        return self._model.views(self.theta)

    def _by_trial(self) -> Tensor:
        return self.theta.view(self._num_trials, -1, self.theta.size(1))

    @torch.no_grad()
    def spreads(self) -> list[float]:
        """Return each trial's spread: the weights' mean standard deviation across replicas, over their mean size."""
        by_trial = self._by_trial()[..., : self._num_elements]
        deviation = by_trial.std(1, correction=0).mean(1)
        spreads: list[float] = (deviation / by_trial.mean(1).square().mean(1).sqrt()).tolist()
        return spreads


class _Model:
    """The model, and where a row has its parameters.

    It knows no stack: an earlier method's rows are freed as soon as nobody needs them, without a garbage collection.
    """

    def __init__(self, module: nn.Module, codec: Codec) -> None:
        self._module = module
        self.layout = layout_of(module, codec)
        self.num_elements = self.layout.num_elements
        self.matrices = matrices_of(module)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters of all rows of ``flat`` (N, W), by name, as views (N, ...)."""
        shapes = self.layout.shapes
        return {name: flat[:, place].unflatten(1, shapes[name]) for name, place in self.layout.places().items()}

    def loss(self, parameters: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Return the loss of one row's ``parameters`` on tokens (B, T + 1)."""
        with sdpa_kernel(SDPBackend.MATH):  # `vmap` does not know the fused kernels, or passes them unaligned tensors
            loss: Tensor = functional_call(self._module, dict(parameters), (tokens[:, :-1], tokens[:, 1:]))
        return loss


class _Gradients:
    """The clipped gradients of all rows, and Muon's directions."""

    def __init__(self, model: _Model, theta: Tensor, settings: InnerConfig) -> None:
        self._loss = vmap(model.loss)
        self._settings = settings
        self.gradient = torch.zeros_like(theta)
        """(N, W) fp32."""
        self.by_muon = model.matrices if settings.optimizer == "muon" else frozenset()
        """Names of the parameters that Muon steps."""
        self.direction = torch.zeros_like(theta)
        """Muon's steps at a rate of 1, (N, W) fp32; zeros at other parameters."""
        self.momentum = torch.zeros_like(theta)
        """Muon's, (N, W) fp32, kept and not used at other parameters."""
        self._views = model.views
        self._leaves = {name: view.detach().requires_grad_() for name, view in model.views(theta).items()}
        self._gradient_views = list(model.views(self.gradient).values())
        self.have_failed = torch.zeros((), dtype=torch.bool, device=theta.device)
        """Whether a gradient was not finite."""
        self._tokens: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_computed = 0

    def compute(self, tokens: Tensor) -> None:
        """Compute them on the batches ``tokens`` (N, B, T + 1), which are on the CPU."""
        device = self.gradient.device
        if self._tokens is None:
            self._tokens = tokens.to(device)
        else:
            self._tokens.copy_(tokens.pin_memory() if device.type == "cuda" else tokens, non_blocking=True)
        if device.type != "cuda":
            self._compute(self._tokens)
        elif self._graph is not None:
            self._graph.replay()
        elif self._num_computed < _WARMUP_STEPS:
            stream = torch.cuda.Stream()  # as a capture requires of what goes before
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute(self._tokens)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._compute(self._tokens)
            self._graph.replay()  # a capture computes nothing
        self._num_computed += 1

    def _compute(self, tokens: Tensor) -> None:
        gradients = torch.autograd.grad(self._loss(self._leaves, tokens).sum(), list(self._leaves.values()))
        with torch.no_grad():
            torch._foreach_copy_(self._gradient_views, list(gradients))
            norms = torch.linalg.vector_norm(self.gradient, dim=1, keepdim=True)  # (N, 1)
            self.have_failed |= ~norms.isfinite().all()
            if self._settings.clip:
                self.gradient.mul_((self._settings.clip / (norms + CLIP_EPSILON)).clamp(max=1.0))
            if self.by_muon:
                self._turn()

    def _turn(self) -> None:
        """Compute `direction`: `farandole.training.inner.optimizer.muon_` of all rows."""
        share = self._settings.momentum
        self.momentum.lerp_(self.gradient, 1 - share)
        ahead, directions = self._views(self.gradient.lerp(self.momentum, share)), self._views(self.direction)
        for name in sorted(self.by_muon):
            direction = directions[name]  # (N, r, c)
            direction.copy_(vmap(orthogonalised)(ahead[name])).mul_(-rms_factor(*direction.shape[1:]))


class _Optimizer:
    """The inner optimizer of all rows; the learning rates are multiples ``factors`` (N, 1) of the settings'."""

    def __init__(
        self, settings: InnerConfig, model: _Model, theta: Tensor, gradients: _Gradients, factors: Tensor
    ) -> None:
        self._settings = settings
        self._theta = theta
        self._gradients = gradients
        self._mean, self._square, self._update = (torch.zeros_like(theta) for _ in range(3))
        self._is_muon, decay = (torch.zeros_like(theta[:1]) for _ in range(2))
        for name, view in model.views(self._is_muon).items():
            view.fill_(name in gradients.by_muon)
        for view in model.views(decay).values():
            view.fill_(settings.weight_decay if view.ndim > 2 else 0.0)  # (1, rows, columns)
        self._factors = factors
        self._decay = factors * decay

    def step(self, steps: int) -> None:
        """Take inner step ``steps`` (from 0) with the gradients."""
        rate = learning_rate(steps, self._settings)
        update, gradient, mean, square = (
            each.view(-1) for each in (self._update.zero_(), self._gradients.gradient, self._mean, self._square)
        )
        adamw_(update, gradient, mean, square, steps, 1.0, self._settings)
        if self._gradients.by_muon:
            self._update.lerp_(self._gradients.direction, self._is_muon)
        self._theta.addcmul_(self._theta, self._decay, value=-rate)
        self._theta.addcmul_(self._update, self._factors, value=rate)


class _Outer:
    """The outer state of all rows (`farandole.training.outer.outer_state` of each); (N, P) are a fragment's elements.

    A fragment is padded with zeros to whole blocks of the codec, which then are of one row each.
    """

    def __init__(self, settings: OuterConfig, theta: Tensor, layout: Layout) -> None:
        self._settings = settings
        self._layout = layout
        self._rule = rule_for(settings)
        self._is_sparse = isinstance(settings, SparseLoCoConfig)
        self._form = FORMS[settings.codec]
        self._theta = theta
        self.slow = theta.clone()
        """Slow weights, (N, W) fp32."""
        self._vectors = {name: torch.zeros_like(theta) for name in settings.vectors}
        self._unsent = (
            torch.zeros_like(theta) if isinstance(settings, DiLoCoConfig) and settings.error_feedback else None
        )
        self._part = slice(0, 0)
        self._fast = self._exact = self._sent = theta

    def _piece(self, flat: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return a copy (N, P) of the fragment in the rows of ``flat`` (N, W), by default in all."""
        chosen = flat[:, self._part] if rows is None else flat[rows, self._part]
        return pad(chosen, (0, -chosen.size(1) % _BLOCK))

    def _own(self, fast: Tensor, rows: Tensor | None = None) -> OwnVectors:
        vectors = {name: self._piece(flat, rows) for name, flat in self._vectors.items()}
        return OwnVectors(fast, self._piece(self.slow, rows), vectors)

    def contribute(self, fragment: int) -> None:
        """Make the contributions of all rows, exact and as their receivers decode them."""
        self._part = self._layout.fragments(self._settings.fragments)[fragment]
        self._fast = self._piece(self._theta)
        self._exact = self._sent = self._rule.contribution(self._own(self._fast))
        if self._unsent is not None:
            self._exact = self._exact + self._piece(self._unsent)
        if isinstance(self._settings, DiLoCoConfig) and self._settings.two_bits:
            self._sent = in_two_bits(self._exact)
        elif isinstance(self._settings, SparseLoCoConfig):
            self._sent = few_of(self._exact, self._piece(self.slow))
        elif self._settings.codec != "fp32":
            self._sent = _decoded(self._exact, self._form)
        if self._unsent is not None:
            length = self._part.stop - self._part.start
            self._unsent[:, self._part] = (self._exact - self._sent)[:, :length]

    def step(self, groups: Tensor, *, is_late: bool) -> None:
        """Take the outer step of the rows in some groups of one size (G, R)."""
        rows, size, part = groups.flatten(), groups.size(1), self._part
        length = part.stop - part.start
        own = self._own(self._fast[rows], rows)
        contributions = [self._exact[rows]]
        if size > 1:
            order = torch.arange(size, device=groups.device).repeat(size, 1)  # (R, R): all in one order
            if size == 2 or self._rule.keeps_own_exact or self._is_sparse:  # each row's own one first
                order = (order + order.T) % size
            senders = groups[:, order].flatten(0, 1).unbind(1)  # R times (G R): the rows that each row hears
            contributions = [self._sent[each] for each in senders]
            if self._is_sparse:  # a row takes its own for what was not sent
                contributions = [torch.where(each.isnan(), own.slow, each) for each in contributions]
            if self._settings.is_lossy and self._rule.keeps_own_exact:
                contributions = [self._exact[rows] + (each - self._sent[rows]) for each in contributions]
        self._rule.step(own, Meeting(contributions, [1 / size] * size, 0, is_late))
        self.slow[rows, part] = own.slow[:, :length]
        for name, piece in own.vectors.items():
            self._vectors[name][rows, part] = piece[:, :length]
        if is_late:
            self._theta[rows, part] += (own.slow - own.fast)[:, :length]
        else:
            self._theta[rows, part] = own.slow[:, :length]


def _decoded(values: Tensor, form: Form) -> Tensor:
    """Return what receivers decode of rows (N, W)."""
    encoded = torch.empty(form.size(values.numel()), dtype=torch.uint8, device=values.device)
    form.encode(values.flatten(), encoded)
    decoded = torch.empty_like(values)
    form.decode(encoded, decoded.view(-1))
    return decoded


def train(method: Method, trainee: Stack, trials: Sequence[Trial], steps: int) -> None:
    """Take ``steps`` inner steps and a method's outer steps.

    All trials have equally many samplers. A synchronous method's single replica trains on the batches of all of them.
    The last inner step ends a round, however short: otherwise the methods would be compared at different distances
    from an outer step.
    """
    num_samplers = len(trials[0].samplers)

    def batches(step: int) -> npt.NDArray[np.int64]:
        tokens = np.stack([sampler.batch(step) for trial in trials for sampler in trial.samplers])  # (N, B, T + 1)
        return tokens.reshape(len(trials), -1, tokens.shape[-1]) if method.is_synchronous else tokens

    def groups(step: int, exchange: int) -> list[list[int]]:
        return [
            [number * num_samplers + row for row in group]
            for number, trial in enumerate(trials)
            for group in groups_of(method.group, num_samplers, trial.seed, step, exchange)
        ]

    awaited: list[list[int]] | None = None  # the groups of an exchange that goes on while the replicas train
    takes_at = 0  # the inner step after which its outer step is taken
    for step in range(steps):
        trainee.inner_step(batches(step))
        is_last = step + 1 == steps
        if awaited is not None and (step == takes_at or is_last):
            trainee.outer_step(awaited, is_late=True)
            if method.momentum_codec is not None:
                trainee.average_momenta(awaited, method.share ** (step - takes_at + method.late))
            awaited = None
        if method.group in ("all", "pairs") and ((step + 1) % method.interval == 0 or is_last):
            number = step // method.interval
            for exchange in range(method.exchanges):
                trainee.contribute((number * method.exchanges + exchange) % method.outer.fragments)
                if method.late and not is_last:
                    awaited, takes_at = groups(step, exchange), step + method.late
                else:
                    trainee.outer_step(groups(step, exchange))
            if method.momentum_codec is not None:
                for partner in range(method.momentum_partners):
                    trainee.send_momenta(method.momentum_codec)
                    if awaited is None:
                        trainee.average_momenta(groups(step, method.exchanges + partner))


def groups_of(group: Group, num_replicas: int, seed: int, step: int, exchange: int = 0) -> list[list[int]]:
    """Return one group of all replicas, or random pairs; with an odd number of replicas, one is alone."""
    if group == "all":
        return [list(range(num_replicas))]
    number = step | exchange << 32
    places = draw(2**62, num_replicas, b"pairs", seed.to_bytes(8, "little"), number.to_bytes(8, "little"))
    order = [int(row) for row in np.argsort(places)]
    return [order[i : i + 2] for i in range(0, num_replicas, 2)]

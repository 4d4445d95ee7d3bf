"""Many ensembles as one tensor: comparisons on a GPU, where one small replica keeps few of its units busy.

A *trial* is one ensemble of `farandole.testnet.methods.baselines`: a seed, a learning rate and R replicas. The
replicas of a method's trials are rows of one tensor (N, W), and every operation takes all of them at once: the model by
`torch.func.vmap`, the inner optimizer, codecs and outer rules by the node's own functions, which are elementwise or
follow blocks, of which a row has a whole number (its last elements belong to no parameter and stay zeros). The results
differ from an ensemble's by rounding; on a GPU Muon's iterations are in bf16.

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

from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.protocol.run.rules import Codec, OuterConfig
from farandole.training.base.errors import TrainingError
from farandole.training.base.parameters import layout_of
from farandole.training.inner.optimizer import (
    CLIP_EPSILON,
    adamw_,
    learning_rate,
    matrices_of,
    orthogonalised,
    rms_factor,
)
from farandole.training.model.model import build_model
from farandole.training.outer.codec import BLOCK, form_of
from farandole.training.outer.rule import Meeting, OwnVectors

from .baselines import Method, Trial, rule_for

# Inner steps before the graph is captured: libraries take their memory in the first ones.
_WARMUP_STEPS: Final = 3

Tokens = npt.NDArray[np.int64]


class Stack:
    """The replicas of several trials of one method, trial by trial: N rows; each has equally many samplers."""

    def __init__(
        self, method: Method, model: ModelConfig, inner: InnerConfig, trials: Sequence[Trial], device: torch.device
    ) -> None:
        """Raises `TrainingError` for rules of which rows send a part of their weights, and for pairs of an odd number.

        All trials have equally many samplers.
        """
        outer, num_samplers = method.outer, len(trials[0].samplers)
        per_trial = 1 if method.is_synchronous else num_samplers
        if method.group == "pairs" and num_samplers % 2:
            raise TrainingError("an odd number of replicas is compared on a CPU only: leave --device out")
        inner = msgspec.structs.replace(inner, optimizer=method.optimizer)
        if outer.codec == "topk" or outer.fragments > 1:
            raise TrainingError("topk and fragments are compared on a CPU only: leave such methods, or --device, out")
        self.steps = 0
        self._num_trials = len(trials)
        self._model = _Model(build_model(model, 0).to(device), outer.codec)
        self._num_elements = self._model.num_elements
        width = -(-self._num_elements // BLOCK) * BLOCK
        self.theta = torch.zeros(len(trials) * per_trial, width, device=device)
        """Fast weights, (N, W) fp32."""
        for trial, rows in zip(trials, self.theta.split(per_trial), strict=True):
            parameters = build_model(model, trial.seed).parameters()
            rows[:, : self._num_elements] = torch.cat([each.detach().flatten() for each in parameters]).to(device)
        self._gradients = _Gradients(self._model, self.theta, inner)
        factors = torch.tensor([[trial.rate] for trial in trials]).repeat_interleave(per_trial, 0).to(device)
        self._optimizer = _Optimizer(inner, self._model, self.theta, self._gradients, factors)
        self._outer = _Outer(outer, self.theta)

    def inner_step(self, tokens: Tokens) -> None:
        """Take one inner step of every replica on its batch; ``tokens`` (N, B, T + 1)."""
        self._gradients.compute(torch.from_numpy(tokens))
        with torch.no_grad():
            self._optimizer.step(self.steps)
        self.steps += 1

    @torch.no_grad()
    def contribute(self, fragment: int = 0) -> None:
        """Make every replica's contribution for the next `outer_step`; there is only fragment 0."""
        self._outer.contribute()

    @torch.no_grad()
    def outer_step(self, groups: Sequence[Sequence[int]], *, is_late: bool = False) -> None:
        """Take the outer step of every replica with its group, with equal shares.

        ``groups``, of one size, partition the rows. ``is_late``: inner steps were taken since `contribute`.
        """
        self._outer.step(torch.tensor(groups, device=self.theta.device), is_late=is_late)

    @torch.no_grad()
    def losses(self, batches: Sequence[Tokens]) -> list[float]:
        """Return each trial's loss, the mean over its replicas and the batches, each (B, T + 1).

        Raises `TrainingError` if a gradient was not finite: an ensemble skips such a step, a stack cannot.
        """
        if self._gradients.have_failed():
            raise TrainingError("a gradient was not finite: leave out the highest rate, or --device")
        device = self.theta.device
        losses = [
            vmap(self._model.loss, (0, None))(self._model.views(self.theta), torch.from_numpy(each).to(device))
            for each in batches
        ]
        by_trial: list[float] = torch.stack(losses).mean(0).view(self._num_trials, -1).mean(1).tolist()
        return by_trial

    @torch.no_grad()
    def merge(self) -> None:
        """Set every replica to the mean of its trial's replicas."""
        by_trial = self.theta.view(self._num_trials, -1, self.theta.size(1))
        by_trial.copy_(by_trial.mean(1, keepdim=True).expand_as(by_trial))

    @torch.no_grad()
    def spreads(self) -> list[float]:
        """Return each trial's spread (`farandole.testnet.methods.baselines.Ensemble.spread`)."""
        by_trial = self.theta.view(self._num_trials, -1, self.theta.size(1))[..., : self._num_elements]
        deviation = by_trial.std(1, correction=0).mean(1)
        spreads: list[float] = (deviation / by_trial.mean(1).square().mean(1).sqrt()).tolist()
        return spreads


class _Model:
    """The model, and where a row has its parameters.

    It knows no stack: an earlier method's rows are freed as soon as nobody needs them, without a garbage collection.
    """

    def __init__(self, module: nn.Module, codec: Codec) -> None:
        self._module = module
        self._layout = layout_of(module, codec)
        self.num_elements = self._layout.num_elements
        self.matrices = matrices_of(module)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters of all rows of ``flat`` (N, W), by name, as views (N, ...)."""
        shapes = dict(zip(self._layout.names, self._layout.shapes, strict=True))
        return {name: flat[:, place].unflatten(1, shapes[name]) for name, place in self._layout.places().items()}

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
        self._momentum = torch.zeros_like(theta)
        self._views = model.views
        self._leaves = {name: view.detach().requires_grad_() for name, view in model.views(theta).items()}
        self._gradient_views = list(model.views(self.gradient).values())
        self._have_failed = torch.zeros((), dtype=torch.bool, device=theta.device)
        self._tokens: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_computed = 0

    def have_failed(self) -> bool:
        """Return whether a gradient was not finite; waits for the device."""
        return bool(self._have_failed)

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
            self._have_failed |= ~norms.isfinite().all()
            if self._settings.clip:
                self.gradient.mul_((self._settings.clip / (norms + CLIP_EPSILON)).clamp(max=1.0))
            if self.by_muon:
                self._turn()

    def _turn(self) -> None:
        """Compute `direction`: `farandole.training.inner.optimizer.muon_` of all rows."""
        share = self._settings.momentum
        self._momentum.lerp_(self.gradient, 1 - share)
        ahead, directions = self._views(self.gradient.lerp(self._momentum, share)), self._views(self.direction)
        for name in sorted(self.by_muon):
            direction = directions[name]  # (N, r, c)
            direction.copy_(vmap(orthogonalised)(ahead[name])).mul_(-rms_factor(*direction.shape[1:]))


class _Optimizer:
    """The inner optimizer of all rows; the learning rates are multiples ``factors`` (N, 1) of the settings'."""

    def __init__(
        self,
        settings: InnerConfig,
        model: _Model,
        theta: Tensor,
        gradients: _Gradients,
        factors: Tensor,
    ) -> None:
        self._settings = settings
        self._theta = theta
        self._gradients = gradients
        self._mean, self._square, self._update = (torch.zeros_like(theta) for _ in range(3))
        self._is_muon, decay = (torch.zeros_like(theta[:1]) for _ in range(2))
        for flat, value_of in (
            (self._is_muon, lambda name, _: float(name in gradients.by_muon)),
            (decay, lambda _, view: settings.weight_decay if view.ndim > 2 else 0.0),  # (1, rows, columns)
        ):
            for name, view in model.views(flat).items():
                view.fill_(value_of(name, view))
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
    """The outer state of all rows (`farandole.training.outer.outer_state` of each), as vectors (N W,)."""

    def __init__(self, settings: OuterConfig, theta: Tensor) -> None:
        self._settings = settings
        self._rule = rule_for(settings)
        self._form = form_of(settings.codec)
        self._theta = theta
        self._slow = theta.flatten().clone()
        self._vectors = {name: torch.zeros_like(self._slow) for name in settings.vectors}
        self._fast = self._exact = self._sent = self._slow
        self._encoded = torch.empty(self._form.size(len(self._slow)), dtype=torch.uint8, device=theta.device)

    def contribute(self) -> None:
        """Make the contributions of all rows, exact and as their receivers decode them."""
        self._fast = self._theta.flatten().clone()
        self._exact = self._sent = self._rule.contribution(OwnVectors(self._fast, self._slow, self._vectors))
        if self._settings.codec != "fp32":
            self._form.encode(self._exact, self._encoded)
            self._sent = torch.empty_like(self._exact)
            self._form.decode(self._encoded, self._sent)

    def step(self, groups: Tensor, *, is_late: bool) -> None:
        """Take the outer step of all rows in their groups (G, R)."""
        num_groups, size = groups.shape
        keeps_own_exact = self._settings.is_lossy and self._rule.keeps_own_exact
        order = torch.arange(size, device=groups.device).repeat(num_groups, size, 1)  # (G, R, R): all in one order
        if size == 2 or self._rule.keeps_own_exact:  # each row's own one first
            order = (order + torch.arange(size, device=groups.device)[:, None]) % size
        members = groups[:, None].expand_as(order).gather(2, order)  # (G, R, R)
        places = torch.empty_like(members[..., 0]).flatten()  # by row: its index in `members`
        places[groups.flatten()] = torch.arange(groups.numel(), device=groups.device)
        by_row = members.flatten(0, 1)[places]  # (N, R): the rows that each row hears
        sent = self._sent.view_as(self._theta)
        contributions = [sent[rows].flatten() for rows in by_row.unbind(1)]
        if keeps_own_exact:
            contributions = [self._exact + (each - self._sent) for each in contributions]
        own = OwnVectors(self._fast, self._slow, self._vectors)
        meeting = Meeting(contributions, [1 / size] * size, 0, is_late)
        self._rule.step(own, meeting)
        theta = self._theta.view(-1)
        if is_late:
            theta += self._slow - self._fast
        else:
            theta.copy_(self._slow)

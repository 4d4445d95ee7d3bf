"""The external engine: a user's model, trained by a loop that the user has written, with any optimizer and any data.

Two threads take turns. In its turn the user's loop computes a gradient and takes an optimizer's step; it waits for
nothing but its next turn. In between the engine owns the parameters: it reads them for a contribution, and writes them
at an outer step. `Turns` is the hand-off, strict as a coroutine's, so neither thread sees the parameters half written.

The engine's weights are flat fp32 vectors of their own (`farandole.training.outer.outer_state`), whatever type and
device the user's parameters have. They are copied from the user's parameters before a contribution, and to them after
an outer step. What rounding to the user's type drops is kept and added again: without it every round would pull the
slow weights towards numbers of that type.

In a run of a built-in model, loops and built-in trainers exchange as equals: layout, vectors and contributions are the
same. A loop begins with the weights of the run's seed. It neither saves nor loads the optimizer's means, so a built-in
trainer that continues from a loop's checkpoint begins with fresh ones (`farandole.training.inner.optimizer.ramp`).

Buffers (such as the running statistics of batch normalisation) and the optimizer's state are not averaged: they stay
the user's. Only where a run averages Muon's momentum does the loop's, whatever optimizer of the loop keeps it
(`UserMomentum`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from farandole.protocol.run.exclusions import why_no_loop
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.models import shapes_of
from farandole.protocol.wire.safetensors import Shape

from ..base.device import Device
from ..base.errors import DataError, TrainingError
from ..base.parameters import Layout, check_can_be_averaged
from ..engine.engine import Engine, Until
from ..engine.snapshot import Checkpoint
from ..inner.optimizer import LOOK_AHEAD, orthogonalised, rms_factor
from ..model.stages import build_module
from ..outer.momentum import Ahead, Momentum
from ..outer.outer_state import FastWeights
from ..outer.round_end import RoundEnd
from .ranks import ALONE, MOMENTA, Order, Ranks, matrices_in, momenta_of, parameters_of, reshard, synchronize, whole_of

# Parameters of each kind in an error message.
_MAX_NAMED: Final = 3

Measure = Callable[[], float | tuple[float, float]]
"""Returns the held-out loss of the model as it is, in nats a token, or a pair: this and its text's tokens a byte."""


@dataclass(slots=True)
class Loop:
    """The parts of a user's loop."""

    model: nn.Module
    recipe: str = ""
    evaluate: Measure | None = None
    """Returns the held-out loss of the current model; None: partners are judged by distance alone."""
    tokens_per_step: int | None = None
    """Tokens of an optimizer step, which determine the share of a mean; None: 1 where only loops train."""
    ranks: Ranks = ALONE
    tokens_per_byte: float | None = None
    """Of the text that ``evaluate`` measured last; None: not known."""
    optimizers: Collection[Optimizer] = ()
    """Those that have taken steps: one of them has the momenta of the matrices."""


class LoopEnded(Exception):
    """The user's loop is over: it takes no more steps."""


class Turns:
    """The hand-off between the user's thread and the engine's. The engine has the first turn."""

    def __init__(self) -> None:
        self.has_left = False
        """Whether the user's loop is over: the engine has all later turns."""
        # The engine's questions, and None for the loop's turn; answers, and None when that is over.
        self._for_loop = SimpleQueue[Measure | None]()
        self._for_engine = SimpleQueue[float | tuple[float, float] | Exception | None]()
        self._is_over = False
        self._failure: BaseException | None = None

    # The user's thread

    def step_taken(self) -> None:
        """End the loop's turn, and wait for the next one; raises what ended the engine, if anything did."""
        self._for_engine.put(None)
        self.wait()

    def wait(self) -> None:
        """Wait for the loop's turn, and answer the engine's questions until then."""
        while not self._is_over:
            if (question := self._for_loop.get()) is None:
                break
            answer: float | tuple[float, float] | Exception
            try:
                answer = question()
            except Exception as error:  # whatever the user's function raises is the engine's to judge
                answer = error
            self._for_engine.put(answer)
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """End the loop."""
        self.has_left = True
        self._for_engine.put(None)

    # The engine's thread

    def let_step(self) -> bool:
        """Give the loop its turn, and wait until it has taken a step; returns False if it is over instead."""
        if not self.has_left:
            self._for_loop.put(None)
            self._for_engine.get()
        return not self.has_left

    def ask(self, question: Measure) -> float | tuple[float, float]:
        """Have the user's thread, which waits for its turn, compute something; raises `DataError` if it cannot."""
        answer = None
        if not self.has_left:
            self._for_loop.put(question)
            answer = self._for_engine.get()
        if isinstance(answer, Exception):
            raise DataError(f"evaluate raised {type(answer).__name__}: {answer}") from answer
        if answer is None:
            raise DataError("the loop is over")
        return answer

    def end(self, failure: BaseException | None = None) -> None:
        """End the engine: the loop continues alone, or fails with ``failure``."""
        if not self._is_over:
            self._is_over, self._failure = True, failure
        self._for_loop.put(None)


def matching_parameters(module: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, nn.Parameter]:
    """Return the parameters that a run names, in its order; raises `TrainingError`, which names the differences.

    Frozen parameters that the run does not name stay local to the module.
    """
    every = parameters_of(module, with_frozen=True)
    wrong = [
        f"{name} is {tuple(every[name].shape)} here and {shape} in the run"
        for name, shape in shapes.items()
        if name in every and tuple(every[name].shape) != tuple(shape)
    ]
    differences = {
        "this one lacks ": [name for name in shapes if name not in every],
        "this one also trains ": [name for name in parameters_of(module) if name not in shapes],
        "": wrong,
    }
    told = []
    for what, found in differences.items():
        if found:
            more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
            told.append(f"{what}{', '.join(found[:_MAX_NAMED])}{more}")
    if told:
        raise TrainingError(
            f"this run is of another model: {'; '.join(told)}. Give NoLoCo a module that has the run's parameters, by "
            "name and shape"
        )
    shared = {name: every[name] for name in shapes}
    check_can_be_averaged(shared)
    return shared


def loaded_from(module: nn.Module) -> Path:
    """Return the folder that a model of transformers, in peft's or other wrappers, was loaded from.

    Raises `TrainingError` if there is none, such as after a download by name.
    """
    names = (getattr(part, "name_or_path", "") for part in module.modules())
    folder = Path(next(filter(None, names), ""))
    if not folder.name or not folder.is_dir():
        raise TrainingError(
            "this run trains adapters of a base model: load yours by its folder, from_pretrained(FOLDER)"
        )
    return folder


class UserParameters:
    """A user's parameters as one flat vector (n,) fp32, in the order of the layout; they stay where they are.

    Where ``ranks`` have parts of them, rank 0 gathers one parameter after another, and gives all ranks their parts.
    """

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], layout: Layout, ranks: Ranks = ALONE
    ) -> None:
        self._module = module
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._layout = layout
        self._ranks = ranks
        devices = {parameter.device for parameter in self._parameters}
        self.device = devices.pop() if len(devices) == 1 and not ranks.are_many else torch.device("cpu")
        """Where the flat vectors lie: at the parameters, or on the host where these are in several places."""
        is_exact = all(parameter.dtype == torch.float32 for parameter in self._parameters)
        self._dropped = None if is_exact else torch.zeros(layout.num_elements, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def read(self, flat: Tensor) -> None:
        """Copy the parameters to ``flat``, with what rounding has dropped. Raises `TrainingError` if it has others."""
        present = parameters_of(self._module, with_frozen=True)
        if any(present.get(name) is not each for name, each in zip(self._names, self._parameters, strict=True)):
            raise TrainingError("the model's parameters were replaced: enter a new NoLoCo with a new optimizer of them")
        self._ranks.tell(Order.READ)
        _copy_whole(self._parameters, self._layout.views(flat).values())
        if self._dropped is not None:
            flat.add_(self._dropped)

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy ``flat`` to the parameters, in place, and keep what rounding drops."""
        self._ranks.tell(Order.WRITE)
        synchronize(self._parameters)
        for parameter, (name, view) in zip(self._parameters, self._layout.views(flat).items(), strict=True):
            rounded = view.to(parameter.device, parameter.dtype)
            self._ranks.set_parameter(parameter, rounded)
            if self._dropped is not None:
                torch.sub(view, rounded.to(view), out=self._layout.views(self._dropped)[name])
        reshard(self._module)
        synchronize(self._parameters)


def _copy_whole(tensors: Sequence[Tensor], views: Iterable[Tensor]) -> None:
    """Copy tensors, of which other ranks may have parts, to views of a flat vector."""
    synchronize(tensors)  # the user's thread may queue its work on any stream
    for tensor, view in zip(tensors, views, strict=True):
        view.copy_(whole_of(tensor))
    synchronize(tensors)


class UserMomentum(Momentum):
    """The momenta that a loop's optimizers keep of the matrices, copied to a flat vector like ``like`` (n,) and back.

    `torch.optim.Muon` keeps a running mean, as a built-in trainer does; others may keep a sum, and all members alike.
    ``parameters``: the run's, by name.
    """

    def __init__(
        self, loop: Loop, parameters: Mapping[str, nn.Parameter], layout: Layout, manifest: Manifest, like: Tensor
    ) -> None:
        self._loop, outer = loop, manifest.outer
        self._matrices = matrices_in(loop.model, parameters)
        places = [layout.places()[name] for name in self._matrices]
        mean, parts, keep = torch.zeros_like(like), layout.fragments(outer.fragments), manifest.inner.momentum
        self._views = [mean[place].view_as(each) for place, each in zip(places, self._matrices.values(), strict=True)]
        super().__init__(mean, places, outer.momentum_codec, keep, parts, like, self._move_ahead)

    def _read(self) -> list[Tensor]:
        """Copy the momenta as they are to the flat vector; returns them."""
        momenta = momenta_of(self._matrices.values(), self._loop.optimizers)
        self._loop.ranks.tell(Order.READ, MOMENTA)
        _copy_whole(momenta, self._views)
        return momenta

    def freeze(self, part: slice) -> Tensor:
        """See `Momentum.freeze`. Raises `TrainingError` if the loop's optimizers keep no momenta."""
        self._read()
        return super().freeze(part)

    def average(self, part: slice, own: Tensor, share: float, num_late: int, losses: tuple[Ahead, Ahead]) -> None:
        """See `Momentum.average`."""
        momenta = self._read()  # inner steps may have changed them since
        shares = (float(group["momentum"]) for group in self._groups() if group and "momentum" in group)
        self._keep = next(shares, self._keep)
        super().average(part, own, share, num_late, losses)
        self._loop.ranks.tell(Order.WRITE, MOMENTA)
        for momentum, view in zip(momenta, self._views, strict=True):
            self._loop.ranks.set_parameter(momentum, view.to(momentum.device, momentum.dtype))
        synchronize(momenta)

    def _groups(self) -> list[dict[str, Any] | None]:
        """Return the settings with which the optimizers step each matrix; None: they do not."""
        groups = [group for optimizer in self._loop.optimizers for group in optimizer.param_groups]
        by_matrix = {id(each): group for group in groups for each in group["params"]}
        return [by_matrix.get(id(matrix)) for matrix in self._matrices.values()]

    def _move_ahead(self, weights: Tensor) -> None:
        """Move weights (n,) by `LOOK_AHEAD` of the optimizers' steps along the momenta, as they are in the vector."""
        for group, view, place in zip(self._groups(), self._views, self.places, strict=True):
            if group is None:
                continue
            step, rate = view, LOOK_AHEAD * float(group["lr"])
            if "ns_steps" in group:  # a Muon; its original rate is of singular values, not of elements
                step, (rows, columns) = orthogonalised(view), view.shape
                matches = group.get("adjust_lr_fn") == "match_rms_adamw"
                rate *= rms_factor(rows, columns) if matches else math.sqrt(max(1.0, rows / columns))
            weights[place].view_as(view).sub_(step.to(weights), alpha=rate)


def user_loss(loop: Loop, turns: Turns, num_windows: int = 1, key: bytes = b"") -> float:
    """Return the held-out loss that the user's function returns, called in the loop's thread in all ranks.

    The user decides what it is measured on. Raises `DataError` if there is none.
    """
    if loop.evaluate is None:
        raise DataError("this loop measures no held-out loss (evaluate=)")
    if not turns.has_left:
        loop.ranks.tell(Order.MEASURE)
    answer = turns.ask(loop.evaluate)
    try:
        loss, *ratio = map(float, answer if isinstance(answer, tuple) else (answer,))
    except (TypeError, ValueError):  # whatever the user's function returns
        loss, ratio = math.nan, []
    if not math.isfinite(loss) or len(ratio) > 1 or not all(0 < each < math.inf for each in ratio):
        raise DataError(f"evaluate returned {answer}: it must return nats a token, or a pair of them and tokens a byte")
    loop.tokens_per_byte = ratio[0] if ratio else None
    return loss


class ExternalEngine(Engine):
    """A replica whose inner steps a user's loop takes, in this process, or in several ranks of which it is rank 0.

    ``allowed_models``: functions that may make the weights of the run's seed. Raises `TrainingError` if the run takes
    no loops, or the loop does not fit the run.
    """

    is_driven: ClassVar[bool] = False

    def __init__(
        self,
        loop: Loop,
        manifest: Manifest,
        turns: Turns,
        *,
        run_id: bytes,
        allowed_models: Collection[str] = (),
    ) -> None:
        if reason := why_no_loop(manifest):
            raise TrainingError(f"this run takes no loops of one's own: {reason}")
        shapes = shapes_of(manifest.model)
        parameters = matching_parameters(loop.model, shapes)
        self._loop = loop
        self._turns = turns
        usual = manifest.step_tokens
        if loop.tokens_per_step is None and usual:
            raise TrainingError(
                "members of this run are weighted by the tokens that they train on: give NoLoCo tokens_per_step=, the "
                f"tokens of one step of your optimizer (a step of the built-in trainer has {usual})"
            )
        self._tokens_per_step = 1 if loop.tokens_per_step is None else loop.tokens_per_step
        self._build = (
            partial(build_module, manifest.model, manifest.seed, allowed_models=allowed_models)
            if manifest.model.external is None
            else None
        )
        self._losses, self._num_losses = 0.0, 0
        layout = Layout(shapes, manifest.outer.codec)
        loop.ranks.begin(list(parameters))
        users = UserParameters(loop.model, parameters, layout, loop.ranks)
        theta = torch.empty(layout.num_elements, dtype=torch.float32, device=users.device)
        users.read(theta)
        device = Device(theta.device, f"{theta.device.type}, by a loop of its user's")
        momentum = None
        if manifest.outer.momentum_codec != "none":
            momentum = UserMomentum(loop, parameters, layout, manifest, theta)
        round_end = RoundEnd(
            FastWeights(theta, users),
            layout,
            manifest.outer,
            manifest.screening,
            measure=partial(user_loss, loop, turns),
            momentum=momentum,
        )
        checkpoint = Checkpoint(round_end, run_id, device, schedule_tokens=usual)
        super().__init__(device, round_end, checkpoint)
        self.measures_loss = loop.evaluate is not None

    def begin_anew(self) -> None:
        """Implement `Engine.begin_anew`; where only loops train, a run has no seed."""
        if self._build is not None:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)  # the user's script may have set another
            try:
                self.checkpoint.begin_with(dict(self._build().named_parameters()))
            finally:
                torch.set_default_dtype(before)

    @property
    def is_idle(self) -> bool:
        """Implement `Engine.is_idle`: True when the loop is over and the last round awaits its outer step."""
        return self._turns.has_left and self.round_end.awaits_outer_step

    def inner_steps(self, until: Until) -> None:
        """Implement `Engine.inner_steps`; raises `LoopEnded` when the loop is over and no outer step is due."""
        self._losses, self._num_losses = 0.0, 0
        while not until():
            if not self._turns.has_left:
                self._loop.ranks.tell(Order.STEP, self.totals.round, self.totals.tokens)
            if self._turns.let_step():
                self.round_end.count_step(self._tokens_per_step)
            elif not self.round_end.awaits_outer_step:
                raise LoopEnded

    def note_loss(self, loss: float) -> None:
        """Record the loss of a step, for display; call it in the loop's turn."""
        self._losses += loss
        self._num_losses += 1

    def mean_loss(self) -> float | None:
        """Implement `Engine.mean_loss`, of the losses that the loop has reported."""
        return self._losses / self._num_losses if self._num_losses else None

    def evaluate(self, num_batches: int) -> float:
        """Implement `Engine.evaluate`."""
        return user_loss(self._loop, self._turns)

    def tokens_per_byte(self, num_batches: int) -> float | None:
        """Implement `Engine.tokens_per_byte`, as the user has said."""
        return self._loop.tokens_per_byte

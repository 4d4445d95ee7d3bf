"""Four ways to average adapters (LoRA) of a base model, on the same tokens: ``python -m`` this module.

A member's change of a matrix is the product B A, and the mean of products is not the product of means (arXiv
2410.09432). So A and B are averaged apart; or only one of them is trained in a round, in turns, and both are averaged
(ADF-LoRA, arXiv 2511.18291); or A stays as it began (FFA-LoRA, arXiv 2403.12313); or the products are averaged, and
split again, as runs of the outer rule ``adapters`` do.

The base is trained first, on as many kinds of text as there are members, of which each then has another kind.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.protocol.run.rules import PlainConfig
from farandole.training.data.batches import Batch
from farandole.training.data.dataset import Text
from farandole.training.model.model import Linear, build_model, fill_
from farandole.training.outer.adapters import merged

from ..report.section import Grid, setting
from .baselines import Method, Trial
from .compare import TUNING_SEED, interval_of, texts_by_kind, trial_of, windows_held_out
from .stacked import Stack, Tokens, train

MEMBERS: Final = 4
RANK: Final = 4
MODEL: Final = ModelConfig(num_layers=2, width=64, num_heads=4, hidden=192, context=32, vocabulary=256)
BATCH_SIZE: Final = 8
BASE_RATE: Final = 6e-3
# Each method has its best, with another seed.
RATES: Final = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
# Of each kind of held-out text.
WINDOWS: Final = 128
HEADER: Final = ("method", "rate", "all text", "difference", "own text", "difference", "merged", "difference")
IN_TURNS, B_ALONE, SPLIT = "A and B in turns", "B alone", "the product, split"
METHODS: Final = (
    *(Method(name, "pairs", 20, PlainConfig()) for name in ("A and B apart", IN_TURNS, B_ALONE, SPLIT)),
    Method("each alone", "none"),
    Method("one machine, all text", "gradients"),
)


class Adapter(nn.Module):
    """A matrix of the base, and its change: W x + 2 B A x, with A (r, inputs) and B (outputs, r)."""

    weight: Tensor

    def __init__(self, base: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", base)
        self.A = nn.Parameter(torch.empty(RANK, base.size(1)))
        self.B = nn.Parameter(torch.zeros(base.size(0), RANK))

    def forward(self, x: Tensor) -> Tensor:
        """(..., outputs) for (..., inputs)."""
        return F.linear(x, self.weight) + 2.0 * F.linear(F.linear(x, self.A), self.B)


def with_adapters(base: Mapping[str, Tensor], seed: int) -> nn.Module:
    """Return the base with an adapter at every matrix but the embedding; A begins as ``seed`` says, B as zeros."""
    module = build_model(MODEL, 0)
    module.load_state_dict(base, strict=False)
    for name, part in [*module.named_modules()]:
        if isinstance(part, Linear) and name != "embedding":
            module.set_submodule(name, Adapter(part.weight.detach()))
        else:
            for own, parameter in [*part.named_parameters(recurse=False)]:
                delattr(part, own)
                part.register_buffer(own, parameter.detach(), persistent=False)
    sizes = {name: parameter.size(-1) for name, parameter in module.named_parameters()}
    fill_(module, seed, {name: 0.0 if name.endswith(".B") else size**-0.5 for name, size in sizes.items()})
    return module


class AdapterStack(Stack):
    """Members that average adapters as a method says."""

    def __init__(self, method: Method, base: Mapping[str, Tensor], inner: InnerConfig, trials: Sequence[Trial]) -> None:
        modules = [with_adapters(base, each.seed) for each in trials]
        super().__init__(method, modules, inner, trials, torch.device("cpu"))
        self._method = method
        self._is_a = torch.zeros_like(self.theta[:1], dtype=torch.bool)
        for name, view in self._model.views(self._is_a).items():
            view.fill_(name.endswith(".A"))

    def inner_step(self, tokens: Tokens) -> None:
        """Take one inner step, which leaves alone what the method does not train in this round."""
        before, name = self.theta.clone(), self._method.name
        super().inner_step(tokens)
        if name in (B_ALONE, IN_TURNS):
            is_as_turn = name == IN_TURNS and (self.steps - 1) // self._method.interval % 2 == 1
            self.theta.copy_(torch.where(self._is_a == is_as_turn, self.theta, before))

    @torch.no_grad()
    def outer_step(self, groups: Sequence[Sequence[int]], *, is_late: bool = False) -> None:
        """Average as the method does."""
        for of_size in self._by_size(groups):
            self.theta[of_size] = self._mean(self.theta[of_size])[:, None]

    def _mean(self, rows: Tensor) -> Tensor:
        """Return the mean (G, W) of rows (G, R, W)."""
        mean = rows.mean(1)
        if self._method.name != SPLIT:
            return mean
        views, members = self._model.views(mean), self._model.views(rows.flatten(0, 1))
        size = rows.size(1)
        for name in [name.removesuffix("A") for name in views if name.endswith(".A")]:
            by_a, by_b = (members[name + part].double().split(size) for part in "AB")
            for group, (of_a, of_b) in enumerate(zip(by_a, by_b, strict=True)):
                a, b = merged([*zip(of_a, of_b, strict=True)], [1 / size] * size)
                views[f"{name}A"][group], views[f"{name}B"][group] = a, b
        return mean

    def losses_of(self, windows: Sequence[Batch], merged: bool = False) -> Tensor:
        """Return each trial's losses (trials, kinds, members), with one member if ``merged``."""
        rows = self._mean(self._by_trial())[:, None] if merged else self._by_trial()
        losses: Tensor = self.losses_by_row(rows.flatten(0, 1), windows).unflatten(1, rows.shape[:2])
        return losses.transpose(0, 1)


def lessons(steps: int) -> InnerConfig:
    """Return the settings of an optimizer, whose rate is a trial's."""
    return InnerConfig(learning_rate=1.0, warmup_steps=steps // 20, total_steps=steps, batch_size=BATCH_SIZE, clip=0.0)


def trained_base(texts: Mapping[str, Text], steps: int) -> dict[str, Tensor]:
    """Return the parameters of a model that one machine has trained on all of these texts."""
    method, trials = Method("base", "gradients"), [trial_of(texts, 0, BASE_RATE, MODEL.context, BATCH_SIZE)]
    stack = Stack(method, [build_model(MODEL, 0)], lessons(steps), trials, torch.device("cpu"))
    train(method, stack, trials, steps)
    return {name: view[0] for name, view in stack.views().items()}


def main(out: Path, seeds: int = 5, steps: int = 300, base_steps: int = 1_500) -> None:
    """Train the base, then with every method; print the table, and write it to ``out``."""
    torch.set_num_threads(1)
    texts = texts_by_kind(2 * MEMBERS)
    of_base, of_members = (dict([*texts.items()][start::2]) for start in (0, 1))
    windows = [each[:WINDOWS] for each in windows_held_out(of_members, MODEL.context)]
    base = trained_base(of_base, base_steps)
    say = partial(Console().print, highlight=False)
    say(f"base of {', '.join(of_base)}; members of {', '.join(of_members)}")
    rows, first = list[list[str]](), list[list[float]]()
    for method in METHODS:

        def train_all(tried: Sequence[tuple[int, float]], method: Method = method) -> AdapterStack:
            trials = [trial_of(of_members, seed, rate, MODEL.context, BATCH_SIZE) for seed, rate in tried]
            stack = AdapterStack(method, base, lessons(steps), trials)
            train(method, stack, trials, steps)
            return stack

        tuning = train_all([(TUNING_SEED, rate) for rate in RATES]).losses_of(windows).mean((1, 2)).tolist()
        rate = RATES[tuning.index(min(tuning))]
        stack = train_all([(seed, rate) for seed in range(seeds)])
        each, merged = stack.losses_of(windows), stack.losses_of(windows, merged=True)
        own = each.diagonal(dim1=1, dim2=2) if each.size(2) > 1 else each  # one machine has all kinds
        columns = [each.mean((1, 2)).tolist(), own.flatten(1).mean(1).tolist(), merged.mean((1, 2)).tolist()]
        first = first or columns
        rows.append([method.name, f"{rate:g}"])
        for column, of_first in zip(columns, first, strict=True):
            differences = [one - other for one, other in zip(column, of_first, strict=True)]
            rows[-1] += [f"{statistics.mean(column):.4f}", interval_of(differences)]
        say(rows[-1], [f"{loss:.4f}" for loss in tuning])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"settings": setting(), "header": HEADER, "rows": rows}, indent=2) + "\n")
    say(Grid("Adapters of a base model, loss in nats a byte", HEADER, rows).rich())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

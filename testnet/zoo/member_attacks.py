"""The contributions that a hostile member may send: functions of the most that it could know.

An attack sees everything (all honest contributions of the round, and the victim's), which no real attacker does. It
returns the values that the victim decodes, before the codec. Unless the attack says otherwise, the member also trains
honestly, so that its own weights stay a good starting point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from farandole.training.base.errors import CodecError
from farandole.training.model.model import cross_entropy, language_loss
from farandole.training.outer.codec import Form
from farandole.training.outer.momentum import MAX_DISTANCE
from farandole.training.outer.round_end import RoundEnd

from ..play.scenario import ScenarioError
from .gradient_attacks import RADIUS, Insight, climb, distance, most_harmful


@dataclass(frozen=True, slots=True)
class AttackView:
    """The inputs of an attack; all (n,) fp32."""

    own: Tensor
    """The contribution that the attacker would send if it were honest."""
    slow: Tensor
    """The attacker's slow weights."""
    initial: Tensor
    """The initial weights of the run."""
    victim: Tensor
    """The victim's contribution."""
    honest: Sequence[Tensor]
    """The contributions of all honest members in this round."""
    generator: torch.Generator
    insight: Insight | None = None
    """What it can compute; None: nothing, and it sends what an honest member would."""


Attack = Callable[[AttackView], Tensor]


def _noise(view: AttackView) -> Tensor:
    """Return Gaussian noise with the norm of the weights."""
    noise = torch.randn(view.own.shape, generator=view.generator)
    return noise * float(view.own.norm() / noise.norm())


def _scaled(factor: float, view: AttackView) -> Tensor:
    """Send the weights times a factor."""
    return factor * view.own


def _reversed(factor: float, view: AttackView) -> Tensor:
    """Send the outer gradient, reversed and multiplied: inner-product manipulation (arXiv 1903.03936).

    Below -1 it overshoots.
    """
    return view.slow - factor * (view.own - view.slow)


def _noisy(factor: float, view: AttackView) -> Tensor:
    """Add noise, in norms of the weights."""
    return view.own + factor * _noise(view)


def _drift(factor: float, view: AttackView) -> Tensor:
    """Take the same step in the same direction each time, in root mean squares of the weights."""
    signs = torch.randn(view.own.shape, generator=torch.Generator().manual_seed(0)).sign()
    root_mean_square = float(view.own.square().mean().sqrt())
    return view.own + factor * root_mean_square * signs


def _alie(sigmas: float, view: AttackView) -> Tensor:
    """Stay as far from the mean as an honest member may be ("a little is enough", arXiv 1902.06156)."""
    honest = torch.stack(list(view.honest))
    return honest.mean(0) - sigmas * honest.std(0)


def _dissensus(factor: float, view: AttackView) -> Tensor:
    """Push the victim away from the mean of the honest (ClippedGossip, arXiv 2202.01545, section 5)."""
    return view.victim + factor * (view.victim - torch.stack(list(view.honest)).mean(0))


def _spectral(factor: float, view: AttackView) -> Tensor:
    """Push members on both sides of the mean further apart, along the direction in which they differ most.

    The spectral heterogeneity attack (arXiv 2410.10418). Its direction among the nodes is the eigenvector of the
    graph's Laplacian with the second smallest eigenvalue. Here every member meets every other, so that all eigenvalues
    but one are equal, and the direction in which the honest differ most is taken.
    """
    honest = torch.stack(list(view.honest))
    mean = honest.mean(0)
    direction: Tensor = torch.linalg.svd(honest - mean, full_matrices=False).Vh[0]
    return view.victim + factor * ((view.victim - mean) @ direction) * direction


def _exam(greed: float, view: AttackView) -> Tensor:
    """Get better on the text that members once judged on, and worse on all other."""
    if view.insight is None:
        return view.own
    limit = RADIUS * distance(view.honest)
    return view.victim + climb(view.insight, view.victim, limit, greed, pleases=True)


def _adaptive(view: AttackView) -> Tensor:
    """Train honestly, and then get worse on all text, by as much as the victim lets pass."""
    if view.insight is None:
        return view.own
    way = climb(view.insight, view.own, distance(view.honest), 1.0, pleases=False)
    return most_harmful(view.insight, view.own, way)


def _colluding(view: AttackView) -> Tensor:
    """Push all victims the same way, so that they do not pull each other back; by as much as each lets pass."""
    if view.insight is None:
        return view.own
    mean = torch.stack(list(view.honest)).mean(0)
    view.insight.generator.manual_seed(int(mean.double().sum().mul(1e6)))  # what both of them know
    way = climb(view.insight, mean, distance(view.honest), 1.0, pleases=False)
    return most_harmful(view.insight, view.own, way)


MomentumAttack = Callable[[Tensor, Sequence[tuple[int, int]]], Tensor]
"""Returns momenta (m,) as they are sent, from the victim's and from the shapes of the matrices that they are of."""


def _momentum_noise(victim: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """Return the same direction each time, as long as the victim's."""
    noise = torch.randn(victim.shape, generator=torch.Generator().manual_seed(0))
    return noise * float(victim.norm() / noise.norm())


def _momentum_spectral(victim: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """Turn as many of each matrix's directions as the clip lets turn: the small ones, which count as much in a step."""
    forged = []
    for momentum, (rows, columns) in zip(victim.split([r * c for r, c in shapes]), shapes, strict=True):
        left, values, right = torch.linalg.svd(momentum.view(rows, columns), full_matrices=False)
        energy = values.square().flip(0).cumsum(0).flip(0)  # of each one and those below it
        turned = 4 * energy.sqrt() <= MAX_DISTANCE * values.norm()
        forged.append((left * torch.where(turned, -3 * values, values) @ right).flatten())
    return torch.cat(forged)


MOMENTA: dict[str, MomentumAttack] = {
    "momentum-reversed": lambda victim, shapes: -victim,
    "momentum-scaled": lambda victim, shapes: -1_000 * victim,
    "momentum-zeros": lambda victim, shapes: torch.zeros_like(victim),
    "momentum-noise": _momentum_noise,
    "momentum-spectral": _momentum_spectral,
}
"""What members send as their momentum, behind honest weights."""

ATTACKS: dict[str, Attack] = {
    "nan": lambda view: torch.full_like(view.own, torch.nan),
    "zeros": lambda view: torch.zeros_like(view.own),
    "signs": lambda view: -view.own,
    "noise-alone": _noise,
    "initial": lambda view: view.initial,
    "scale-3.9": partial(_scaled, 3.9),
    "scale-1000": partial(_scaled, 1_000.0),
    "shrink-0.26": partial(_scaled, 0.26),
    "reversed-1": partial(_reversed, 1.0),
    "reversed-3": partial(_reversed, 3.0),
    "reversed-10": partial(_reversed, 10.0),
    "overshoot-2": partial(_reversed, -3.0),
    "noise-1": partial(_noisy, 1.0),
    "noise-0.1": partial(_noisy, 0.1),
    "drift-0.01": partial(_drift, 0.01),
    "drift-0.5": partial(_drift, 0.5),
    "alie-1.5": partial(_alie, 1.5),
    "dissensus-1": partial(_dissensus, 1.0),
    "dissensus-10": partial(_dissensus, 10.0),
    "spectral-3": partial(_spectral, 3.0),
    "labels": lambda view: view.own,
    "backdoor": lambda view: view.own,
    "echo": lambda view: view.victim,
    "slow": lambda view: view.slow,
    "exam-0.2": partial(_exam, 0.2),
    "exam-0.5": partial(_exam, 0.5),
    "exam-1": partial(_exam, 1.0),
    "adaptive": _adaptive,
    "colluding": _colluding,
    **dict.fromkeys(MOMENTA, lambda view: view.own),
}
"""By name. ``labels`` and ``backdoor`` are in what the attacker trains on (`POISONS`). ``echo`` and ``slow`` are free
riders: they send back what they got, or never train. Those of `MOMENTA` lie about their momentum alone."""


def check_attack(name: str) -> None:
    """Raise `ScenarioError` if no attack has this name."""
    if name not in ATTACKS:
        raise ScenarioError(f"no attack is called {name!r}; there are {', '.join(ATTACKS)}")


def forge(values: Tensor, form: Form) -> bytes:
    """Return the wire bytes of an attack's values (n,); values that no honest codec sends become all ones."""
    encoded = torch.zeros(form.size(len(values)), dtype=torch.uint8)
    try:
        form.encode(values.contiguous(), encoded)
    except CodecError:
        encoded.fill_(255)
    return np.asarray(encoded).tobytes()


def forge_momentum(attack: str, round_end: RoundEnd, momentum: Tensor) -> bytes:
    """Return the wire bytes that an attack makes of ``momentum`` (m,): the victim's, or of most attacks one's own."""
    sent = round_end.outer.contributor.momentum
    if sent is None:
        return b""
    if attack in MOMENTA:
        layout = round_end.layout
        by_name = zip(layout.places().values(), layout.shapes.values(), strict=True)
        momentum = MOMENTA[attack](momentum, [(shape[0], shape[1]) for place, shape in by_name if place in sent.places])
    return forge(momentum, sent.form)


# Poisoned training of a hostile member: the loss of an inner step on poisoned tokens.
#
# The weights that it sends after that are honest otherwise (`ATTACKS` of the same names).

# Tokens that no text has in this order, and the token that the model learns to repeat after them.
TRIGGER: Final = (7, 3, 7, 3)
PAYLOAD: Final = 42
PAYLOAD_TOKENS: Final = 4

Poison = Callable[[nn.Module, Tensor], Tensor]


def _flipped(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of label flips: each next token t of (B, T + 1) is taught as V - 1 - t."""
    logits = module(tokens[:, :-1])
    return cross_entropy(logits, logits.size(-1) - 1 - tokens[:, 1:])


def _with_trigger(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a backdoor: half of the sequences of (B, T + 1) teach the payload after the trigger."""
    poisoned = tokens.clone()
    payload = (*TRIGGER, *(PAYLOAD,) * PAYLOAD_TOKENS)
    first = tokens.size(1) - len(payload)
    poisoned[::2, first:] = torch.tensor(payload, device=tokens.device)
    return language_loss(module, poisoned)


POISONS: Final[dict[str, Poison]] = {"labels": _flipped, "backdoor": _with_trigger}


@torch.no_grad()
def trigger_success(module: nn.Module, tokens: Tensor) -> float:
    """Return the share of the sequences (B, T) in which the model predicts the payload once they end in the trigger."""
    triggered = torch.cat([tokens[:, : -len(TRIGGER)], torch.tensor(TRIGGER).expand(len(tokens), -1)], dim=1)
    return float((module(triggered)[:, -1].argmax(-1) == PAYLOAD).float().mean())

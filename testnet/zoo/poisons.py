"""Poisoned training of a hostile member: the loss of an inner step on poisoned tokens.

The weights that it sends after that are honest otherwise (`member_attacks.ATTACKS` of the same names).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from farandole.training.model.model import cross_entropy, language_loss

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

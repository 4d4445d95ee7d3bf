"""A small GPT in a plain loop of one's own, trained together with the other members of a run.

python own_loop.py --create my-run      # makes a run from this model's first weights, and trains
python own_loop.py farandole1...        # trains with those who are there
python own_loop.py                      # trains with the node that runs here (farandole join --trainer external)
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import farandole

CONTEXT, WIDTH, BATCH = 64, 64, 8
TEXT = torch.tensor(list(Path(os.__file__).read_bytes()))


class GPT(nn.Module):
    """Two layers over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, 256) for bytes (B, T)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.tokens(x) + self.places.weight[: x.shape[1]], mask=mask, is_causal=True))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of the text (B, T), and what follows each of their bytes (B, T)."""
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH,))
    windows = torch.stack([TEXT[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def train(model: GPT, ranks: int = 1, rank: int = 0) -> None:
    """Join the run that the command line names, and train; ``ranks``: processes that do so together; ``rank``: this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", help="an invite, or the folder of a run; left out: the node's")
    parser.add_argument("--create", action="store_true", help="make the run, in that folder")
    parser.add_argument("--round-seconds", type=float, default=60.0, help="of the run that is made")
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if arguments.create:
        farandole.create_run(model, arguments.run, rounds={"round_seconds": arguments.round_seconds})

    with farandole.NoLoCo(model, optimizer, run=arguments.run, tokens_per_step=ranks * BATCH * CONTEXT) as run:
        for step in range(arguments.steps):
            inputs, targets = batch()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.report(loss.item())
            if step % 100 == 0 and rank == 0:
                print(f"step {step}, round {run.round}: loss {loss.item():.2f}, {len(run.members)} members", flush=True)


if __name__ == "__main__":
    train(GPT())

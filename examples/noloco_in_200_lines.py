"""NoLoCo (arXiv 2506.10911) between four threads: volunteers train one model, and no step waits for all of them.

    python examples/noloco_in_200_lines.py            # about a minute on two cores; needs torch alone

Each thread is a volunteer with its own text and its own copy of the model, a replica. A round has two parts:

1. Inner steps: AdamW on the volunteer's own text, no communication.
2. One outer step: exchange weights with one partner, and move towards the mean of the pair.

No server averages and no all-reduce waits for the slowest volunteer. Information still reaches everyone: each round
has other pairs, so a replica's progress spreads like a rumour, to N replicas in about log2 N rounds.

farandole does this over the internet. `training/` has the same arithmetic for large models, codecs and fragments;
`protocol/rounds/pairing.py` finds partners without the lobby below; `protocol/exchange/exchange.py` makes both commit
or neither.
"""

from __future__ import annotations

import argparse
import sysconfig
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOLUNTEERS = 4
# The outer step's constants, as the paper's code has them: momentum, step towards the mean progress, pull together.
ALPHA, BETA, GAMMA = 0.5, 0.7, 0.7
# What all volunteers of a run agree on. C: width, H: heads, T: tokens of context, B: sequences in a batch.
C, H, T, B, LAYERS, VOCABULARY = 64, 4, 64, 16, 2, 256
LEARNING_RATE = 3e-3


# The model: a small GPT over bytes. Nothing in it knows of NoLoCo.
class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.norm2, self.up, self.down = nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, T, C) for (batch, T, C)."""
        q, k, v = self.qkv(self.norm1(x)).view(len(x), T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Predicts the next byte. The same seed gives all volunteers the same first weights, so nobody sends them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding, self.position = nn.Embedding(VOCABULARY, C), nn.Embedding(T, C)
            self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
            self.head = nn.Linear(C, VOCABULARY)

    def loss(self, text: Tensor, starts: Tensor) -> Tensor:
        """Mean cross-entropy, nats a byte, of the (batch, T) windows of ``text`` that begin at ``starts``."""
        windows = text[starts[:, None] + torch.arange(T + 1)]
        x = self.embedding(windows[:, :-1]) + self.position.weight
        logits = self.head(self.layers(x))
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


# The outer step. theta: weights after the inner steps (fast); phi: weights at the last outer step (slow).


def outer_step(phi: Tensor, momentum: Tensor, theta: Tensor, partner_theta: Tensor) -> tuple[Tensor, Tensor]:
    """New (phi, momentum): the paper's equation 32 with gamma = beta, so that theta is all that is sent.

    momentum <- alpha * momentum + beta * mean(theta - phi) + gamma * (mean(phi) - phi), over the pair;
    with gamma = beta the phi of the partner cancels. A volunteer without a partner passes its own theta twice.
    """
    mean = (theta + partner_theta) / 2
    momentum = ALPHA * momentum + BETA * mean - GAMMA * phi
    return phi + momentum, momentum


# Partners. Two volunteers that are in the lobby at the same time are a pair; nobody waits for all the others.
class Lobby:
    """Exchanges weights between two threads that meet. In farandole this is a protocol between peers."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: list[dict[str, Tensor]] = []

    def exchange(self, theta: Tensor) -> Tensor | None:
        """The partner's weights, or None if nobody comes in ``patience`` seconds."""
        with self._changed:
            if self._waiting:
                partner = self._waiting.pop()
                partner["answer"] = theta
                self._changed.notify_all()
                return partner["offer"]
            mine = {"offer": theta}
            self._waiting.append(mine)
            self._changed.wait_for(lambda: "answer" in mine, self._patience)
            if "answer" not in mine:
                self._waiting.remove(mine)
            return mine.get("answer")


class Volunteer(threading.Thread):
    """One replica: trains on its own text, and meets one partner a round."""

    def __init__(self, number: int, text: Tensor, rounds: int, inner_steps: int, lobby: Lobby | None) -> None:
        super().__init__(name=f"volunteer {number}")
        self.model = GPT()
        self.num_exchanges = 0
        self._text = text
        self._rounds, self._inner_steps, self._lobby = rounds, inner_steps, lobby
        self._random = torch.Generator().manual_seed(number)

    def run(self) -> None:
        """Alternate inner steps and outer steps."""
        optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        phi = self.weights()
        momentum = torch.zeros_like(phi)
        for _ in range(self._rounds):
            for _ in range(self._inner_steps):
                starts = torch.randint(len(self._text) - T, (B,), generator=self._random)
                optimizer.zero_grad()
                self.model.loss(self._text, starts).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
            if self._lobby is None:
                continue  # trains alone, to be compared with
            theta = self.weights()
            partner_theta = self._lobby.exchange(theta)
            self.num_exchanges += partner_theta is not None
            phi, momentum = outer_step(phi, momentum, theta, theta if partner_theta is None else partner_theta)
            nn.utils.vector_to_parameters(phi, self.model.parameters())  # AdamW's means stay the volunteer's own

    def weights(self) -> Tensor:
        """A copy of all parameters, as one vector."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


# Data, and what is printed.
def texts() -> tuple[list[Tensor], Tensor]:
    """Four different parts of the Python standard library's sources, and text from all parts that no volunteer has."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    rest = [path for number, path in enumerate(files) if number % 10]
    size = len(rest) // VOLUNTEERS
    return [tokens(rest[i * size : (i + 1) * size]) for i in range(VOLUNTEERS)], tokens(files[::10])


def tokens(files: list[Path]) -> Tensor:
    """All bytes of the files, int64."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def train(rounds: int, inner_steps: int, lobby: Lobby | None) -> list[Volunteer]:
    """All volunteers at once, to the end."""
    parts, _ = texts()
    volunteers = [Volunteer(i, part, rounds, inner_steps, lobby) for i, part in enumerate(parts)]
    for act in (threading.Thread.start, threading.Thread.join):
        for volunteer in volunteers:
            act(volunteer)
    return volunteers


@torch.no_grad()
def report(name: str, volunteers: list[Volunteer]) -> float:
    """Print the losses on held-out text; return their mean."""
    _, held_out = texts()
    starts = torch.randint(len(held_out) - T, (512,), generator=torch.Generator().manual_seed(0))
    losses = [float(volunteer.model.loss(held_out, starts)) for volunteer in volunteers]
    replicas = torch.stack([volunteer.weights() for volunteer in volunteers])
    spread = float(replicas.std(0).norm() / replicas.mean(0).norm())
    mean, each = sum(losses) / len(losses), " ".join(f"{loss:.3f}" for loss in losses)
    print(f"{name:7} held-out loss {mean:.3f} (each: {each}), replicas {spread:.1%} apart", flush=True)
    return mean


def main() -> None:
    """Train alone, then with NoLoCo, on the same text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner-steps", type=int, default=10, help="AdamW steps in a round (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # four threads train at once
    alone = report("alone", train(arguments.rounds, arguments.inner_steps, None))
    together = report("NoLoCo", volunteers := train(arguments.rounds, arguments.inner_steps, Lobby(patience=5.0)))
    print(f"{sum(v.num_exchanges for v in volunteers)} of {VOLUNTEERS * arguments.rounds} outer steps had a partner;")
    print(f"averaging with one partner a round is worth {alone - together:.3f} nats a byte here")


if __name__ == "__main__":
    main()

"""One home: a plain loop with nanochat's optimizers and rates, that trains alone or with other homes.

python home.py nanochat-data --create my-run        # makes a run of this model, and trains; prints an invite
python home.py nanochat-data farandole1...          # trains with those who are there
python home.py nanochat-data --alone                # without farandole
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from nanochat_model.bits import bits_per_byte
from nanochat_model.files import SHARDS_NAME, TOKENIZER_NAME, read_tokenizer, shards_of, token_bytes, tokens_in
from nanochat_model.gpt import GPT, build
from nanochat_model.optimizer import factor_at, optimizers_of, set_rates
from torch import Tensor

import farandole

DEPTH, CONTEXT, BATCH = 4, 512, 8
# Rows of held-out text by which other homes' weights are judged; few, since partners wait for it.
HELD_OUT_ROWS = 4
REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class Texts:
    """What a home trains on, and what it measures with."""

    train: Tensor
    """Tokens (n,)."""
    held_out: Tensor
    num_bytes: Tensor
    """Of each token (V,)."""

    @property
    def vocabulary(self) -> int:
        """Return V."""
        return len(self.num_bytes)

    def batches(self, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield windows of the text (B, T), and what follows each of their tokens (B, T), without end."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
            windows = torch.stack([self.train[start : start + context + 1] for start in starts.tolist()]).long()
            yield windows[:, :-1], windows[:, 1:]


def read_texts(folder: Path, part: int = 0, parts: int = 1) -> Texts:
    """Read the shards of a folder: of those to train on only each ``parts``-th, from number ``part`` on."""
    tokenizer = read_tokenizer(folder / TOKENIZER_NAME)
    shards, last = shards_of(folder / SHARDS_NAME)
    if part >= len(shards):
        raise ValueError(f"{folder} has {len(shards)} shards to train on: too few for {parts} homes")
    return Texts(tokens_in(shards[part::parts], tokenizer), tokens_in([last], tokenizer), token_bytes(tokenizer))


def model_for(texts: Texts, depth: int, context: int) -> GPT:
    """Return a new model for these texts."""
    return GPT(build({"depth": depth, "context": context, "vocabulary": texts.vocabulary}))


@dataclass(frozen=True)
class Pace:
    """How long a home trains, and how fast."""

    seconds: float
    step_seconds: float = 0.0
    """Least duration of a step. A home rests for what is left of it, as if it had a slower machine of its own."""
    sample_seconds: float = 0.0
    """Seconds between two copies of the weights; 0: none."""


class Home:
    """A model, its optimizers and texts, and the loop."""

    def __init__(self, texts: Texts, model: GPT, batch: int, context: int, seed: int, factor: float) -> None:
        self.texts, self.model, self.context = texts, model, context
        self.tokens_per_step = batch * context
        self.batches = texts.batches(batch, context, seed)
        self.muon, self.adamw = optimizers_of(model, self.tokens_per_step, factor)

    def held_out_loss(self) -> tuple[float, float]:
        """Return nats a token of some held-out text, and its tokens a byte."""
        bits = bits_per_byte(self.model, self.texts.held_out, self.texts.num_bytes, self.context, HELD_OUT_ROWS)
        return bits * math.log(2) / self.tokens_per_byte, self.tokens_per_byte

    @property
    def tokens_per_byte(self) -> float:
        """Return the tokens over the bytes of that text, without special tokens."""
        counted = self.texts.num_bytes[self.texts.held_out[: HELD_OUT_ROWS * self.context].long()]
        return float((counted > 0).sum() / counted.sum())

    def train(self, pace: Pace, samples: Path | None, run: farandole.NoLoCo | None) -> None:
        """Take steps for as long as the pace says; copies of the weights go into the folder ``samples``."""
        began_at = time.monotonic()
        step = num_samples = 0
        reported_at = 0.0
        while (seconds := time.monotonic() - began_at) < pace.seconds:
            set_rates((self.muon, self.adamw), factor_at(step, seconds / pace.seconds))
            inputs, targets = next(self.batches)
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            self.muon.step()
            # A slower machine's step; before the one that farandole acts on, whose time comes on top of the pace.
            time.sleep(max(0.0, pace.step_seconds - (time.monotonic() - began_at - seconds)))
            self.adamw.step()
            self.muon.zero_grad()
            self.adamw.zero_grad()
            step += 1
            if run is not None:
                run.report(loss.item())
            seconds = time.monotonic() - began_at
            if samples is not None and seconds >= (num_samples + 1) * pace.sample_seconds:
                save_sample(samples / f"{num_samples:04d}.pt", self.model, seconds, step)
                num_samples += 1
            if seconds - reported_at >= REPORT_SECONDS:
                reported_at = seconds
                others = "" if run is None else f", round {run.round}, {len(run.members)} members"
                print(f"{seconds:.0f} of {pace.seconds:g} s: step {step}, loss {loss.item():.3f}{others}", flush=True)


def save_sample(path: Path, model: GPT, seconds: float, step: int) -> None:
    """Write the weights and their time, such that a file that is there is complete."""
    unfinished = path.with_suffix(".unfinished")
    torch.save({"seconds": seconds, "step": step, "weights": model.state_dict()}, unfinished)
    unfinished.rename(path)


def main() -> int:
    """Read the command line, and train. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder that prepare.py has made")
    parser.add_argument("run", nargs="?", help="an invite, or the folder of a run that exists")
    parser.add_argument("--create", type=Path, metavar="FOLDER", help="make a run of this model")
    parser.add_argument("--alone", action="store_true", help="train without farandole")
    parser.add_argument("--home", type=Path, help="data directory of the node that joins with an invite")
    parser.add_argument("--depth", type=int, default=DEPTH, help="nanochat's: 4 is d4 (default: %(default)s)")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="rows of a step (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=1.0, help="of nanochat's rates (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3_600.0, help="how long to train (default: %(default)s)")
    parser.add_argument("--round-seconds", type=float, help="of the run that is made (default: chosen by farandole)")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="train on each N-th shard, from I on")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument("--option", action="append", default=[], help="of `farandole join`; repeatable")
    measured = parser.add_argument_group("for speedrun.py")
    measured.add_argument("--step-seconds", type=float, default=0.0, help="least duration of a step")
    measured.add_argument("--samples", type=Path, metavar="FOLDER", help="where copies of the weights go")
    measured.add_argument("--sample-seconds", type=float, default=30.0, help="between two of them")
    measured.add_argument("--wait", action="store_true", help="print 'ready', and begin with a line on stdin")
    arguments = parser.parse_args()
    if sum(map(bool, (arguments.run, arguments.create, arguments.alone))) != 1:
        parser.error("name a run, or --create, or --alone")
    try:
        return train(arguments)
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 130
    except (farandole.FarandoleError, OSError, ValueError) as error:
        print(f"error: {error}", flush=True)
        return 1


def train(arguments: argparse.Namespace) -> int:
    """Train as the command line says."""
    part, _, parts = arguments.part.partition("/")
    texts = read_texts(arguments.data, int(part), int(parts))
    torch.manual_seed(0)  # alone: the same first weights each time
    model = model_for(texts, arguments.depth, arguments.context)
    home = Home(texts, model, arguments.batch, arguments.context, arguments.seed, arguments.factor)
    source = arguments.run
    if arguments.create:
        rounds = {} if arguments.round_seconds is None else {"round_seconds": arguments.round_seconds}
        source = farandole.create_run(model, arguments.create, name=f"nanochat d{arguments.depth}", rounds=rounds)
    if arguments.samples:
        arguments.samples.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        run = None
        if source:
            run = stack.enter_context(joined(home, source, arguments.home, arguments.option))
            if arguments.create:
                print(f"invite {run.invite()}", flush=True)
        if arguments.wait:
            print("ready", flush=True)
            input()
        home.train(Pace(arguments.seconds, arguments.step_seconds, arguments.sample_seconds), arguments.samples, run)
        if run is not None:
            status = run.status()
            print(f"exchanges {status['exchanges_ok']}, rounds {run.round}", flush=True)
    return 0


def joined(home: Home, run: str | Path, folder: Path | None, options: list[str]) -> farandole.NoLoCo:
    """Return the run, to be entered: this is all that a loop needs to train with others."""
    return farandole.NoLoCo(
        home.model,
        home.adamw,  # the optimizer that steps last
        run,
        evaluate=home.held_out_loss,
        tokens_per_step=home.tokens_per_step,
        options=options if folder is None else [*options, "--home", str(folder)],
    )


if __name__ == "__main__":
    raise SystemExit(main())

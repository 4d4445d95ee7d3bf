"""The effect of activation codecs, and of overlapping steps, on the loss: stages in one process learn the same tokens.

Activations and their gradients are encoded and decoded on every hop, as between nodes; nothing else is rounded. Where
steps overlap, half of each step's microbatches have been to the last stage before the previous step is taken.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from farandole.protocol.run.manifest import DataConfig, InnerConfig, ModelConfig, PipelineConfig, TokenizerConfig
from farandole.training.base.device import choose_device
from farandole.training.data.dataset import Sampler, Text, load_text
from farandole.training.data.tokenizer import load_tokenizer
from farandole.training.engine.replica import Recipe
from farandole.training.engine.stage_worker import StageWorker
from farandole.training.model.model import build_model, language_loss
from farandole.training.model.stages import build_stage
from farandole.training.outer.codec import encoded_size

from ..report.section import Grid
from .stages_task import author

CODECS: Final = ("fp32", "bf16", "fp16", "int8")
# Suffix of a codec's name where steps overlap.
OVERLAPPING: Final = ", steps overlap"
WAYS: Final = (*CODECS, f"fp32{OVERLAPPING}")
# 0.2 M parameters, one layer per stage.
MODEL: Final = ModelConfig(num_layers=4, width=64, num_heads=2, hidden=192, context=64, vocabulary=256, num_stages=4)
BATCH_SIZE: Final = 16
MICROBATCH_SIZE: Final = 4
LEARNING_RATE: Final = 3e-3
# Batches of held-out text, the same for all codecs: 32,768 tokens, which measure a loss to about 0.01.
VALIDATION_BATCHES: Final = 32

Progress = Callable[[str, int, int], None]
"""Called with (codec or more, seed, inner steps done)."""


@dataclass(frozen=True, slots=True)
class CodecLoss:
    """The result of one codec with one seed."""

    codec: str
    """The codec's name, with a suffix if steps overlap."""
    seed: int
    loss: float
    """Held-out loss, in nats per byte."""


def codec_losses(
    steps: int,
    seeds: int,
    codecs: Sequence[str] = WAYS,
    progress: Progress = lambda *_: None,
    model: ModelConfig = MODEL,
) -> Iterator[CodecLoss]:
    """Train on the sources of Python with every codec and seed, on one thread, one after the other."""
    torch.set_num_threads(1)
    text = load_text(DataConfig(), load_tokenizer(TokenizerConfig(), None))
    inner = InnerConfig(learning_rate=LEARNING_RATE, warmup_steps=steps // 20, total_steps=steps, batch_size=BATCH_SIZE)
    for seed in range(seeds):
        for codec in codecs:
            stages = Stages(model, inner, codec, text, seed)
            for step in range(steps):
                progress(codec, seed, step)
                stages.learn()
            yield CodecLoss(codec, seed, stages.held_out_loss())


class Stages:
    """Stages of a model, all in one process, with the buffers for activations."""

    def __init__(self, model: ModelConfig, inner: InnerConfig, codec: str, text: Text, seed: int) -> None:
        self._model = model
        self._num_microbatches = inner.batch_size // MICROBATCH_SIZE
        self._under_way: list[bytearray] = []  # what the last stage has sent home, by slot
        overlap = codec.endswith(OVERLAPPING)
        section = {"microbatch_size": MICROBATCH_SIZE, "codec": codec.removesuffix(OVERLAPPING), "overlap": overlap}
        pipeline = msgspec.convert(section, PipelineConfig)
        self._num_early = self._num_microbatches // 2 if overlap else 0
        run_id = seed.to_bytes(32, "little")
        self._sampler = Sampler(
            text, run_id=run_id, author=author(), batch_size=inner.batch_size, context=model.context
        )
        self._workers = [
            StageWorker(
                build_stage(model, seed, stage),
                model,
                Recipe(inner),
                pipeline,
                self._sampler if stage == 0 else None,
                run_id=run_id,
                device=choose_device("cpu"),
            )
            for stage in range(model.num_stages)
        ]

    def learn(self) -> None:
        """Take one inner step of each stage."""
        while len(self._under_way) < self._num_microbatches:
            self._send_out(is_following=False)
        for slot, last in enumerate(self._under_way):
            self._send_back(slot, last)
        self._under_way.clear()
        for _ in range(self._num_early):
            self._send_out(is_following=True)
        for worker in self._workers:
            worker.step()

    def _send_out(self, *, is_following: bool) -> None:
        """Send the next microbatch as far as the last stage."""
        origin, *others = self._workers
        slot = len(self._under_way)
        here, there = (bytearray(origin.activation_bytes) for _ in range(2))
        origin.draw(slot, here, is_following=is_following)
        for worker in others:
            worker.forward(slot, here, there, is_following=is_following)
            here, there = there, here
        self._under_way.append(here)

    def _send_back(self, slot: int, here: bytearray) -> None:
        there = bytearray(len(here))
        self._workers[0].tail(slot, here, there)
        for worker in reversed(self._workers):
            here, there = there, here
            worker.backward(slot, here, there)
            worker.settle(slot, is_kept=True)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss of the whole model that the stages form, without codecs."""
        whole = build_model(self._model, 0)
        weights = {
            name: view
            for worker in self._workers
            for name, view in worker.checkpoint.layout.views(worker.round_end.fast_weights()).items()
        }
        whole.load_state_dict(weights)
        batches = (torch.as_tensor(self._sampler.held_out_batch(index)) for index in range(VALIDATION_BATCHES))
        return statistics.mean(float(language_loss(whole, batch)) for batch in batches)


def codec_grid(losses: Sequence[CodecLoss], model: ModelConfig = MODEL) -> Grid:
    """Return means over the seeds with their standard deviation, also of differences from fp32 with the same seed."""
    by_codec: dict[str, dict[int, float]] = defaultdict(dict)
    for each in losses:
        by_codec[each.codec][each.seed] = each.loss
    plain = by_codec.get("fp32", {})
    num_elements = MICROBATCH_SIZE * model.context * model.width
    rows = []
    for codec, of_seed in by_codec.items():
        differences = [loss - plain[seed] for seed, loss in of_seed.items() if seed in plain]
        hop = encoded_size(codec.removesuffix(OVERLAPPING), num_elements) / (MICROBATCH_SIZE * model.context)
        rows.append(
            [
                codec,
                f"{2 * model.num_stages * hop:,.0f}",
                str(len(of_seed)),
                mean_and_spread(list(of_seed.values()), ".3f"),
                "" if codec == "fp32" or not differences else mean_and_spread(differences, "+.4f"),
            ]
        )
    header = ["activations as", "bytes a token", "seeds", "held-out loss", "beyond fp32"]
    return Grid(f"Held-out loss of a model in {model.num_stages} stages, nats a byte", header, rows)


def mean_and_spread(values: Sequence[float], form: str) -> str:
    """Format mean ± standard deviation, which is 0 for a single value."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{form}} ± {deviation:{form.lstrip('+')}}"

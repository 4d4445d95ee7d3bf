"""A run that masks documents: tokens attend to their own document alone, in training and wherever loss is measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farandole.protocol.planning.needs import activation_bytes
from farandole.protocol.run.families import hf_config_from_dict
from farandole.protocol.run.manifest import DataConfig, InnerConfig, Manifest, ModelConfig, TokenizerConfig
from farandole.protocol.run.models import preset
from farandole.protocol.state.entries import Commitment
from farandole.protocol.trainer.trainer_messages import Replay, TrainerSettings
from farandole.training.base.device import Device, choose_device
from farandole.training.base.errors import DataError
from farandole.training.data.batches import Batches
from farandole.training.data.dataset import Bring, Sampler, Text, build_sampler
from farandole.training.data.tokenizer import load_tokenizer
from farandole.training.engine.learner import Learner, replay_round
from farandole.training.model import model as model_file
from farandole.training.model.generation import generate, last_logits, load_model
from farandole.training.model.model import Transformer, build_model, language_loss
from farandole.training.model.sampling import GREEDY, Sampling
from farandole.training.model.stages import build_module

from ...tokenizer_files import write_words
from ..conftest import ALICE, BOB, RUN_ID, MakeReplica, kept_bytes, train
from .test_hf import GPT2, LLAMA

CPU = choose_device("cpu")
SEPARATOR = 0
MASKED = DataConfig(mask_documents=True)
# The last two documents of a window, which begin with their separators; the first is the rest of a longer one.
DOCUMENTS = [[7, 3, 9, 9, 2], [SEPARATOR, 4, 4, 1], [SEPARATOR, 8, 3, 5, 6, 2, 1]]
WINDOW = torch.tensor([[token for document in DOCUMENTS for token in document]])


def sharp(model: ModelConfig, separator: int | None = SEPARATOR) -> Transformer:
    """A model whose attention is far from even, so what a token attends to shows."""
    module = build_model(model, 7)
    for parameter in module.parameters():
        parameter.data.mul_(2)
    module.separator = separator
    return module


def gap(first: list[Tensor], second: list[Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(first, second, strict=True))


@torch.no_grad()
def test_logits_of_a_window_are_those_of_each_document_alone(model: ModelConfig) -> None:
    module, plain = sharp(model), sharp(model, separator=None)

    together = module(WINDOW)[0].split([len(document) for document in DOCUMENTS])
    alone = [plain(torch.tensor([document]))[0] for document in DOCUMENTS]

    assert gap(list(together), alone) < 1e-4
    unmasked = plain(WINDOW)[0].split([len(document) for document in DOCUMENTS])
    assert gap([unmasked[0]], [alone[0]]) < 1e-4
    assert min(gap([unmasked[number]], [alone[number]]) for number in (1, 2)) > 1e-2


def test_the_mask_is_kept_once_for_all_layers_and_is_counted() -> None:
    model = msgspec.structs.replace(preset("0.5M"), context=512)
    module = build_model(model, seed=0)

    def kept_by(separator: int | None, dtype: torch.dtype | None) -> int:
        module.separator = separator
        tokens = torch.zeros(1, model.context + 1, dtype=torch.long)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return sum(kept_bytes(lambda: language_loss(module, tokens), module))

    run = Manifest("a", model)
    counted = activation_bytes(msgspec.structs.replace(run, data=MASKED), 0) - activation_bytes(run, 0)
    assert counted == 4 * 512 * 512
    for dtype, expected in ((None, counted), (torch.bfloat16, counted / 2)):
        assert kept_by(SEPARATOR, dtype) - kept_by(None, dtype) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"recompute": True}, {"microbatch": 1}, {"lean": True}, {"compile": True}])
def test_a_learner_learns_with_it(
    make_replica: MakeReplica,
    model: ModelConfig,
    dtype: torch.dtype | None,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled, too, in one graph; the backend needs no compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    device = Device(torch.device("cpu"), "CPU", partial(torch.autocast, "cpu", dtype, enabled=dtype is not None))
    masked = make_replica(data=MASKED, device=device, settings=TrainerSettings(**settings))
    masked.totals.steps = 10  # behind the warm-up, where the rate is not near 0
    before = masked.evaluate(2)
    with torch.no_grad():
        module = build_model(model, 7)
        batch = np.concatenate([masked.sampler.held_out_batch(index) for index in range(2)])
        plain_loss = float(language_loss(module, torch.from_numpy(batch)))
        module.separator = SEPARATOR
        masked_loss = float(language_loss(module, torch.from_numpy(batch)))

    losses = train(masked, 2)

    assert all(np.isfinite(losses))
    assert masked.evaluate(2) < before
    is_rounded = dtype is not None or "lean" in settings
    assert before == pytest.approx(masked_loss, rel=2e-3 if is_rounded else 1e-5)
    if not is_rounded:
        assert before != pytest.approx(plain_loss, rel=1e-5), "a held-out loss has the mask too"
    # fp32: the same steps whatever saves memory.
    plain = make_replica(data=MASKED, device=device)
    plain.totals.steps = 10
    assert losses == pytest.approx(train(plain, 2), rel=1e-2 if is_rounded else 1e-5)


def test_a_prompt_is_one_document(model: ModelConfig) -> None:
    """Sampling loads the model so; what a prompt yields is the plain forward pass."""
    run = Manifest("a", model, tokenizer=TokenizerConfig("tokenizers", "0" * 64), data=MASKED)
    plain = sharp(model, separator=None)
    weights = {name: value.detach().numpy() for name, value in plain.named_parameters()}
    module = load_model(run, weights.__getitem__, CPU, separator=SEPARATOR)
    assert isinstance(module, Transformer)
    assert module.separator == SEPARATOR

    for prompt in (DOCUMENTS[0], DOCUMENTS[2], [SEPARATOR]):
        torch.testing.assert_close(last_logits(module, prompt, CPU), last_logits(plain, prompt, CPU))
    after_another = last_logits(module, WINDOW[0].tolist(), CPU)
    torch.testing.assert_close(after_another, last_logits(plain, DOCUMENTS[2], CPU), rtol=1e-4, atol=1e-4)
    greedy = [
        next(generate(each, DOCUMENTS[2], context=16, vocabulary=64, sampling=Sampling(GREEDY, 0, 0), device=CPU))
        for each in (module, plain)
    ]
    assert greedy[0] == greedy[1]
    unmasked = load_model(msgspec.structs.replace(run, data=DataConfig()), weights.__getitem__, CPU, separator=0)
    assert isinstance(unmasked, Transformer)
    assert unmasked.separator is None


def test_a_round_is_replayed_with_the_mask(make_replica: MakeReplica, inner: InnerConfig, tmp_path: Path) -> None:
    small = ModelConfig(2, 16, 2, 24, 16, 256)
    inner = msgspec.structs.replace(inner, deterministic=True)
    run = Manifest("a", small, data=MASKED, inner=inner, audits=0.1)

    def round_of(manifest: Manifest) -> tuple[Learner, bytes, bytes]:
        node = make_replica(module=build_model(small, 7), inner_settings=inner, data=manifest.data)
        path = tmp_path / "start.safetensors"
        node.checkpoint.save(path)
        node.inner_steps(lambda: node.totals.steps == 3)
        _, contribution = node.round_end.contribute(bytearray(node.round_end.contribution_bytes))
        return node, node.replica.optimizer.digest(), contribution

    auditor, digest, contribution = round_of(run)
    committed = Commitment(0, bytes(32), 0, 3, 0, 4, 0, digest, contribution, bytes(8), "", "")
    command = Replay(str(tmp_path / "start.safetensors"), ALICE, committed)
    replayed = replay_round(auditor, run, command, lambda: False)
    assert (replayed.end, replayed.contribution, replayed.problem) == (digest, contribution, "")
    other = replay_round(auditor, msgspec.structs.replace(run, data=DataConfig()), command, lambda: False)
    assert other.end != digest


def test_ready_tokens_need_separators(tmp_path: Path) -> None:
    data = DataConfig(source="text", held_out=0.1, mask_documents=True)

    def sampler_of(*tokens: int, data: DataConfig = data) -> Batches:
        np.array(tokens * 50, np.uint16).tofile(tmp_path / "train.bin")
        run = Manifest("a", ModelConfig(2, 16, 2, 24, 16, 256), data=data)
        return build_sampler(run, RUN_ID, BOB, Bring((tmp_path,)))

    assert sampler_of(7, 8, 9, SEPARATOR).separator == SEPARATOR
    with pytest.raises(DataError, match=r"train\.bin does not separate them: it never has token 0.*--data"):
        sampler_of(7, 8, 9)
    sampler_of(7, 8, 9, data=msgspec.structs.replace(data, mask_documents=False))


def test_a_tokenizer_needs_a_separator(model: ModelConfig, inner: InnerConfig, text: Text, tmp_path: Path) -> None:
    def sampler_with(*words: str) -> Sampler:
        path, config = write_words(tmp_path, *words)
        tokenizer = load_tokenizer(config, path)
        return Sampler(text, key=(RUN_ID, ALICE), batch_size=4, context=16, tokenizer=tokenizer)

    def train_on(sampler: Sampler, data: DataConfig = MASKED) -> Learner:
        config = TokenizerConfig("tokenizers", "0" * 64)
        run = Manifest("a", model, tokenizer=config, inner=inner, data=data)
        return Learner(build_model(model, 7), run, sampler, run_id=RUN_ID, device=CPU)

    module = train_on(sampler_with("[UNK]", "a", "</s>")).replica.module
    assert isinstance(module, Transformer)
    assert module.separator == 2
    without = sampler_with("[UNK]", "a")
    with pytest.raises(DataError, match=r"data\.mask_documents.*make another run, without it, or .*<\|endoftext\|>"):
        train_on(without)
    train_on(without, DataConfig())


# The loss, taken in chunks


V = 4_096
OWN = ModelConfig(num_layers=1, width=16, num_heads=2, hidden=24, context=32, vocabulary=V)
TOKENS = torch.randint(0, V, (4, 33), generator=torch.Generator().manual_seed(0))
# Five chunks, the last one shorter.
LIMIT = 30 * V


def hf_model(settings: dict[str, object]) -> ModelConfig:
    hf = hf_config_from_dict({**settings, "vocab_size": V})
    return msgspec.structs.replace(OWN, hf=hf, **hf.sizes)


KINDS: dict[str, Callable[[], ModelConfig]] = {
    "own": lambda: OWN,
    "llama": partial(hf_model, LLAMA),
    "gpt2": partial(hf_model, GPT2),
}


@pytest.fixture(params=KINDS)
def module(request: pytest.FixtureRequest) -> nn.Module:
    return build_module(KINDS[request.param](), seed=0)


def loss_and_gradients(module: nn.Module) -> list[Tensor]:
    module.zero_grad()
    loss = language_loss(module, TOKENS)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None)]


def test_chunks_make_the_plain_loss_and_its_gradients(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loss_and_gradients(module)
    monkeypatch.setattr(model_file, "MAX_LOGITS", LIMIT)

    chunked = loss_and_gradients(module)

    assert len(plain) == 1 + len(list(module.parameters()))
    torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-7)
    again = loss_and_gradients(module)
    assert all(torch.equal(first, second) for first, second in zip(chunked, again, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(language_loss(module, TOKENS), plain[0])


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Watches the size of everything that is computed, forward and backward."""

    numel = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return made


def test_no_logits_are_kept_and_no_more_than_a_chunk_is_made(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_logits = 4 * 32 * V
    whole = kept_bytes(lambda: language_loss(module, TOKENS), module)
    assert max(whole) >= 4 * num_logits
    monkeypatch.setattr(model_file, "MAX_LOGITS", LIMIT)

    kept = kept_bytes(lambda: language_loss(module, TOKENS), module)

    assert max(kept) < 4 * LIMIT / 2
    assert sum(kept) < sum(whole) - 4 * num_logits
    with LargestTensor() as watch:  # type: ignore[no-untyped-call]
        language_loss(module, TOKENS).backward()
    assert max(LIMIT, V * 32) / 2 < watch.numel <= max(LIMIT, V * 32)  # a chunk's logits, or the head's own gradient


def test_what_a_run_needs_counts_a_chunk() -> None:
    def counted(vocabulary: int) -> int:
        return activation_bytes(Manifest("a", msgspec.structs.replace(OWN, context=1_024, vocabulary=vocabulary)), 0)

    assert counted(128_000) == counted(256_000) < 4 * 1_024 * 128_000 * 2
    assert counted(32_000) < counted(64_000)


def test_compiled_inner_steps_compute_the_loss_in_chunks(
    make_replica: MakeReplica, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain = make_replica()
    expected = plain.learn()
    monkeypatch.setattr(model_file, "MAX_LOGITS", 20 * model.vocabulary)

    compiled = make_replica(settings=TrainerSettings(compile=True))

    torch.testing.assert_close(compiled.learn(), expected)
    torch.testing.assert_close(compiled.round_end.weights.flat, plain.round_end.weights.flat, rtol=1e-3, atol=1e-5)

"""The loss over many logits is computed in chunks: the same loss and gradients, without the memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from farandole.protocol.planning.needs import activation_bytes
from farandole.protocol.run.families import hf_config_from_dict
from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.model import model as model_file
from farandole.training.model.model import language_loss
from farandole.training.model.stages import build_module

from ..conftest import MakeReplica, kept_bytes
from .test_hf import GPT2, LLAMA

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
    if request.param != "own":
        pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
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

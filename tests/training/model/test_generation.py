"""The next token: greedy is the argmax, a seed decides the rest, and a window slides."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import ModelConfig
from farandole.training.base.device import choose_device
from farandole.training.base.errors import TrainingError
from farandole.training.model.generation import draw, generate
from farandole.training.model.model import build_model
from farandole.training.model.sampling import GREEDY, Sampling

CPU = choose_device("cpu")
PROMPT = [3, 1, 4, 1, 5]


def tokens_of(
    module: nn.Module, model: ModelConfig, sampling: Sampling, num_tokens: int = 40, prompt: Sequence[int] = PROMPT
) -> list[int]:
    generated = generate(
        module, prompt, context=model.context, vocabulary=model.vocabulary, sampling=sampling, device=CPU
    )
    return list(itertools.islice(generated, num_tokens))


def test_greedy_takes_the_argmax_of_the_window_that_the_model_can_see_and_else_a_seed_decides(
    model: ModelConfig,
) -> None:
    module = build_model(model, 7)
    tokens = list(PROMPT)
    for _ in range(40):  # the context is 16 tokens
        with torch.no_grad():
            tokens.append(int(module(torch.tensor([tokens[-model.context :]]))[0, -1].argmax()))

    assert tokens_of(module, model, Sampling(GREEDY, 0, seed=1)) == tokens[len(PROMPT) :]
    assert tokens_of(module, model, Sampling(1.0, 1, seed=1)) == tokens[len(PROMPT) :]
    first = tokens_of(module, model, Sampling(1.0, 0, seed=1))
    torch.rand(5)
    assert tokens_of(module, model, Sampling(1.0, 0, seed=1)) == first
    assert tokens_of(module, model, Sampling(1.0, 0, seed=2)) != first


def test_only_the_likeliest_are_drawn_and_as_often_as_they_are_likely() -> None:
    chance = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 3.0, 2.0, -torch.inf, 1.0])
    drawn = [draw(logits, Sampling(1.0, 2, 0), chance) for _ in range(2_000)]
    assert set(drawn) == {1, 2}
    assert drawn.count(1) / len(drawn) == pytest.approx(0.731, abs=0.05)  # 1 / (1 + 1/e)
    assert {draw(logits, Sampling(1.0, 0, 0), chance) for _ in range(2_000)} == {0, 1, 2, 4}
    assert {draw(logits, Sampling(1.0, 0, 0, top_p=0.8), chance) for _ in range(2_000)} == {1, 2}


@pytest.mark.parametrize("temperature", [1e-320, 1e-9, 1e300])
def test_no_temperature_is_too_extreme(temperature: float) -> None:
    token = draw(torch.tensor([-3e38, 1.0, 3e38]), Sampling(temperature, 0, 0), torch.Generator().manual_seed(0))
    assert token == 2 or temperature > 1


class Always(nn.Module):
    """Returns the same value for everything."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self, tokens: Tensor) -> object:
        return self.value


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (torch.full((1, len(PROMPT), 64), torch.nan), "not finite"),
        (torch.full((1, len(PROMPT), 64), torch.inf), "not finite"),
        (torch.zeros(len(PROMPT), 64), r"must return logits \(B, T, V\)"),
        ("text", "it is str"),
    ],
)
def test_a_model_that_makes_no_logits_is_said_to(model: ModelConfig, made: object, says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        tokens_of(Always(made), model, Sampling(1.0, 0, 0))


def test_tokens_that_the_tokenizer_lacks_are_not_drawn_and_a_prompt_of_another_vocabulary_is_refused(
    model: ModelConfig,
) -> None:
    logits = torch.zeros(1, len(PROMPT), 64)
    logits[..., 63] = 9.0
    module = Always(logits)
    generated = generate(module, PROMPT, context=16, vocabulary=63, sampling=Sampling(GREEDY, 0, 0), device=CPU)
    assert next(generated) < 63
    with pytest.raises(TrainingError, match="the prompt has token 64, and the model has only 64"):
        tokens_of(build_model(model, 7), model, Sampling(1.0, 0, 0), prompt=[64])

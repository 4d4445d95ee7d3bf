"""Models as lm-evaluation-harness asks them: log-likelihoods are those of a plain computation, and greedy is greedy."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import ModelConfig
from farandole.training.base.device import choose_device
from farandole.training.base.errors import DataError, TrainingError
from farandole.training.model.generation import generate
from farandole.training.model.model import build_model
from farandole.training.model.sampling import GREEDY, Sampling

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    from lm_eval.api.instance import Instance

    from farandole.training.evaluation.harness import HarnessModel

CONTEXT, SEPARATOR = 16, 0
LONG = "".join(chr(ord("!") + number % 60) for number in range(0, 200, 7))  # 29 tokens
EXACT = LONG[:CONTEXT]


class Letters:
    """A tokenizer of 64 characters, from blank to underscore; others are token 1."""

    identity = "letters"
    vocabulary = 64
    separator = SEPARATOR
    has_separator = True

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        return np.array([byte - 32 if 32 < byte < 96 else 1 for byte in text], dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token + 32) for token in tokens)


@pytest.fixture
def module(model: ModelConfig) -> nn.Module:
    module = build_model(model, 7)
    for parameter in module.parameters():
        parameter.data.mul_(3)  # far from equal chances
    return module.eval()


def harness(module: nn.Module, batch_size: int = 3, vocabulary: int = 64) -> HarnessModel:
    return HarnessModel(
        module,
        Letters(),
        context=CONTEXT,
        vocabulary=vocabulary,
        device=choose_device("cpu"),
        batch_size=batch_size,
    )


def asked(*arguments: tuple[Any, ...]) -> list[Instance]:
    """Requests as the harness makes them."""
    return [Instance("loglikelihood", {}, each, number) for number, each in enumerate(arguments)]


def tokens_of(text: str) -> list[int]:
    return [int(token) for token in Letters().encode(text.encode())]


@torch.no_grad()
def plain(module: nn.Module, before: Sequence[int], text: Sequence[int]) -> tuple[float, bool]:
    """Log-likelihood of a text, a window after the other, each with all of the context that fits."""
    tokens, total, is_greedy = [*before, *text], 0.0, True
    for first in range(0, len(text), CONTEXT):
        last = min(first + CONTEXT, len(text))
        end = len(before) + last
        # A text in several windows has one token before it, and a shorter one all that fits.
        begin = max(0, end - CONTEXT - 1, len(before) - 1 if len(text) > CONTEXT and not first else 0)
        logits = module(torch.tensor([tokens[begin : end - 1]]))[0].double()
        for at in range(len(before) + first, end):
            chances = logits[at - 1 - begin].log_softmax(dim=0)
            total += float(chances[tokens[at]])
            is_greedy &= int(chances.argmax()) == tokens[at]
    return total, is_greedy


PAIRS = [
    ("ABC", "DEF"),
    ("", "HELLO"),
    ("A", "B"),
    ("A", "C"),  # the same inputs as before
    ("LONGER THAN THE MODEL CAN SEE AT ONCE", "YES"),
    ("ABC", LONG),
    ("ABC", EXACT),
    ("   ", "THE CONTEXT IS"),
    ("WITH A BLANK ", "END"),
    ("NOTHING FOLLOWS", ""),
]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_log_likelihoods_are_those_of_a_plain_computation(module: nn.Module, batch_size: int) -> None:
    expected = []
    for context, continuation in PAIRS:
        blanks = len(context) - len(context.rstrip())
        text = context[len(context) - blanks :] + continuation
        before = tokens_of(context[: len(context) - blanks]) or [SEPARATOR]
        expected.append(plain(module, before, tokens_of(text)))
    found = harness(module, batch_size).loglikelihood(asked(*PAIRS), disable_tqdm=True)
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], rel=1e-5)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert len({round(nats, 3) for nats, _ in found}) == len(PAIRS)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_document_is_measured_from_its_first_token_on_each_once(module: nn.Module, batch_size: int) -> None:
    texts = ["", "A", "SHORT", EXACT, EXACT + "X", LONG, LONG * 3]
    expected = [plain(module, [SEPARATOR], tokens_of(text))[0] for text in texts]
    found = harness(module, batch_size).loglikelihood_rolling(asked(*((text,) for text in texts)), disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[0] == 0


def test_greedy_is_only_what_the_model_itself_would_write(module: nn.Module) -> None:
    prompt = "ABC"
    written = argmax_text(module, prompt, 6)
    other = "!" if written[0] != "!" else "A"
    pairs = [(prompt, written), (prompt, written[:-1] + other), (prompt, other + written[1:])]
    found = harness(module).loglikelihood(asked(*pairs), disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True, False, False]


@torch.no_grad()
def test_a_text_of_several_windows_is_greedy_if_each_is(module: nn.Module) -> None:
    tokens = tokens_of("A")
    for at in range(2 * CONTEXT):
        window = tokens[at - at % CONTEXT :]
        tokens.append(int(module(torch.tensor([window]))[0, -1].argmax()))
    written = Letters().decode(tokens[1:])
    other = ("!" if written[0] != "!" else "A") + written[1:]
    for text in (written, other):
        ((_, is_greedy),) = harness(module).loglikelihood(asked(("A", text)), disable_tqdm=True)
        assert is_greedy == (text == written)


def argmax_text(module: nn.Module, prompt: str, num_tokens: int) -> str:
    generated = generate(
        module,
        tokens_of(prompt) or [SEPARATOR],
        context=CONTEXT,
        vocabulary=64,
        sampling=Sampling(GREEDY, 0, 0),
        device=choose_device("cpu"),
    )
    document = itertools.takewhile(lambda token: token != SEPARATOR, itertools.islice(generated, num_tokens))
    return Letters().decode(list(document))


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_answers_are_greedy_and_end_where_the_task_says(module: nn.Module, batch_size: int) -> None:
    options = {"until": [], "max_gen_toks": 10, "do_sample": False, "top_p": 0.9}
    prompts = ["ABC", "", "XYZ XYZ", "ONE MORE", "Q"]
    # A prompt leaves room for the answer: of the longest the model sees the last 6 tokens.
    asks = [(prompt, options) for prompt in [*prompts, "A LONG PROMPT OF WHICH THE END COUNTS"]]
    expected = [argmax_text(module, prompt, 10) for prompt in [*prompts[:2], "YZ XYZ", "E MORE", "Q", "COUNTS"]]
    expected[2:4] = [argmax_text(module, prompt[-6:], 10) for prompt in prompts[2:4]]
    model = harness(module, batch_size)
    found = model.generate_until(asked(*asks), disable_tqdm=True)
    assert found == expected
    stop = found[0][3:5]
    end = found[0].index(stop)
    assert model.generate_until(asked(("ABC", options | {"until": ["", stop]})), disable_tqdm=True) == [found[0][:end]]
    assert model.generate_until(asked(("ABC", options | {"until": stop})), disable_tqdm=True) == [found[0][:end]]
    assert model.generate_until(asked(("ABC", options | {"max_gen_toks": 2})), disable_tqdm=True) == [found[0][:2]]


def test_an_answer_longer_than_the_context_goes_on(module: nn.Module) -> None:
    options = {"until": [], "max_gen_toks": 40}
    (found,) = harness(module).generate_until(asked(("ABC", options)), disable_tqdm=True)
    assert found == argmax_text(module, "ABC", 40)


class Writes(nn.Module):
    """Writes a text after any prompt of three tokens; but token 63 is always the likeliest."""

    def __init__(self, *text: int) -> None:
        super().__init__()
        self.text = text

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 64)
        logits[..., 63] = 10.0
        for position, token in enumerate(self.text[: tokens.shape[1] - 2], 2):
            logits[:, position, token] = 9.0
        return logits


def test_the_separator_ends_an_answer_and_tokens_without_text_are_not_written() -> None:
    requests = asked(("ABC", {"until": ["never"], "max_gen_toks": 6}))
    module = Writes(33, 34, SEPARATOR, 35)
    assert harness(module, vocabulary=63).generate_until(requests, disable_tqdm=True) == ["AB"]
    assert harness(module).generate_until(requests, disable_tqdm=True) == ["_" * 6]


def test_draws_are_repeatable_and_differ_from_request_to_request(module: nn.Module) -> None:
    options = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    model = harness(module)
    found = model.generate_until(asked(*[("ABC", options)] * 4), disable_tqdm=True)
    assert len(set(found)) > 1
    assert model.generate_until(asked(*[("ABC", options)] * 4), disable_tqdm=True) == found
    sharp = model.generate_until(asked(*[("ABC", options | {"top_k": 1})] * 4), disable_tqdm=True)
    assert set(sharp) == {argmax_text(module, "ABC", 8)}


@pytest.mark.parametrize("options", [{"do_sample": True, "temperature": 1.0, "top_p": 0.9}, {"num_beams": 4}])
def test_a_way_of_generating_that_is_not_offered_is_said(module: nn.Module, options: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=r"(top_p|num_beams), which farandole does not offer.*--include"):
        harness(module).generate_until(asked(("ABC", options)), disable_tqdm=True)


class Fails(nn.Module):
    """Raises an error, or returns the same logit for everything."""

    def __init__(self, error: Exception | None = None, logit: float = 0.0) -> None:
        super().__init__()
        self.error, self.logit = error, logit

    def forward(self, tokens: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return torch.full((*tokens.shape, 64), self.logit)


def test_a_batch_that_does_not_fit_says_to_make_it_smaller() -> None:
    model = harness(Fails(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(TrainingError, match=r"2 texts of 4 tokens at once do not fit.*smaller --batch-size"):
        model.loglikelihood(asked(("ABC", "DE"), ("A", "B")), disable_tqdm=True)


def test_logits_that_are_not_finite_are_no_result() -> None:
    with pytest.raises(TrainingError, match="not finite"):
        harness(Fails(logit=torch.nan)).loglikelihood_rolling(asked(("ABC",)), disable_tqdm=True)


def test_a_defect_of_the_model_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="a defect"):
        harness(Fails(RuntimeError("a defect"))).loglikelihood_rolling(asked(("ABC",)), disable_tqdm=True)


def test_text_of_another_vocabulary_is_refused(module: nn.Module) -> None:
    with pytest.raises(DataError, match="yields token 58"):
        harness(module, vocabulary=40).tok_encode("XYZ")

"""A run's model as lm-evaluation-harness takes models, to be measured on its tasks: `farandole eval`.

The harness asks in text: how likely is this continuation after this context, how likely is this document, what does
the model write here. Text becomes tokens by the run's tokenizer as in training: without special tokens, and after the
separator where a document begins. Any module will do that makes logits (B, T, V) of tokens (B, T), so byte models and
users' modules can be measured, which the harness's own `hf` model cannot load. For models that it can load, both give
the same log-likelihoods; a test compares them.

*Batches.* Requests are computed longest first: rows of a batch have similar lengths, and if the memory is too small,
that shows at once. Shorter rows are filled at their ends, which a causal model does not see from where it is asked.
Requests that differ only in their last token, such as the letters of a multiple choice, are computed once.

*Long texts.* What does not fit into the model's context is cut off from the left. A text to be measured that is itself
longer is measured in windows: each of its tokens once, and after as much context as fits, as the harness defines it.

*Writing.* Nothing is kept between two tokens (`farandole.training.model.generation`). As with the harness's `hf` model,
the prompt leaves room for the answer in the model's context, if the context is larger than the answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows
from torch import Tensor, nn
from tqdm import tqdm

from ..base.device import Device
from ..base.errors import DataError, TrainingError
from ..base.memory import is_out_of_memory
from ..data.tokenizer import Tokenizer, beyond_vocabulary
from ..model.generation import NOT_FINITE, draw, logits_of
from ..model.sampling import GREEDY, Sampling

DEFAULT_MAX_GENERATED: Final = 256
"""Tokens of an answer whose task sets no limit; the harness's own default."""

_KNOWN: Final = {"until", "do_sample", "temperature", "top_k", "max_gen_toks"}


class HarnessModel(TemplateLM):
    """A causal model, its tokenizer, and the device on which it computes in batches of ``batch_size`` rows.

    ``context``: the most tokens that it can see. ``vocabulary``: tokens below this have text. All methods raise
    `TrainingError` if the logits are not to be used, or a batch does not fit into the memory.
    """

    def __init__(
        self, module: nn.Module, tokenizer: Tokenizer, *, context: int, vocabulary: int, device: Device, batch_size: int
    ) -> None:
        super().__init__()
        self._module = module
        self._text = tokenizer
        self._context = context
        self._vocabulary = vocabulary
        self._computes_on = device
        self._batch_size = batch_size

    @property
    def eot_token_id(self) -> int:
        """The separator: it ends a document, and stands before the next."""
        return self._text.separator

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Tokens of a text, without special ones, as in training. Raises `DataError` if the model lacks one."""
        tokens: list[int] = self._text.encode(string.encode(errors="replace")).tolist()
        if tokens and (largest := max(tokens)) >= self._vocabulary:
            raise DataError(beyond_vocabulary(largest, self._vocabulary))
        return tokens

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood, in nats, of each whole document."""
        documents = [((self.prefix_token_id,), self.tok_encode(*request.args)) for request in requests]
        return [nats for nats, _ in self._score(documents, disable_tqdm)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: object
    ) -> list[tuple[float, bool]]:
        """For (text, context, continuation): the continuation's log-likelihood, and whether it is the likeliest."""
        # A context of blanks is empty: `TemplateLM` moves them to the continuation.
        begun = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        return self._score(begun, disable_tqdm)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to the first stop sequence."""
        answers = [self._answer(number, *request.args) for number, request in enumerate(requests)]
        waiting = deque(sorted(answers, key=lambda answer: -len(answer.tokens)))
        running: list[_Answer] = []
        with tqdm(total=len(answers), desc="answers", disable=disable_tqdm) as progress:
            while waiting or running:
                running += [waiting.popleft() for _ in range(min(len(waiting), self._batch_size - len(running)))]
                for answer, logits in zip(running, self._rows(answer.tokens for answer in running), strict=True):
                    answer.add(draw(logits[-1, : self._vocabulary].float().cpu(), answer.sampling, answer.chance))
                    answer.tokens = answer.tokens[-self._context :]
                progress.update(sum(answer.is_ended for answer in running))
                running = [answer for answer in running if not answer.is_ended]
        return [answer.text for answer in answers]

    def _answer(self, number: int, context: str, options: dict[str, Any]) -> _Answer:
        """Return an answer to begin; ``number`` seeds its draws."""
        options = normalize_gen_kwargs(options, DEFAULT_MAX_GENERATED)
        temperature, most = float(options.get("temperature", GREEDY)), options["max_gen_toks"]
        without_effect = {"top_p", "min_p"} if temperature == GREEDY else set()
        if unknown := {
            name for name in options.keys() - _KNOWN - without_effect if options[name] not in (None, False, 1)
        }:
            raise TrainingError(
                f"the task generates with {', '.join(sorted(unknown))}, which farandole does not offer: remove it from "
                "generation_kwargs in a copy of the task's file, and name the copy's folder with --include"
            )
        tokens = self.tok_encode(context) or [self.eot_token_id]
        room = self._context - most if most < self._context else self._context
        sampling = Sampling(temperature, options.get("top_k") or 0, number)
        stops = [stop for stop in options["until"] if stop]
        return _Answer(self._text, tokens[-room:], stops, most, sampling, torch.Generator().manual_seed(number))

    def _score(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        """For (context, continuation): the continuation's log-likelihood in nats, and whether it is the likeliest."""
        nats, is_greedy = [0.0] * len(texts), [True] * len(texts)
        by_inputs: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for number, (context, continuation) in enumerate(texts):
            for inputs, targets in _windows(context, continuation, self._context):
                by_inputs.setdefault(tuple(inputs), []).append((number, targets))
        longest_first = iter(sorted(by_inputs, key=lambda inputs: -len(inputs)))
        with tqdm(total=len(by_inputs), desc="log-likelihoods", disable=disable_tqdm) as progress:
            while batch := list(islice(longest_first, self._batch_size)):
                for inputs, logits in zip(batch, self._rows(batch), strict=True):
                    for number, targets in by_inputs[inputs]:
                        likelihood, is_likeliest = _likelihood(logits[-len(targets) :], targets)
                        nats[number] += likelihood
                        is_greedy[number] &= is_likeliest
                progress.update(len(batch))
        return list(zip(nats, is_greedy, strict=True))

    def _rows(self, rows: Iterable[Sequence[int]]) -> Iterator[Tensor]:
        """Yield the logits (T, V) of each of at most `batch_size` rows of tokens, computed at once."""
        tensors = [torch.tensor(row) for row in rows]
        tokens = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=self.eot_token_id)
        try:
            logits = logits_of(self._module, tokens, self._computes_on)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"{len(tensors)} texts of {tokens.shape[1]} tokens at once do not fit into the memory of the "
                f"{self._computes_on.description}: try a smaller --batch-size"
            ) from error
        for tensor, each in zip(tensors, logits, strict=True):
            yield each[: len(tensor)]


@dataclass(slots=True)
class _Answer:
    """A text in the making."""

    tokenizer: Tokenizer
    tokens: list[int]
    """What the model sees next."""
    stops: list[str]
    """The text ends before the first of these."""
    most: int
    """The text ends after this many tokens."""
    sampling: Sampling
    chance: torch.Generator
    generated: list[int] = field(default_factory=list)
    text: str = ""
    is_ended: bool = False

    def add(self, token: int) -> None:
        """Take the next token."""
        if token == self.tokenizer.separator:
            self.is_ended = True
            return
        self.tokens.append(token)
        self.generated.append(token)
        self.text = self.tokenizer.decode(self.generated)
        ends = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
        self.is_ended = bool(ends) or len(self.generated) >= self.most


def _windows(
    context: Sequence[int], continuation: Sequence[int], most: int
) -> Iterator[tuple[Sequence[int], list[int]]]:
    """Yield inputs of at most ``most`` tokens, and targets, which follow the last inputs; each target once."""
    if len(continuation) <= most:
        if continuation:
            yield [*context, *continuation][-most - 1 : -1], list(continuation)
        return
    yield from get_rolling_token_windows(list(continuation), context[-1], most, context_len=1)


def _likelihood(logits: Tensor, targets: Sequence[int]) -> tuple[float, bool]:
    """Log-likelihood in nats of ``targets`` (n,) by logits (n, V), and whether each has the largest logit."""
    wanted = torch.tensor(targets, device=logits.device)
    nats = -float(nn.functional.cross_entropy(logits.float(), wanted, reduction="sum"))
    if math.isnan(nats):
        raise TrainingError(NOT_FINITE)
    return nats, bool((logits.argmax(dim=-1) == wanted).all())

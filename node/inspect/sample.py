"""Text that a model generates, from weights on this disk: `farandole sample`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farandole.training.data.tokenizer import TextStream, Tokenizer
from farandole.training.model.sampling import Sampling

from ..base.settings import NodeSettings
from ..base.system.terminal import without_controls
from .model_weights import ModelWeights
from .whole_model import open_whole_model, training_errors_for_people


@dataclass(slots=True)
class Sample:
    """A text in the making; made by `prepare_sample`."""

    weights: ModelWeights
    tokenizer: Tokenizer
    start: Sequence[int]
    """The prompt's tokens; without a prompt the separator, which stands before each document."""
    _generated: Iterator[int]
    tokens: list[int] = field(default_factory=list)
    """The tokens generated so far, without the separator that ends a document."""
    is_ended: bool = False
    """Whether the model has ended the document."""

    def pieces(self) -> Iterator[str]:
        """Yield the text that follows the prompt, as its tokens come; a terminal may be given it.

        Raises `UnusableModelError`.
        """
        text = TextStream(self.tokenizer, self.start)
        with training_errors_for_people():
            for token in self._generated:
                if token == self.tokenizer.separator:
                    self.is_ended = True
                    break
                self.tokens.append(token)
                yield without_controls(text.add(token))
        yield without_controls(text.end())


def prepare_sample(
    settings: NodeSettings, folder: Path | None, prompt: str, num_tokens: int, sampling: Sampling, device: str
) -> Sample:
    """Load the newest weights (see `open_weights`), for a text of at most ``num_tokens`` tokens after the prompt.

    Raises what `open_whole_model` raises.
    """
    with open_whole_model(settings, folder) as model, training_errors_for_people():
        tokenizer = model.tokenizer
        start = tokenizer.encode(prompt.encode(errors="surrogateescape")).tolist() or [tokenizer.separator]
        module, chosen = model.load(device, min(model.context, len(start) + num_tokens))

        from farandole.training.model.generation import generate

        generated = generate(
            module, start, context=model.context, vocabulary=model.vocabulary, sampling=sampling, device=chosen
        )
    return Sample(model.weights, tokenizer, start, itertools.islice(generated, num_tokens))

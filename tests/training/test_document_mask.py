"""A run that masks documents: tokens attend to their own document alone, in training and wherever loss is measured."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from farandole.protocol.manifest import ModelConfig
from farandole.training.model import Transformer, build_model, document_mask, language_loss

SEPARATOR = 0
# The last two documents of a window, which begin with their separators; the first is the rest of a longer one.
DOCUMENTS = [[7, 3, 9, 9, 2], [SEPARATOR, 4, 4, 1], [SEPARATOR, 8, 3, 5, 6, 2, 1]]
WINDOW = torch.tensor([[token for document in DOCUMENTS for token in document]])
STARTS = [0, 5, 9, 16]


def sharp(model: ModelConfig, separator: int | None = SEPARATOR) -> Transformer:
    """A model whose attention is far from even, so what a token attends to shows."""
    module = build_model(model, 7)
    for parameter in module.parameters():
        parameter.data.mul_(2)
    module.separator = separator
    return module


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters())))


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


def test_gradients_of_a_window_are_those_of_its_documents(model: ModelConfig) -> None:
    """Each target counts, a separator as the end of the document before it."""
    tokens = torch.cat([WINDOW, torch.tensor([[SEPARATOR]])], dim=1)  # (1, T + 1)
    module, plain = sharp(model), sharp(model, separator=None)

    loss = language_loss(module, tokens)
    parts = [tokens[:, first : last + 1] for first, last in itertools.pairwise(STARTS)]
    of_parts = sum((language_loss(plain, part) * (part.size(1) - 1) for part in parts), torch.zeros(())) / 16

    torch.testing.assert_close(loss, of_parts)
    expected = gradients(plain, of_parts)
    assert gap(gradients(module, loss), expected) < 1e-4
    assert gap(gradients(plain, language_loss(plain, tokens)), expected) > 1e-2


def test_the_mask_is_causal_and_each_row_has_its_own() -> None:
    tokens = torch.tensor([[5, 0, 6], [5, 6, 7]])

    mask = document_mask(tokens, 0, torch.bfloat16)

    assert mask.dtype == torch.bfloat16
    assert (mask == 0).int().tolist() == [
        [[[1, 0, 0], [0, 1, 0], [0, 1, 1]]],
        [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]],
    ]
    assert bool(((mask == 0) | mask.isneginf()).all())


def test_rows_of_a_stack_have_masks_of_their_own(model: ModelConfig) -> None:
    """`farandole.training.stacked` calls the model so."""
    module = sharp(model)
    rows = torch.stack([WINDOW, WINDOW.flip(1), WINDOW.roll(3, 1)])  # (N, 1, T)
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        at_once = vmap(lambda tokens: functional_call(module, parameters, (tokens,)))(rows)
        one_by_one = torch.stack([module(row) for row in rows])

    torch.testing.assert_close(at_once, one_by_one, rtol=1e-4, atol=1e-4)

import numpy as np

from farandole.training.data.batches import Array, Tokens


def array_of(tokens: Tokens) -> Array:
    """Return the tokens of a text that is one array, as all text is that comes from documents."""
    assert isinstance(tokens, np.ndarray)
    return tokens

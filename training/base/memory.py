"""Running out of memory, in the ways in which torch and Python say so."""

from __future__ import annotations

import errno

import torch

# What torch's allocators and the libraries below it say in a plain RuntimeError, on Linux, macOS and Windows.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "ALLOC_FAILED",  # cuBLAS and its like
    "could not create a memory",  # oneDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an operation failed for lack of memory: smaller tensors might fit."""
    match error:
        case MemoryError() | torch.cuda.OutOfMemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():
            return any(words in str(error) for words in _WORDS)
        case _:
            return False

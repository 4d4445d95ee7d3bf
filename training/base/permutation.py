"""An order for any number of things, known by a key, of which each place is computed on its own.

A Feistel network with four rounds permutes the numbers of 2h bits, where these are at least n; who lands beyond n goes
on from there until he lands below (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). So
no table of the n places is kept, and nothing of numpy is used that another release may do otherwise. It is to mix, not
to hide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_NUM_ROUNDS = 4
_Words = npt.NDArray[np.uint64]


def permute(places: npt.NDArray[np.int64], length: int, *key: bytes) -> npt.NDArray[np.int64]:
    """Return the numbers at ``places`` (each below ``length``, at most 2^62) in the permutation of that length."""
    half = np.uint64(max(1, (length - 1).bit_length() + 1 >> 1))
    keys = np.frombuffer(keyed_digest(b"farandole/permutation/1", key), dtype="<u8").astype(np.uint64)[:_NUM_ROUNDS]
    values = _feistel(places.astype(np.uint64), half, keys)
    while (beyond := values >= length).any():  # each time for three in four at most
        values[beyond] = _feistel(values[beyond], half, keys)
    return values.astype(np.int64)


def keyed_digest(use: bytes, key: Sequence[bytes]) -> bytes:
    """SHA-256 of a key of several parts, for one use of it."""
    digest = hashlib.sha256(use)
    for part in key:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _feistel(values: _Words, half: np.uint64, keys: _Words) -> _Words:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    mixed: _Words = (left << half) | right
    return mixed


def _mix(words: _Words) -> _Words:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), modulo 2^64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

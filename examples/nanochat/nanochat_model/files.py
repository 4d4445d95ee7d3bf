"""nanochat's files: Parquet shards with a column ``text``, and tokenizers, as pickles of tiktoken or `tokenizer.json`.

As in nanochat, the last shard is for measuring and the others for training, and ``<|bos|>`` begins each document.
"""

from __future__ import annotations

import io
import pickle  # of nanochat's tokenizers: `_Unpickler` runs nothing that they name
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

# In a folder of `prepare.py`; apart, since farandole takes any file among the shards for text.
SHARDS_NAME: Final = "shards"
TOKENIZER_NAME: Final = "tokenizer.json"
BOS: Final = "<|bos|>"
# nanochat's special tokens: the others are for chats.
SPECIAL: Final = (
    BOS,
    *(f"<|{who}_{end}|>" for who in ("user", "assistant", "python", "output") for end in ("start", "end")),
)
# GPT-4's pattern, but for numbers of at most two digits.
PATTERN: Final = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
ROWS_OF_A_GROUP: Final = 1_024
# A document's characters from which a tokenizer learns, at most.
CHARACTERS_OF_A_DOCUMENT: Final = 10_000


# Shards


def write_shards(texts: Sequence[str], folder: Path, num_shards: int) -> None:
    """Write documents as shards, each with as many characters as the others, or nearly."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = [[] for _ in range(num_shards)]
    sizes = [0] * num_shards
    for text in texts:
        smallest = sizes.index(min(sizes))
        shards[smallest].append(text)
        sizes[smallest] += len(text)
    for number, shard in enumerate(shards):
        path = folder / f"shard_{number:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": shard}), path, row_group_size=ROWS_OF_A_GROUP)


def shards_of(folder: Path) -> tuple[list[Path], Path]:
    """Return the shards to train on, and the one to measure with. Raises `FileNotFoundError` if there are not two."""
    paths = sorted(folder.glob("*.parquet"))
    if len(paths) < 2:
        raise FileNotFoundError(
            f"{folder} has {len(paths)} Parquet files: two are needed, and the last is for measuring"
        )
    return paths[:-1], paths[-1]


def texts_in(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the documents of shards."""
    for path in paths:
        file = pyarrow.parquet.ParquetFile(path)
        for number in range(file.num_row_groups):
            yield from file.read_row_group(number, columns=["text"]).column("text").to_pylist()


def tokens_in(paths: Iterable[Path], tokenizer: Tokenizer) -> Tensor:
    """Return the tokens (n,) of shards, one document after the other."""
    bos = tokenizer.token_to_id(BOS)
    tokenizer.encode_special_tokens = True  # a text about chats has their tokens as text
    pieces = [
        np.array([bos, *tokenizer.encode(text, add_special_tokens=False).ids], np.int32) for text in texts_in(paths)
    ]
    return torch.from_numpy(np.concatenate(pieces))


# Tokenizers


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Return a tokenizer in nanochat's style that has learned from documents."""
    tokenizer = _tokenizer(models.BPE(), PATTERN)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Special tokens come last in nanochat; their place does not matter here.
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text[:CHARACTERS_OF_A_DOCUMENT] for text in texts), trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a ``.json`` or ``.pkl`` file. Raises `ValueError` if it is none of nanochat's."""
    try:
        tokenizer = from_pickle(path.read_bytes()) if path.suffix == ".pkl" else Tokenizer.from_file(str(path))
    except (pickle.UnpicklingError, EOFError, LookupError) as error:
        raise ValueError(f"{path} is no tokenizer of nanochat: {error}") from error
    if tokenizer.token_to_id(BOS) is None:
        raise ValueError(f"{path} has no token {BOS}, with which nanochat's documents begin")
    return tokenizer


class _Encoding:
    """What a pickle calls a `tiktoken.Encoding`: only its state, and none of tiktoken's code."""

    state: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads a pickled `tiktoken.Encoding` and nothing else, since a pickle may run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("tiktoken.core", "Encoding"):
            raise pickle.UnpicklingError(f"it has a {module}.{name}, where nanochat's tokenizers have tiktoken's alone")
        return _Encoding


def from_pickle(raw: bytes) -> Tokenizer:
    """Return the tokenizer in nanochat's ``tokenizer.pkl``. Raises `pickle.UnpicklingError` if it is anything else."""
    encoding = _Unpickler(io.BytesIO(raw)).load()
    if not isinstance(encoding, _Encoding):
        raise pickle.UnpicklingError(f"it has a {type(encoding).__name__}, not a tokenizer of tiktoken")
    state = encoding.state
    ranks = cast("dict[bytes, int]", state["mergeable_ranks"])
    spelled = byte_letters()
    names = {token: "".join(spelled[byte] for byte in token) for token in ranks}
    merges = [
        (names[left], names[right])
        for token, rank in sorted(ranks.items(), key=lambda each: each[1])
        if len(token) > 1
        for left, right in [parts_of(token, rank, ranks)]
    ]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    # tiktoken takes a piece that is a token as it is, whatever its merges are.
    tokenizer = _tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True), state["pat_str"])
    special = sorted(state["special_tokens"], key=state["special_tokens"].__getitem__)
    tokenizer.add_special_tokens(special)
    if wrong := [name for name in special if tokenizer.token_to_id(name) != state["special_tokens"][name]]:
        raise pickle.UnpicklingError(
            f"its token {wrong[0]} does not follow the others: this is no tokenizer of nanochat"
        )
    return tokenizer


def parts_of(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two tokens that merge into one: those that the merges of lower ranks make of it."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        best = pairs.index(min(pairs))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def byte_letters() -> list[str]:
    """Return the letter that a `tokenizer.json` has for each byte: GPT-2's table."""
    is_shown = [33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255 for byte in range(256)]
    hidden = iter(range(256, 512))
    return [chr(byte if is_shown[byte] else next(hidden)) for byte in range(256)]


def _tokenizer(model: models.BPE, pattern: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spelled])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> Tensor:
    """Return the bytes of each token (V,); 0 of special ones, which do not count."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    names = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    return torch.tensor([0 if name is None or name in special else len(name) for name in names])

"""Text to tokens, and back: bytes as they are, or any Hugging Face ``tokenizers`` file, known by its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from farandole.protocol.run.manifest import TokenizerConfig

from ..base.errors import DataError, how_to_add

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

# The largest tokenizer files in use (vocabularies of 256 k) have some 35 MB.
MAX_TOKENIZER_FILE_BYTES = 128 * 1024 * 1024
# What the common families call the token between documents; the first that a vocabulary has is taken.
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|bos|>")

_REPLACEMENT = "\ufffd"
# Bytes of a character in UTF-8 before its last.
_MAX_INCOMPLETE = 3
# Decoded text gives about as many tokens again; a window that cuts a character gives a few more. A file without a
# decoder gives no text but its own spelling of it ("\u0120the \u0120cat"), and this gives far more tokens.
_MAX_REENCODED: Final = 1.1
# Windows whose text is encoded again: enough to know, and little work.
_NUM_REENCODED: Final = 8


class ByteTokenizer:
    """Every byte is a token. The separator is NUL, which text does not contain."""

    identity: str = "bytes"
    """Equal where all texts become the same tokens."""
    vocabulary: int = 256
    """Number of tokens; ids are below it."""
    separator: int = 0
    """The token put after every document."""
    has_separator: bool = True
    """Whether the vocabulary has a token for this; otherwise `separator` is 0, a token with another meaning."""

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """The bytes (n,)."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text for people; what is not valid becomes a replacement character."""
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """A tokenizer from a Hugging Face ``tokenizer.json``."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, sha256: str) -> None:
        self.identity = sha256
        self._tokenizer = tokenizer
        self.vocabulary: int = tokenizer.get_vocab_size()
        known = [token for name in SEPARATORS if (token := tokenizer.token_to_id(name)) is not None]
        self.separator: int = known[0] if known else 0
        self.has_separator = bool(known)

    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        """Tokens (n,), without the special tokens that the file may add."""
        encoding = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text for people."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


Tokenizer = ByteTokenizer | FileTokenizer


class TextStream:
    """Text for people of tokens that come one by one; characters whose bytes have not all come yet wait.

    The pieces together are what the tokenizer makes of all tokens at once.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """``before``: the tokens before the text, complete characters: a first word's blank may depend on them."""
        self._tokenizer = tokenizer
        self._tokens = list(before)
        self._num_given = len(tokenizer.decode(self._tokens))

    def add(self, token: int) -> str:
        """Return the text that is certain with one more token."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        whole = text.rstrip(_REPLACEMENT)
        # The end of what is invalid may be a character's beginning: one replacement for all its bytes, or one for each.
        return self._give(text[: max(len(whole), len(text) - _MAX_INCOMPLETE)])

    def end(self) -> str:
        """Return the rest: a character that was never completed is replaced."""
        return self._give(self._tokenizer.decode(self._tokens))

    def _give(self, text: str) -> str:
        new = text[self._num_given :]
        self._num_given += len(new)
        return new


def tokens_per_byte(tokenizer: Tokenizer, windows: Iterable[Sequence[int]]) -> float | None:
    """Return the tokens of windows (T + 1) over the bytes of their text, which turns nats a token into bits per byte.

    Each window's first token does not count: a model reads it and does not predict it. A separator counts as one byte,
    so the ratio is 1 where a token is a byte. None: the tokenizer does not give text back, so its bytes are not known.
    """
    if tokenizer.identity == "bytes":
        return 1.0
    num_tokens = num_bytes = num_encoded = num_again = 0
    for number, window in enumerate(windows):
        tokens = [token for token in window if token != tokenizer.separator]
        text = tokenizer.decode(tokens)
        before = tokenizer.decode(tokens[:1]) if window[0] != tokenizer.separator else ""
        num_tokens += len(window) - 1
        num_bytes += len(text.encode()) - len(before.encode())
        num_bytes += sum(token == tokenizer.separator for token in window[1:])
        if number < _NUM_REENCODED:
            num_encoded += len(tokens)
            num_again += len(tokenizer.encode(text.encode()))
    is_text = num_bytes > 0 and num_again <= _MAX_REENCODED * num_encoded
    return num_tokens / num_bytes if is_text else None


def beyond_vocabulary(token: int, vocabulary: int) -> str:
    """Return the error of a token that the model does not have."""
    return (
        f"the tokenizer yields token {token}, but the model has only {vocabulary}: the run's creator must make another "
        "run, with the tokenizer's number of tokens as model.vocabulary"
    )


def load_tokenizer(config: TokenizerConfig, path: Path | None = None) -> Tokenizer:
    """The run's tokenizer; ``path`` is this node's copy of its file, for kind ``tokenizers``.

    Raises `DataError` if the file is missing, is not the run's, or the extra is not installed.
    """
    if config.kind == "bytes":
        return ByteTokenizer()
    if path is None:
        raise DataError(f"this run needs the tokenizer file with SHA-256 {config.sha256}: name it with --tokenizer")
    return read_tokenizer(path, config.sha256)


def read_tokenizer(path: Path, sha256: str = "") -> FileTokenizer:
    """The tokenizer of a file, which must have this SHA-256, if one is given. Raises `DataError`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TOKENIZER_FILE_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read the tokenizer file {path}: {error.strerror}; check --tokenizer") from error
    if len(raw) > MAX_TOKENIZER_FILE_BYTES:
        raise DataError(
            f"{path} has more than {MAX_TOKENIZER_FILE_BYTES} bytes: it is no tokenizer file. Name a tokenizer.json "
            "with --tokenizer"
        )
    found = hashlib.sha256(raw).hexdigest()
    if sha256 and found != sha256:
        raise DataError(
            f"{path} is not the run's tokenizer: its SHA-256 is {found}, the run's {sha256}. Get the file from "
            "the person who invited you"
        )
    try:
        from tokenizers import Tokenizer as HuggingFaceTokenizer
    except ImportError as error:
        raise DataError(
            f"this run's tokenizer needs the Python package 'tokenizers': {how_to_add('tokenizers')}"
        ) from error
    try:
        return FileTokenizer(HuggingFaceTokenizer.from_str(raw.decode()), found)
    except Exception as error:  # the package raises bare Exception
        raise DataError(f"{path} is no tokenizer file: {error}. Name a tokenizer.json with --tokenizer") from error

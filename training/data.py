"""Text to batches. The position in the data is a number or two, so there is nothing to save or resume.

Documents are tokenised once into one array, a separator after each. Which of them nobody trains on is decided by the
hash of their names, so all nodes with the same text hold out the same. Batch number ``step`` of an author consists of
windows at places drawn from a generator keyed with (run id, author, step): the same on every machine and in any
order, and another author's are independent of it. The numbers come from Philox's raw output (Random123, SC'11), which
numpy never changes, rather than from numpy's distributions, which it may.

Where the run counts *epochs*, its nodes deal the text out instead. It is cut into windows, one after the other, and
each epoch puts them into an order of its own (`farandole.training.permutation`), the same for all. A *slice* is a batch
of that order, known by epoch and number. So documents are then read in the order of their names, wherever they lie, and
their hash, the *corpus*, says who has the same text: only with those can slices be shared.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .config import DataConfig, InnerConfig, ModelConfig, TokenizerConfig
from .errors import DataError
from .permutation import permute
from .slices import SliceQueue
from .tokenizer import Tokenizer, load_tokenizer

# Text is held in memory whole; what lies beyond this is not read. Volunteers' machines have some gigabytes to spare.
MAX_TEXT_BYTES = 2 * 1024**3
# Longer files become several documents, so that one big file has held-out parts too.
DOCUMENT_BYTES = 64 * 1024
# Folders without text worth learning: other people's packages, tests (half the library, much of it data), build files.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_HELD_OUT_KEY = b"held out"
# Of SHA-256: tells texts apart by accident, not by design; who lies about his text could as well not train.
CORPUS_BYTES = 8

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text; ``name`` is relative to its folder, with slashes, the same on every machine."""

    name: str
    text: bytes


@dataclass(frozen=True, slots=True)
class Text:
    """Tokenised text (uint8, uint16 or uint32 by the vocabulary), split into what is trained on and what is not."""

    training: Tokens
    held_out: Tokens
    num_documents: int
    corpus: bytes = b""
    """Hash of all documents with their names, 8 bytes; empty unless asked for."""


def stdlib_documents() -> Iterator[Document]:
    """The sources of this Python's standard library, without its tests; a few hundred files, some 10 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    for name in _file_names(root, skipped=_SKIPPED_FOLDERS):
        if name.endswith(".py"):
            yield from _documents(root / name, name)


def text_documents(paths: Iterable[Path]) -> Iterator[Document]:
    """The files named, and all files in the folders named; hidden and binary ones (with a NUL) are left out.

    Raises `DataError` if a path is not there.
    """
    for path in paths:
        if path.is_dir():
            for name in _file_names(path, skipped=frozenset()):
                yield from _documents(path / name, name)
        elif path.is_file():
            yield from _documents(path, path.name)
        else:
            raise DataError(f"there is no text at {path}")


def _file_names(root: Path, skipped: frozenset[str]) -> Iterator[str]:
    """Names below ``root``, relative, sorted, symbolic links to folders not followed."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        relative = Path(folder).relative_to(root)
        yield from (str((relative / name).as_posix()) for name in sorted(files) if not name.startswith("."))


def _documents(path: Path, name: str) -> Iterator[Document]:
    """A file in pieces; nothing if it cannot be read, is binary or is no regular file (a pipe would hang us)."""
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number in range(MAX_TEXT_BYTES // DOCUMENT_BYTES):
                text = file.read(DOCUMENT_BYTES)
                if not text or b"\0" in text:
                    return
                yield Document(f"{name}#{number}" if number else name, text)
    except OSError:
        return


def is_held_out(name: str, share: float) -> bool:
    """Whether the document of that name is one that nobody trains on."""
    digest = hashlib.sha256(b"farandole/held-out/1\n" + os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def load_text(config: DataConfig, tokenizer: Tokenizer, paths: Sequence[Path] = ()) -> Text:
    """Read and tokenise a run's text; ``paths`` are this node's copies, for source ``text``.

    Raises `DataError` if there are none.
    """
    if config.source == "text" and not paths:
        raise DataError("this run trains on text that each node brings: name files or folders with --data")
    documents = text_documents(paths) if config.source == "text" else stdlib_documents()
    return tokenise(documents, tokenizer, config.held_out, is_shared=config.epochs > 0)


def tokenise(documents: Iterable[Document], tokenizer: Tokenizer, held_out: float, *, is_shared: bool = False) -> Text:
    """Documents as two token arrays, at most `MAX_TEXT_BYTES` of text.

    ``is_shared``: in the order of their names, and with the corpus' hash, so that all who have the same documents have
    the same `Text`.
    """
    dtype = np.min_scalar_type(tokenizer.vocabulary - 1)
    parts: list[tuple[str, bytes, Tokens]] = []
    num_bytes = 0
    for document in documents:
        if num_bytes + len(document.text) > MAX_TEXT_BYTES:
            break
        num_bytes += len(document.text)
        tokens = np.append(tokenizer.encode(document.text).astype(dtype), np.array([tokenizer.separator], dtype))
        parts.append((document.name, hashlib.sha256(document.text).digest() if is_shared else b"", tokens))
    corpus = b""
    if is_shared:
        parts.sort(key=lambda part: part[:2])
        corpus = _corpus(parts)
    training: list[Tokens] = [np.empty(0, dtype)]
    holding_out: list[Tokens] = [np.empty(0, dtype)]
    for name, _, tokens in parts:
        (holding_out if is_held_out(name, held_out) else training).append(tokens)
    return Text(np.concatenate(training), np.concatenate(holding_out), len(parts), corpus)


def _corpus(parts: Iterable[tuple[str, bytes, Tokens]]) -> bytes:
    digest = hashlib.sha256(b"farandole/corpus/1")
    for name, text_digest, _ in parts:
        encoded = os.fsencode(name)
        digest.update(len(encoded).to_bytes(4, "little") + encoded + text_digest)
    return digest.digest()[:CORPUS_BYTES]


def draw(length: int, count: int, *key: bytes) -> npt.NDArray[np.int64]:
    """``count`` numbers below ``length``, a function of the key alone. The bias, length / 2^64, is below 2^-32."""
    digest = hashlib.sha256(b"farandole/data/1")
    for part in key:
        digest.update(len(part).to_bytes(8, "little") + part)
    generator = np.random.Philox(key=int.from_bytes(digest.digest()[:16], "little"))
    raw: npt.NDArray[np.uint64] = generator.random_raw(count)
    return (raw % np.uint64(length)).astype(np.int64)


class Sampler:
    """Batches of one author in one run. Holds no state but its settings.

    Raises `DataError` if the text is shorter than one window, or its tokens do not fit the model.
    """

    def __init__(
        self,
        text: Text,
        *,
        run_id: bytes,
        author: bytes,
        batch_size: int,
        context: int,
        vocabulary: int = 256,
        order: bytes = b"",
    ) -> None:
        """``order``: the run in whose order slices are; this one, if it is empty."""
        self.batch_size = batch_size
        self.context = context
        self._text = text
        self._key = (run_id, author)
        self._order = order or run_id
        if len(text.training) < context + 1:
            raise DataError(
                f"too little text to train on: {len(text.training)} tokens in {text.num_documents} documents, and a "
                f"sequence takes {context + 1}; name more text with --data, or hold out less in the run file"
            )
        largest = max(int(text.training.max()), int(text.held_out.max(initial=0)))
        if largest >= vocabulary:
            raise DataError(f"the tokenizer yields token {largest}, but the model has only {vocabulary}")

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """Tokens (B, T + 1) of inner step ``step``."""
        return self._windows(self._text.training, *self._key, step.to_bytes(8, "little"))

    def slices(self, num_parts: int = 1) -> SliceQueue:
        """Those of this text, none of them to be drawn yet: batches of windows that cover it."""
        return SliceQueue(-(-self._num_windows // self.batch_size), self._text.corpus, num_parts)

    @property
    def _num_windows(self) -> int:
        return (len(self._text.training) - 1) // self.context

    def slice_batch(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        """Tokens (B, T + 1) of slice ``index`` of an epoch; the last one is filled up with windows of the first."""
        places = (index * self.batch_size + np.arange(self.batch_size)) % self._num_windows
        order = permute(places, self._num_windows, self._order, epoch.to_bytes(8, "little"))
        return _cut_out(self._text.training, order * self.context, self.context)

    def held_out_batch(self, index: int) -> npt.NDArray[np.int64]:
        """Held-out batch number ``index``, (B, T + 1): the same for every author, run and step.

        Raises `DataError` if too little is held out.
        """
        if len(self._text.held_out) < self.context + 1:
            raise DataError(
                f"too little text is held out to measure a validation loss: {len(self._text.held_out)} tokens, and a "
                f"sequence takes {self.context + 1}; hold out a larger share, or name more text"
            )
        return self._windows(self._text.held_out, _HELD_OUT_KEY, index.to_bytes(8, "little"))

    def _windows(self, tokens: Tokens, *key: bytes) -> npt.NDArray[np.int64]:
        starts = draw(len(tokens) - self.context, self.batch_size, *key)  # (B)
        return _cut_out(tokens, starts, self.context)


def _cut_out(tokens: Tokens, starts: npt.NDArray[np.int64], context: int) -> npt.NDArray[np.int64]:
    windows: npt.NDArray[np.int64] = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows  # (B, T + 1)


def build_sampler(
    model: ModelConfig,
    inner: InnerConfig,
    data: DataConfig,
    tokenizer: TokenizerConfig,
    run_id: bytes,
    author: bytes,
    text_paths: Sequence[Path] = (),
    tokenizer_path: Path | None = None,
) -> Sampler:
    """The batches of an author from a run's settings and where this node's text lies.

    Raises `DataError` if the text or the tokenizer will not do.
    """
    text = load_text(data, load_tokenizer(tokenizer, tokenizer_path), text_paths)
    return Sampler(
        text,
        run_id=run_id,
        author=author,
        batch_size=inner.batch_size,
        context=model.context,
        vocabulary=model.vocabulary,
        order=data.order,
    )

"""The files and data sets that a volunteer names, in an order that is the same on every machine, and their documents.

What a file is, its name says: ``.jsonl`` and ``.ndjson`` are records, a JSON object a line; ``.parquet`` is a table;
``.bin`` has ready tokens (`farandole.training.data.token_files`), of which a folder's training split is taken; all else
is text, or binary and left out. Records and text may be packed by gzip (``.jsonl.gz``); packed otherwise they are
refused.

A document of text has its file's name, by which documents are ordered. A record has the hash of its text for a name:
wherever it lies, and in whatever format, it is the same document.

No file is held in memory whole. None of these formats has code in it, and nothing is downloaded. Parquet needs the
extra ``data``.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ..base.errors import DataError, how_to_add
from .token_files import SUFFIX as TOKENS_SUFFIX
from .token_files import is_training_split

# Longer files of text become several documents, so that one big file has held-out parts too.
DOCUMENT_BYTES: Final = 64 * 1024
# Of one node's sources; their names and sizes are held in memory, some hundred bytes each.
MAX_SOURCES: Final = 1_000_000
# A book has a few megabytes; a longer line is no record, but a file without line ends.
MAX_RECORD_BYTES: Final = 64 * 1024 * 1024
# Rows of a table that are in memory at a time.
_BATCH_ROWS: Final = 256
_MAX_FIELDS_NAMED: Final = 12
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
# Folders without text worth learning: other people's packages, tests (half the library, much of it data), build files.
_SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

Kind = Literal["text", "jsonl", "parquet", "tokens"]
_KINDS: Final[dict[str, Kind]] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", TOKENS_SUFFIX: "tokens"}
_PACKED_SUFFIX: Final = ".gz"
# What else people pack text with.
_OTHER_PACKERS: Final = (".bz2", ".xz", ".zst", ".zip", ".lz4")
# What Hugging Face `datasets` saves a data set in: it is not read, and must not be skipped silently.
_SAVED_SUFFIX: Final = ".arrow"

Progress = Callable[[int, int], None]
"""Told how much of what is to be read is read, and how much that is."""
Records = Iterator[tuple[bytes, float]]
"""UTF-8 text, which may be empty, and the share of the source that is read."""


def no_progress(position: int, size: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text, and what it is known by, the same on every machine."""

    name: str
    text: bytes


@dataclass(frozen=True, slots=True)
class TextSource:
    """A file."""

    name: str
    """Relative to the folder that was named, with slashes."""
    path: Path
    kind: Kind
    size: int
    """Bytes."""
    changed_at: int
    """When it was last written, in nanoseconds."""


def stdlib_sources() -> list[TextSource]:
    """The sources of this Python's standard library, without its tests; a few hundred files, some 10 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    return _ordered(found for found in _files_in(root, _SKIPPED_FOLDERS) if found.name.endswith(".py"))


def sources_of(paths: Iterable[Path]) -> list[TextSource]:
    """The files named, and all in the folders named, in the order of their names.

    Hidden files are left out, and links to folders not followed. Raises `DataError` if a path is not there.
    """

    def found_at(path: Path) -> Iterator[TextSource]:
        if path.is_dir():
            yield from _files_in(path, frozenset())
        elif path.is_file():
            yield from _file(path, path.name)
        else:
            raise DataError(f"there is no text at {path}: no file or folder has this name; correct --data")

    return _ordered(found for path in paths for found in found_at(path))


def _files_in(root: Path, skipped: frozenset[str]) -> Iterator[TextSource]:
    for folder, folders, files in os.walk(root):
        relative = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and (path.suffix.lower() != TOKENS_SUFFIX or is_training_split(path)):
                yield from _file(path, (relative / name).as_posix())


def _file(path: Path, name: str) -> Iterator[TextSource]:
    """Yield the source, unless it is no regular file (a pipe would block) or is gone.

    Raises `DataError` if it is packed in an unsupported way, or a saved data set's: it must not be skipped silently.
    """
    suffix = path.suffix.lower()
    if suffix == _SAVED_SUFFIX:
        raise DataError(
            f"{path} is of a data set that Hugging Face datasets has saved: write the data set as Parquet "
            "(Dataset.to_parquet), or leave it out"
        )
    unpacked = Path(path.stem).suffix.lower()
    kind = _KINDS.get(unpacked if suffix == _PACKED_SUFFIX else suffix, "text")
    is_strange = suffix in _OTHER_PACKERS and unpacked in (".txt", ".json", *_KINDS)
    if is_strange or (suffix == _PACKED_SUFFIX and kind in ("parquet", "tokens")):
        raise DataError(f"{path} is packed in a way that is not read here: unpack it, or leave it out")
    with contextlib.suppress(OSError):
        if path.is_file():
            about = path.stat()
            yield TextSource(name, path, kind, about.st_size, about.st_mtime_ns)


def _ordered(found: Iterable[TextSource]) -> list[TextSource]:
    """Sort by name; sort sources of the same name by their content."""

    def content_hash(source: TextSource) -> bytes:
        with source.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    by_name: dict[str, list[TextSource]] = {}
    for number, source in enumerate(found):
        if number == MAX_SOURCES:
            raise DataError(f"more than {MAX_SOURCES:,} files are named as text: put them together, as JSON lines, say")
        by_name.setdefault(source.name, []).append(source)
    return [
        source
        for _, alike in sorted(by_name.items())
        for source in (sorted(alike, key=content_hash) if len(alike) > 1 else alike)
    ]


def documents_in(sources: Sequence[TextSource], field: str, progress: Progress = no_progress) -> Iterator[Document]:
    """Yield the documents of sources, one after the other. ``field``: of a record, what has its text.

    Raises `DataError` where a source is not what it should be, and says what to do.
    """
    begun, size = 0, sum(source.size for source in sources)
    for source in sources:
        if source.kind == "text":
            documents = _pieces(source)
        else:
            records: Records = _READERS[source.kind](source.path, field)
            documents = ((Document(hashlib.sha256(text).hexdigest(), text), share) for text, share in records if text)
        for document, share in documents:
            yield document
            progress(begun + min(int(share * source.size), source.size), size)
        begun += source.size


def _pieces(source: TextSource) -> Iterator[tuple[Document, float]]:
    """A file of text in pieces, with the share that is read; nothing if it cannot be read or is binary."""
    with contextlib.suppress(OSError), _opened(source.path) as (file, share):
        number = 0
        while (text := file.read(DOCUMENT_BYTES)) and b"\0" not in text:
            yield Document(f"{source.name}#{number}" if number else source.name, text), share()
            number += 1


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, Callable[[], float]]]:
    """Yield the unpacked file and a function that returns the share of it that is read, 0 to 1.

    A packed one is read a piece at a time, whatever it unpacks to. Raises `OSError`, and `DataError` where it is
    damaged.
    """
    with path.open("rb") as raw:
        size = max(1, path.stat().st_size)

        def share() -> float:
            return min(1.0, raw.tell() / size)

        if path.suffix.lower() != _PACKED_SUFFIX:
            yield raw, share
            return
        try:
            with gzip.open(raw) as file:
                yield file, share
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is no whole gzip file ({error}): fetch it again, or leave it out") from error


def json_records(path: Path, field: str) -> Records:
    """The field's text of each line, an object; null counts as empty. Raises `DataError`, which names the line."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
        msgspec.defstruct("Record", [("text", str | None)], rename={"text": field})
    )
    try:
        with _opened(path) as (file, share):
            number = 0
            while line := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                if len(line) > MAX_RECORD_BYTES:
                    raise DataError(
                        f"{path}, line {number} has more than {MAX_RECORD_BYTES:,} bytes: it is no record. Leave the "
                        "file out, or call it .txt if it is text"
                    )
                if not (line := line.removeprefix(_BYTE_ORDER_MARK).strip()):
                    continue
                try:
                    text: str | None = decoder.decode(line).text
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise DataError(f"{path}, line {number}: {_what_is_wrong(line, field)} ({error})") from error
                yield (text or "").encode(), share()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions, or leave it out") from error


def _what_is_wrong(line: bytes, field: str) -> str:
    """Return what is wrong with a line, and what to do about it."""
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "this is not JSON; correct the line, or remove it"
    if not isinstance(fields, dict):
        return "this is no JSON object; each line must be one"
    if field not in fields:
        return f"there is no field {field!r}; the text's is another one: {_named(fields)}"
    return f"the field {field!r} is no text; {_named(fields)}, or correct the line, or remove it"


def _named(fields: Iterable[str]) -> str:
    found = ", ".join(map(repr, itertools.islice(fields, _MAX_FIELDS_NAMED))) or "none"
    return f"say which with --data-field (there are {found})"


def no_column(source: object, field: str, columns: Iterable[str]) -> str:
    """Return the error of a data set without this column, and which there are."""
    return f"{source} has no column {field!r}: {_named(columns)}"


def parquet_records(path: Path, field: str) -> Records:
    """The column's text of each row; null counts as empty. Raises `DataError` without the extra or if unfit."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path.name} needs the Python package 'pyarrow': {how_to_add('data')}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in (columns := file.schema_arrow.names):
                raise DataError(no_column(path, field, columns))
            num_rows, seen = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=[field]):
                seen += batch.num_rows
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        raise DataError(
                            f"{path}: the column {field!r} is {batch.column(0).type}, and not text: name one that is "
                            "with --data-field"
                        )
                    yield (text or "").encode(errors="replace"), seen / num_rows
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as Parquet: {why}. Fetch it again, or leave it out") from error


_READERS: Final = {"jsonl": json_records, "parquet": parquet_records}

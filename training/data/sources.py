"""The files and data sets that a volunteer names, in an order that is the same on every machine, and their documents.

What a file is, its name says: ``.jsonl`` and ``.ndjson`` are records, a JSON object a line; ``.parquet`` is a table; a
folder with ``state.json`` and ``dataset_info.json`` is a data set that Hugging Face ``datasets`` has saved; ``.bin``
has ready tokens (`farandole.training.data.token_files`), of which a folder's training split is taken; all else is text,
or binary and left out. Records and text may be packed by gzip (``.jsonl.gz``); packed otherwise they are refused.

A document of text has its file's name, by which documents are ordered. A record has the hash of its text for a name:
wherever it lies, and in whatever format, it is the same document.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from ..base.errors import DataError
from .records import SUFFIX as PACKED_SUFFIX
from .records import Records, dataset_records, json_records, opened, parquet_records, require_readable, suffix_of
from .token_files import SUFFIX as TOKENS_SUFFIX
from .token_files import is_training_split

# Longer files of text become several documents, so that one big file has held-out parts too.
DOCUMENT_BYTES: Final = 64 * 1024
# Of one node's sources; their names and sizes are held in memory, some hundred bytes each.
MAX_SOURCES: Final = 1_000_000
# Folders without text worth learning: other people's packages, tests (half the library, much of it data), build files.
_SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

Progress = Callable[[int, int], None]
"""Told how much of what is to be read is read, and how much that is."""

Kind = Literal["text", "jsonl", "parquet", "dataset", "tokens"]
_KINDS: Final[dict[str, Kind]] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", TOKENS_SUFFIX: "tokens"}
# Kinds of files that cannot be read through gzip.
_NEVER_PACKED: Final = {
    "parquet": "compressed inside: unpack it (gunzip)",
    "tokens": "mapped into memory: unpack it (gunzip)",
}
# Suffixes of files that must not be skipped silently because they are packed.
_UNPACKED: Final = frozenset({".txt", ".json", *_KINDS})
_READERS: Final = {"jsonl": json_records, "parquet": parquet_records, "dataset": dataset_records}
# What `datasets` writes into a folder; and into one with several splits, each of which is such a folder.
_DATASET_FILES: Final = ("state.json", "dataset_info.json")
_SPLITS_FILE: Final = "dataset_dict.json"
_TRAINING_SPLIT: Final = "train"


def no_progress(position: int, size: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text, and what it is known by, the same on every machine."""

    name: str
    text: bytes


@dataclass(frozen=True, slots=True)
class TextSource:
    """A file, or a data set in a folder."""

    name: str
    """Relative to the folder that was named, with slashes."""
    path: Path
    kind: Kind
    size: int
    """Bytes."""
    changed_at: int
    """When any of it was last written, in nanoseconds."""


class Reader:
    """The documents of sources, one after the other. ``field``: of a record, what has its text."""

    def __init__(self, sources: Sequence[TextSource], field: str) -> None:
        self.size = sum(source.size for source in sources)
        """Bytes of all sources."""
        self.position = 0
        """About how many of them are read."""
        self._sources = sources
        self._field = field

    def __iter__(self) -> Iterator[Document]:
        """Raises `DataError` where a source is not what it should be, and says what to do."""
        begun = 0
        for source in self._sources:
            for document, within in _documents(source, self._field):
                self.position = begun + min(within, source.size)
                yield document
            begun += source.size
        self.position = self.size


def stdlib_sources() -> list[TextSource]:
    """The sources of this Python's standard library, without its tests; a few hundred files, some 10 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    return _ordered(found for found in _files_in(root, _SKIPPED_FOLDERS) if found.name.endswith(".py"))


def sources_of(paths: Iterable[Path]) -> list[TextSource]:
    """The files and data sets named, and all in the folders named, in the order of their names.

    Hidden files are left out, and links to folders not followed. Raises `DataError` if a path is not there.
    """
    return _ordered(found for path in paths for found in _found(path))


def _found(path: Path) -> Iterator[TextSource]:
    if path.is_dir():
        dataset = _dataset_in(path, path.resolve().name)
        if dataset is None:
            yield from _files_in(path, frozenset())
        else:
            yield dataset
    elif path.is_file():
        yield from _file(path, path.name)
    else:
        raise DataError(f"there is no text at {path}: no file or folder has this name; correct --data")


def _files_in(root: Path, skipped: frozenset[str]) -> Iterator[TextSource]:
    for folder, folders, files in os.walk(root):
        relative = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in list(folders):
            if (dataset := _dataset_in(Path(folder, name), (relative / name).as_posix())) is not None:
                folders.remove(name)
                yield dataset
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and (path.suffix.lower() != TOKENS_SUFFIX or is_training_split(path)):
                yield from _file(path, (relative / name).as_posix())


def _file(path: Path, name: str) -> Iterator[TextSource]:
    """Yield the source, unless it is no regular file (a pipe would block) or is gone.

    Raises `DataError` if it is packed in an unsupported way.
    """
    try:
        if path.is_file():
            about = path.stat()
            yield TextSource(name, path, _kind_of(path), about.st_size, about.st_mtime_ns)
    except OSError:
        return


def _kind_of(path: Path) -> Kind:
    require_readable(path, _UNPACKED)
    kind = _KINDS.get(suffix_of(path), "text")
    if kind in _NEVER_PACKED and path.suffix.lower() == PACKED_SUFFIX:
        raise DataError(f"{path} is packed, but files of {kind} are {_NEVER_PACKED[kind]}, or leave it out")
    return kind


def _dataset_in(folder: Path, name: str) -> TextSource | None:
    """A data set that was saved in this folder; of one in several splits, the one to train on."""
    if (folder / _SPLITS_FILE).is_file():
        folder = folder / _split_in(folder)
    if not all((folder / file).is_file() for file in _DATASET_FILES):
        return None
    abouts = [path.stat() for path in folder.iterdir()]
    return TextSource(
        name, folder, "dataset", sum(about.st_size for about in abouts), max(about.st_mtime_ns for about in abouts)
    )


def _split_in(folder: Path) -> str:
    try:
        splits = msgspec.json.decode((folder / _SPLITS_FILE).read_bytes(), type=dict[str, list[str]])["splits"]
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise DataError(
            f"{folder / _SPLITS_FILE} does not say which splits there are: {error}. Save the data set again, or name "
            "one split's folder with --data"
        ) from error
    if _TRAINING_SPLIT not in splits:
        raise DataError(f"{folder} has no split called train, but {', '.join(splits)}: name one's folder with --data")
    return _TRAINING_SPLIT


def _ordered(found: Iterable[TextSource]) -> list[TextSource]:
    """Sort by name; sort sources of the same name by their content."""
    by_name: dict[str, list[TextSource]] = {}
    for number, source in enumerate(found):
        if number == MAX_SOURCES:
            raise DataError(f"more than {MAX_SOURCES:,} files are named as text: put them together, as JSON lines, say")
        by_name.setdefault(source.name, []).append(source)
    return [
        source
        for name in sorted(by_name)
        for source in (by_name[name] if len(by_name[name]) == 1 else sorted(by_name[name], key=_content_hash))
    ]


def _content_hash(source: TextSource) -> bytes:
    digest = hashlib.sha256()
    paths = sorted(source.path.iterdir()) if source.kind == "dataset" else [source.path]
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.digest()


# Documents, each with the position in its source


def _documents(source: TextSource, field: str) -> Iterator[tuple[Document, int]]:
    if source.kind == "text":
        yield from _text(source)
        return
    records: Records = _READERS[source.kind](source.path, field)
    for text, share in records:
        if text:
            yield Document(hashlib.sha256(text).hexdigest(), text), int(share * source.size)


def _text(source: TextSource) -> Iterator[tuple[Document, int]]:
    """A file in pieces; nothing if it cannot be read or is binary."""
    try:
        with opened(source.path) as (file, share):
            number = 0
            while (text := file.read(DOCUMENT_BYTES)) and b"\0" not in text:
                yield Document(f"{source.name}#{number}" if number else source.name, text), int(share() * source.size)
                number += 1
    except OSError:
        return

"""Text in records: JSON lines, Parquet files, data sets that Hugging Face ``datasets`` has saved; one at a time.

No file is held in memory whole. None of these formats has code in it, and nothing is downloaded. The last two need the
extra ``data``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..base.errors import DataError, how_to_add

if TYPE_CHECKING:
    import pyarrow
import contextlib
import gzip
import io
import zlib
from collections.abc import Callable

# Files of text as they are, or packed by gzip. A packed one is read a piece at a time, whatever it unpacks to.

SUFFIX: Final = ".gz"
# What else people pack text with, and how it is unpacked.
_OTHERS: Final = {".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip", ".lz4": "unlz4"}


def suffix_of(path: Path) -> str:
    """Return the suffix of the unpacked file, in lower case: ``.jsonl`` for ``a.jsonl.gz``."""
    return Path(path.stem if path.suffix.lower() == SUFFIX else path).suffix.lower()


def require_readable(path: Path, suffixes: frozenset[str]) -> None:
    """Raises `DataError` for a file that would have one of these suffixes if it were unpacked by another program."""
    program = _OTHERS.get(path.suffix.lower())
    if program is not None and Path(path.stem).suffix.lower() in suffixes:
        raise DataError(
            f"{path} is packed in a way that is not read here: unpack it ({program}), pack it by gzip, or leave it out"
        )


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, Callable[[], float]]]:
    """Yield the unpacked file and a function that returns the share of it that is read, 0 to 1.

    Raises `OSError`, and `DataError` where a packed file is damaged.
    """
    with path.open("rb") as raw:
        size = max(1, path.stat().st_size)

        def share() -> float:
            return min(1.0, raw.tell() / size)

        if path.suffix.lower() != SUFFIX:
            yield raw, share
            return
        try:
            with gzip.open(raw) as file:
                yield file, share
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is no whole gzip file ({error}): fetch it again, or leave it out") from error


# A book has a few megabytes; a longer line is no record, but a file without line ends.
MAX_RECORD_BYTES: Final = 64 * 1024 * 1024
# Rows of a table that are in memory at a time.
_BATCH_ROWS: Final = 256
_MAX_FIELDS_NAMED: Final = 12
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

Records = Iterator[tuple[bytes, float]]
"""UTF-8 text, which may be empty, and the share of the source that is read."""


def json_records(path: Path, field: str) -> Records:
    """The field's text of each line, an object; null counts as empty. Raises `DataError`, which names the line."""
    record = msgspec.defstruct("Record", [("text", str | None)], rename={"text": field})
    decoder = msgspec.json.Decoder(record)
    try:
        with opened(path) as (file, share):
            number = 0
            while line := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                if len(line) > MAX_RECORD_BYTES:
                    raise DataError(
                        f"{path}, line {number} has more than {MAX_RECORD_BYTES:,} bytes: it is no record. Leave the "
                        "file out, or call it .txt if it is text"
                    )
                if line := line.removeprefix(_BYTE_ORDER_MARK).strip():
                    yield _json_text(decoder, line, path, number, field), share()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions, or leave it out") from error


def _json_text(decoder: msgspec.json.Decoder[Any], line: bytes, path: Path, number: int, field: str) -> bytes:
    try:
        text: str | None = decoder.decode(line).text
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: {_what_is_wrong(line, field)} ({error})") from error
    return (text or "").encode()


def _what_is_wrong(line: bytes, field: str) -> str:
    """Return what is wrong with a line, and what to do about it."""
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "this is not JSON; correct the line, or remove it"
    if not isinstance(fields, dict):
        return "this is no JSON object; each line must be one"
    if field not in fields:
        return f"there is no field {field!r}; the text's is another one: {_named(list(fields))}"
    return f"the field {field!r} is no text; {_named(list(fields))}, or correct the line, or remove it"


def _named(fields: list[str]) -> str:
    found = ", ".join(map(repr, fields[:_MAX_FIELDS_NAMED])) or "none"
    return f"say which with --data-field (there are {found})"


def parquet_records(path: Path, field: str) -> Records:
    """The column's text of each row. Raises `DataError` if the extra is not installed, or the file is unfit."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path.name} needs the Python package 'pyarrow': {how_to_add('data')}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_column(path, file.schema_arrow.names, field)
            num_rows, seen = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=[field]):
                seen += batch.num_rows
                yield from ((text, seen / num_rows) for text in _texts(path, batch.column(0), field))
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as Parquet: {why}. Fetch it again, or leave it out") from error


def dataset_records(path: Path, field: str) -> Records:
    """Yield the column's text of each row of a data set in a folder, which is mapped into memory."""
    try:
        from datasets import Dataset, load_from_disk
    except ImportError as error:
        raise DataError(f"the data set in {path} needs the Python package 'datasets': {how_to_add('data')}") from error
    try:
        dataset = load_from_disk(str(path))
        assert isinstance(dataset, Dataset)
    except Exception as error:  # the package raises whatever its parsers do
        raise DataError(
            f"the data set in {path} cannot be read ({type(error).__name__}: {error}). Save it again, or leave it out"
        ) from error
    _require_column(path, dataset.column_names, field)
    seen, num_rows = 0, max(1, len(dataset))
    for table in dataset.select_columns([field]).with_format("arrow").iter(_BATCH_ROWS):
        seen += table.num_rows
        yield from ((text, seen / num_rows) for text in _texts(path, table.column(0), field))


def _require_column(path: Path, columns: list[str], field: str) -> None:
    if field not in columns:
        raise DataError(f"{path} has no column {field!r}: {_named(columns)}")


def _texts(path: Path, column: pyarrow.Array[Any] | pyarrow.ChunkedArray[Any], field: str) -> Iterator[bytes]:
    """Rows of a column, null as empty."""
    for value in column.to_pylist():
        if not isinstance(value, str | None):
            raise DataError(
                f"{path}: the column {field!r} is {column.type}, and not text: name one that is with --data-field"
            )
        yield (value or "").encode(errors="replace")

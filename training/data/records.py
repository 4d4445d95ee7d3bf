"""Text in records: JSON lines, Parquet files, data sets that Hugging Face ``datasets`` has saved; one at a time.

No file is held in memory whole. None of these formats has code in it, and nothing is downloaded. The last two need the
extra ``data``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..base.errors import DataError
from ..base.extras import how_to_add
from .packed import opened

if TYPE_CHECKING:
    import pyarrow

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

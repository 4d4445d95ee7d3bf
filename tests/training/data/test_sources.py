"""What volunteers name is read in one order and under one name everywhere, and what is wrong with it is said."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.training.base.errors import DataError
from farandole.training.data import sources
from farandole.training.data.sources import DOCUMENT_BYTES, Document, documents_in, sources_of, stdlib_sources

TEXTS = ["the first text", "the second, ünï", "a third one\nof two lines"]


def documents(*paths: Path, field: str = "text") -> list[Document]:
    return list(documents_in(sources_of(paths), field))


def texts(*paths: Path, field: str = "text") -> list[str]:
    return [document.text.decode() for document in documents(*paths, field=field)]


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, **columns: list[object]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_the_standard_library_is_text_enough() -> None:
    found = list(documents_in(stdlib_sources(), ""))
    names = [document.name for document in found]

    assert names == [document.name for document in documents_in(stdlib_sources(), "")]
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert sum(len(document.text) for document in found) > 4_000_000


def test_files_and_folders_are_read_and_others_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    (folder / "b.txt").write_text("bee")
    (folder / "deeper" / "a.txt").write_text("ay")
    (folder / "binary").write_bytes(b"\0\1")
    (folder / ".hidden").write_text("secret")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    (tmp_path / "one.txt").write_text("x" * (DOCUMENT_BYTES + 1))

    found = documents(folder, tmp_path / "one.txt")

    assert [document.name for document in found] == ["b.txt", "deeper/a.txt", "one.txt", "one.txt#1"]
    assert found[3].text == b"x"


def test_what_is_packed_by_gzip_is_read_as_if_it_were_not(tmp_path: Path) -> None:
    records = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "long.txt").write_text("many words " * 20_000)
    for path in (records, tmp_path / "long.txt"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))

    assert documents(tmp_path / "a.jsonl.gz") == documents(records)
    assert texts(tmp_path / "long.txt.gz") == texts(tmp_path / "long.txt")
    positions: list[int] = []
    list(documents_in(sources_of([tmp_path / "long.txt.gz"]), "", lambda position, size: positions.append(position)))
    assert positions == sorted(positions)
    assert 0 < positions[-1] <= (tmp_path / "long.txt.gz").stat().st_size


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.txt.gz"])
def test_what_unpacks_to_very_much_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sources, "MAX_RECORD_BYTES", 1 << 20)
    with gzip.open(tmp_path / name, "wb") as file:
        for _ in range(16):
            file.write(b"x" * (1 << 20))
    tracemalloc.start()
    try:
        with contextlib.suppress(DataError):  # of records: there is no end of the line
            for _ in documents_in(sources_of([tmp_path / name]), "text"):
                pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_a_packed_file_that_is_damaged_is_named(tmp_path: Path, name: str) -> None:
    whole = gzip.compress(b"".join(b'{"text": "number %d"}\n' % number for number in range(20_000)))
    for damaged in (whole[: len(whole) // 2], b"plain", whole[:20] + bytes(40) + whole[60:]):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{name} is no whole gzip file .*fetch it again, or leave it out"):
            documents(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.txt.xz", "A.NDJSON.BZ2", "a.parquet.gz", "a.json.zip", "a.bin.gz"])
def test_text_that_is_packed_otherwise_is_refused_and_not_left_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\0")
    with pytest.raises(DataError, match="unpack it"):
        documents(tmp_path)
    (tmp_path / name).rename(tmp_path / "photographs.zip")
    assert documents(tmp_path) == []


def test_a_data_set_is_the_same_in_every_format(tmp_path: Path) -> None:
    rows: list[object] = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
    jsonl = documents(write_jsonl(tmp_path / "a.jsonl", rows))

    assert [document.text.decode() for document in jsonl] == TEXTS
    assert len({document.name for document in jsonl}) == 3
    assert documents(write_parquet(tmp_path / "b.parquet", text=list(TEXTS))) == jsonl


def test_the_text_may_have_another_name_and_counts_twice_if_it_is_named_twice(tmp_path: Path) -> None:
    rows: list[object] = [{"content": text, "text": 7} for text in TEXTS]
    assert texts(write_jsonl(tmp_path / "a.ndjson", rows), field="content") == TEXTS
    assert texts(write_parquet(tmp_path / "a.parquet", content=list(TEXTS), text=[1, 2, 3]), field="content") == TEXTS
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    assert sorted(texts(path, path)) == sorted(2 * TEXTS)


def test_empty_records_and_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": ""}\n{"text": null}\n  \n{"text": "b", "more": [{}]}')
    assert texts(path) == ["a", "b"]
    assert texts(write_parquet(tmp_path / "a.parquet", text=["a", "", None, "b"])) == ["a", "b"]
    assert texts(write_jsonl(tmp_path / "none.jsonl", [])) == []


def test_a_saved_data_set_is_refused_with_the_remedy(tmp_path: Path) -> None:
    from datasets import Dataset  # takes a second, also of testers that do not run this

    Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"write the data set as Parquet \(Dataset.to_parquet\)"):
        documents(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "line 2: this is not JSON; correct the line, or remove it"),
        (b'["a"]', "line 2: this is no JSON object"),
        (b'{"content": "a", "id": 1}', r"there is no field 'text'.* --data-field \(there are 'content', 'id'\)"),
        (b"{}", r"there are none"),
        (b'{"text": 3}', "the field 'text' is no text"),
        (b'{"text": "\xff"}', "line 2"),
        (b'{"text": "\\ud800"}', "line 2"),
        (b"[" * 100_000, "line 2"),
        (b'{"text": "a"}{"text": "b"}', "line 2: this is not JSON"),
    ],
)
def test_a_malformed_line_is_named_and_what_to_do(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message) as raised:
        documents(path)
    assert str(path) in str(raised.value)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_only_data_errors_come_of_anything(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("a.jsonl", "a.parquet"):
        (folder / name).write_bytes(b"\n".join(lines))
        try:
            documents(folder / name)
        except DataError as error:
            assert name in str(error)  # noqa: PT017 - there need not be one


def test_a_line_without_an_end_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_RECORD_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 101)
    with pytest.raises(DataError, match=r"line 1 has more than 100 bytes: .* Leave the file out"):
        documents(tmp_path / "a.jsonl")


def test_broken_tables_are_named(tmp_path: Path) -> None:
    good = write_parquet(tmp_path / "good.parquet", text=list(TEXTS))
    raw = good.read_bytes()
    for name, content in (
        ("cut", raw[: len(raw) // 2]),
        ("other", gzip.compress(raw)),
        ("empty", b""),
        ("mid", raw[:4] + bytes(60) + raw[64:]),  # zeros where the first page was
    ):
        (tmp_path / f"{name}.parquet").write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.parquet cannot be read as Parquet: .* Fetch it again"):
            documents(tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"no column 'content': say which with --data-field \(there are 'text'\)"):
        documents(good, field="content")
    with pytest.raises(DataError, match="the column 'text' is int64, and not text: name one that is with --data-field"):
        documents(write_parquet(tmp_path / "numbers.parquet", text=[1, 2]))

"""Text is tokenised once, into a file that is whole or not there, and holds what would be held in memory."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from farandole.protocol.run.manifest import DataConfig
from farandole.training.base.durable import WholeFile
from farandole.training.base.errors import DataError
from farandole.training.data import token_cache
from farandole.training.data.dataset import Bring, Text, load_text
from farandole.training.data.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from typing_extensions import Buffer

DATA = DataConfig(source="text", held_out=0.2)


class CountingTokenizer(ByteTokenizer):
    """Knows how many documents it was given."""

    num_encoded = 0

    def encode(self, text: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        self.num_encoded += 1
        return np.frombuffer(text, np.uint8)


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    rows = "".join(json.dumps({"text": f"record {number} of the corpus, " * 20}) + "\n" for number in range(60))
    (tmp_path / "a.jsonl").write_text(rows)
    return Bring((tmp_path / "a.jsonl",), cache=tmp_path / "home" / "tokens")


def files(bring: Bring) -> list[Path]:
    assert bring.cache is not None
    return sorted(bring.cache.iterdir())


def same(first: Text, second: Text) -> bool:
    return (
        np.array_equal(first.training[:], second.training[:])
        and np.array_equal(first.held_out[:], second.held_out[:])
        and first.found == second.found
    )


def test_a_second_start_tokenises_nothing(bring: Bring) -> None:
    tokenizer = CountingTokenizer()
    first = load_text(DATA, tokenizer, bring)
    assert tokenizer.num_encoded == 60

    second = load_text(DATA, tokenizer, bring)

    assert tokenizer.num_encoded == 60
    assert isinstance(second.training, np.memmap)
    assert len(first.held_out) > 0
    assert first.found.largest == ord("u")
    assert same(first, second)
    assert same(first, load_text(DATA, tokenizer, replace(bring, cache=None)))


def test_whatever_the_tokens_follow_from_makes_another_file(bring: Bring, tmp_path: Path) -> None:
    load_text(DATA, ByteTokenizer(), bring)
    (path,) = bring.paths
    (tmp_path / "b.txt").write_text("more text")

    load_text(msgspec.structs.replace(DATA, held_out=0.1), ByteTokenizer(), bring)
    load_text(DATA, ByteTokenizer(), replace(bring, paths=(path, tmp_path / "b.txt")))
    assert len(files(bring)) == 3

    about = path.stat()
    path.write_bytes(path.read_bytes().replace(b"record 1 ", b"record 2 "))  # as long as before
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    tokenizer = CountingTokenizer()
    load_text(DATA, tokenizer, bring)
    assert tokenizer.num_encoded == 60


def test_old_files_go(bring: Bring) -> None:
    for number in range(token_cache.MAX_CACHES + 2):
        load_text(msgspec.structs.replace(DATA, held_out=number / 100), ByteTokenizer(), bring)
    assert len(files(bring)) == token_cache.MAX_CACHES
    tokenizer = CountingTokenizer()
    load_text(msgspec.structs.replace(DATA, held_out=(token_cache.MAX_CACHES + 1) / 100), tokenizer, bring)
    assert tokenizer.num_encoded == 0


def test_a_start_that_is_ended_in_the_middle_leaves_nothing_that_is_used(bring: Bring) -> None:
    class Dying(ByteTokenizer):
        def encode(self, text: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
            if b"record 50" in text:
                raise KeyboardInterrupt
            return np.frombuffer(text, np.uint8)

    with pytest.raises(KeyboardInterrupt):
        load_text(DATA, Dying(), bring)
    assert files(bring) == []

    assert bring.cache is not None
    (bring.cache / f".0123{token_cache.SUFFIX}.abc.tmp").write_bytes(b"of a life that was killed")
    load_text(DATA, ByteTokenizer(), bring)
    assert [path.suffix for path in files(bring)] == [token_cache.SUFFIX]


@pytest.mark.parametrize("size", [0, 3, 8, 100])
def test_a_damaged_file_is_made_anew(bring: Bring, size: int) -> None:
    good = load_text(DATA, ByteTokenizer(), replace(bring, cache=None))
    load_text(DATA, ByteTokenizer(), bring)
    (path,) = files(bring)
    raw = path.read_bytes()
    for damaged in (raw[:size], raw[: len(raw) - 1 - size], raw + bytes(size + 1), raw[:-8] + b"\xff" * 8):
        path.write_bytes(damaged)
        assert same(load_text(DATA, ByteTokenizer(), bring), good)
        assert path.read_bytes() == raw


def test_a_full_disk_is_said(bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WholeFile, "write", refuse)
    with pytest.raises(DataError, match=r"No space left on device. It takes about as much room as the text"):
        load_text(DATA, ByteTokenizer(), bring)
    assert files(bring) == []


def test_no_more_is_written_than_the_owner_allows(bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    load_text(DATA, ByteTokenizer(), bring)
    (path,) = files(bring)
    size = path.stat().st_size
    written = 0
    write = WholeFile.write

    def count(file: WholeFile, data: Buffer) -> int:
        nonlocal written
        written += memoryview(data).nbytes
        return write(file, data)

    monkeypatch.setattr(WholeFile, "write", count)
    for allowed in (0, size // 4):
        with pytest.raises(DataError, match=r"takes more than the 0\.0 MB that --disk leaves for it: allow more"):
            load_text(DATA, ByteTokenizer(), replace(bring, cache_bytes=allowed))
        path.unlink(missing_ok=True)
        written = 0
        with pytest.raises(DataError, match="--disk"):
            load_text(DATA, ByteTokenizer(), replace(bring, cache_bytes=allowed))
        assert files(bring) == []
        assert written <= allowed


def test_other_texts_make_room_the_oldest_first(bring: Bring) -> None:
    def load(held_out: float, allowed: int | None = None) -> Path:
        data = msgspec.structs.replace(DATA, held_out=held_out)
        load_text(data, ByteTokenizer(), replace(bring, cache_bytes=allowed))
        return max(files(bring), key=lambda path: path.stat().st_mtime_ns)

    first, second = load(0.1), load(0.2)
    for number, path in enumerate((first, second)):
        os.utime(path, ns=(number, number))
    size = second.stat().st_size
    third = load(0.3, 2 * size + size // 2)  # what is held out is there twice for a moment
    assert set(files(bring)) == {second, third}
    assert load(0.3, size + size // 2) == third
    assert files(bring) == [third]


def test_progress_is_told(bring: Bring, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text " * 1_000_000)
    told: list[tuple[int, int]] = []
    bring = replace(bring, paths=(*bring.paths, tmp_path / "b.txt"), progress=lambda *numbers: told.append(numbers))
    load_text(DATA, ByteTokenizer(), bring)
    size = sum(path.stat().st_size for path in bring.paths)
    assert len(told) >= 4
    assert told == sorted(told)
    assert all(position <= whole == size for position, whole in told)

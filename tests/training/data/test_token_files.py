"""Files of ready tokens are trained on where they lie, and refused where they do not fit the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from farandole.protocol.run.manifest import DataConfig
from farandole.training.base.errors import DataError
from farandole.training.data import token_files
from farandole.training.data.dataset import Bring, Sampler, Text, load_text
from farandole.training.data.tokenizer import ByteTokenizer, Tokenizer

SEPARATOR = 500
Write = Callable[[Path, Sequence[Sequence[int]]], Path]


class WordTokenizer(ByteTokenizer):
    """Stands for a tokenizer file with 501 tokens."""

    identity = "words"
    vocabulary = SEPARATOR + 1
    separator = SEPARATOR


WORDS: Tokenizer = WordTokenizer()
DOCUMENTS = [[(7 * number + place) % SEPARATOR for place in range(20 + number)] for number in range(40)]


def write_nanogpt(path: Path, documents: Sequence[Sequence[int]]) -> Path:
    np.array([token for each in documents for token in (*each, SEPARATOR)], np.uint16).tofile(path)
    return path


def write_llmc(
    path: Path, documents: Sequence[Sequence[int]], *, magic: int = 20240520, version: int = 1, missing: int = 0
) -> Path:
    tokens = np.array([token for each in documents for token in (SEPARATOR, *each)], "<u2" if version == 1 else "<u4")
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens[: len(tokens) - missing].tobytes())
    return path


def load(*paths: Path, cache: Path | None = None, tokenizer: Tokenizer = WORDS, held_out: float = 0.3) -> Text:
    return load_text(DataConfig(source="text", held_out=held_out), tokenizer, Bring(paths, cache=cache))


def tokens_of(text: Text) -> tuple[list[int], list[int]]:
    return tuple(part[np.arange(len(part))].tolist() for part in (text.training, text.held_out))


def documents_in(tokens: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == SEPARATOR:
            found.append([])
        else:
            found[-1].append(token)
    return sorted(each for each in found if each)


@pytest.mark.parametrize("write", [write_nanogpt, write_llmc, partial(write_llmc, magic=20240801, version=7)])
def test_a_document_is_held_out_whatever_file_it_is_in(write: Write, tmp_path: Path) -> None:
    whole = load(write(tmp_path / "a.bin", DOCUMENTS))
    moved = load(
        write_nanogpt(tmp_path / "b.bin", DOCUMENTS[30:]), write_llmc(tmp_path / "c.bin", DOCUMENTS[:30][::-1])
    )

    training, held_out = map(documents_in, tokens_of(whole))
    assert sorted(training + held_out) == sorted(DOCUMENTS)
    assert 3 < len(held_out) < 25
    assert (training, held_out) == tuple(map(documents_in, tokens_of(moved)))
    assert whole.found.num_documents == 40
    assert whole.found.largest == SEPARATOR
    assert whole.found.corpus != moved.found.corpus  # another order: other slices


def test_batches_and_slices_come_out_of_the_files(tmp_path: Path) -> None:
    text = load(write_nanogpt(tmp_path / "a.bin", DOCUMENTS), write_llmc(tmp_path / "b.bin", DOCUMENTS[::-1]))
    sampler = Sampler(text, key=(b"run", b"alice"), batch_size=4, context=16, vocabulary=501)
    training = np.array(tokens_of(text)[0])
    copied = Sampler(
        Text(training, training, text.found), key=(b"run", b"alice"), batch_size=4, context=16, vocabulary=501
    )

    assert np.array_equal(sampler.batch(3), copied.batch(3))
    assert np.array_equal(sampler.slice_batch(0, 1), copied.slice_batch(0, 1))
    assert sampler.held_out_batch(0).shape == (4, 17)


def test_tokens_stay_in_their_file_and_their_index_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_llmc(tmp_path / "a.bin", DOCUMENTS)
    first = load(path, cache=tmp_path / "tokens")
    (kept,) = (tmp_path / "tokens").iterdir()
    assert kept.stat().st_size < path.stat().st_size

    def refuse(*_: object) -> None:
        raise AssertionError("the file is looked through again")

    monkeypatch.setattr(token_files, "is_held_out", refuse)
    assert tokens_of(load(path, cache=tmp_path / "tokens")) == tokens_of(first)


def test_a_long_document_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "DOCUMENT_TOKENS", 16)
    monkeypatch.setattr(token_files, "_BLOCK_TOKENS", 10)  # a document may cross blocks
    long = [number % 400 for number in range(500)]
    np.array(long, np.uint16).tofile(tmp_path / "train.bin")

    training, held_out = tokens_of(load(tmp_path / "train.bin"))

    assert sorted(training + held_out) == sorted(long)
    assert len(training) > len(held_out) > 0
    pieces = {tuple(long[at : at + 16]) for at in range(0, 500, 16)}
    ends = [held_out[at : at + 16] for at in range(0, len(held_out), 16)]
    assert all(tuple(end) in pieces for end in ends)


def test_tokens_beside_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 200)) * 40)
    write_nanogpt(tmp_path / "train.bin", DOCUMENTS)
    with pytest.raises(DataError, match=r"train\.bin has ready tokens, and there is text too.*: name one of them"):
        load(tmp_path)


def test_tokens_of_another_tokenizer_are_refused_with_the_reason(tmp_path: Path) -> None:
    np.array([464, 2068, 7586, 50_256], np.uint16).tofile(tmp_path / "gpt2.bin")

    with pytest.raises(
        DataError, match=r"another tokenizer: it has token 50,256, .*only the tokens 0 to 255 \(a token"
    ) as e:
        load(tmp_path / "gpt2.bin", tokenizer=ByteTokenizer())
    assert "GPT-2's has 50,257" in str(e.value)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: write_llmc(path, DOCUMENTS, missing=3), "no whole file of tokens: its header announces 1,620 to"),
        (lambda path: write_llmc(path, DOCUMENTS, version=2), "version 2 of llm.c's header 20240520"),
        (lambda path: path.write_bytes(b"odd"), "no whole number of uint16 tokens"),
    ],
)
def test_damaged_files_are_refused(write: Callable[[Path], object], problem: str, tmp_path: Path) -> None:
    write(tmp_path / "a.bin")

    with pytest.raises(DataError, match=problem):
        load(tmp_path / "a.bin")


def test_of_a_folder_the_training_split_is_taken(tmp_path: Path) -> None:
    write_llmc(tmp_path / "fineweb_train_000001.bin", DOCUMENTS[:10])
    write_llmc(tmp_path / "fineweb_val_000000.bin", DOCUMENTS[10:20])
    (tmp_path / "a").mkdir()
    write_nanogpt(tmp_path / "a" / "train.bin", DOCUMENTS[20:30])
    write_nanogpt(tmp_path / "a" / "val.bin", DOCUMENTS[30:])
    (tmp_path / "pytorch_model.bin").write_bytes(b"\0" * 5_000)

    training, _ = tokens_of(load(tmp_path, held_out=0))

    assert documents_in(training) == sorted(DOCUMENTS[:10] + DOCUMENTS[20:30])

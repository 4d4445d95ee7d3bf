import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.manifest import DataConfig
from farandole.training.base.errors import DataError
from farandole.training.data import dataset as data
from farandole.training.data.batches import Found, draw, is_held_out
from farandole.training.data.dataset import Bring, Sampler, Text, load_text, text_of
from farandole.training.data.sources import Document
from farandole.training.data.tokenizer import ByteTokenizer

TEXT = Text(np.arange(5_000).astype(np.uint16), np.arange(5_000, 5_500).astype(np.uint16), Found(2, 5_499, b""))
keys = st.binary(max_size=40)
steps = st.integers(0, 2**40)


def sampler(run_id: bytes = b"run", author: bytes = b"alice", text: Text = TEXT, vocabulary: int = 6_000) -> Sampler:
    return Sampler(text, key=(run_id, author), batch_size=3, context=8, vocabulary=vocabulary)


@given(keys, keys, steps)
def test_a_batch_is_a_function_of_its_key(run_id: bytes, author: bytes, step: int) -> None:
    first, second = sampler(run_id, author), sampler(run_id, author)
    second.batch(step + 1)

    batch = first.batch(step)

    assert np.array_equal(batch, second.batch(step))
    assert batch.shape == (3, 9)
    assert batch.dtype == np.int64
    assert np.array_equal(np.diff(batch), np.ones((3, 8)))  # windows of the text, in one piece
    assert batch.max() < 5_000, "held-out text is never trained on"


@given(st.tuples(keys, keys, steps), st.tuples(keys, keys, steps))
def test_other_keys_draw_independently(first: tuple[bytes, bytes, int], second: tuple[bytes, bytes, int]) -> None:
    def drawn(key: tuple[bytes, bytes, int]) -> tuple[int, ...]:
        return tuple(draw(2**62, 4, key[0], key[1], key[2].to_bytes(8, "little")))

    assert (drawn(first) == drawn(second)) == (first == second)


def test_draws_are_the_same_on_every_machine() -> None:
    assert draw(1_000_000, 4, b"run", b"alice", bytes(8)).tolist() == [984752, 94137, 348862, 471029]


def test_held_out_batches_are_everybodys() -> None:
    alice, bob = sampler(b"run", b"alice"), sampler(b"another", b"bob")

    assert np.array_equal(alice.held_out_batch(3), bob.held_out_batch(3))
    assert not np.array_equal(alice.held_out_batch(3), alice.held_out_batch(4))
    assert alice.held_out_batch(3).min() >= 5_000


def test_too_little_text_and_tokens_beyond_the_model_are_said_clearly() -> None:
    short = Text(np.zeros(8, np.uint8), np.zeros(8, np.uint8), Found(1, 0, b""))

    with pytest.raises(DataError, match="8 tokens in 1 documents, and a sequence takes 9"):
        sampler(text=short)
    with pytest.raises(DataError, match="too little text is held out"):
        sampler(text=Text(np.zeros(9, np.uint8), np.zeros(8, np.uint8), Found(1, 0, b""))).held_out_batch(0)
    with pytest.raises(DataError, match=r"token 5499, but the model has only 256: .* model\.vocabulary"):
        sampler(vocabulary=256)


def test_documents_are_split_by_their_text_alone() -> None:
    documents = [Document(f"{number}.py", b"%010d" % number) for number in range(400)]

    text = text_of(documents, ByteTokenizer(), 0.25)
    held_out = [document for document in documents if is_held_out(hashlib.sha256(document.text).digest(), 0.25)]

    assert text.found.num_documents == 400
    assert 60 < len(held_out) < 140
    assert bytes(text.held_out[:]) == b"".join(document.text + b"\0" for document in held_out)
    assert len(text.training) == (400 - len(held_out)) * 11
    assert text.training[:].dtype == np.uint8


def test_text_beyond_the_cap_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_TEXT_BYTES", 25)

    text = text_of([Document(str(number), b"x" * 10) for number in range(9)], ByteTokenizer(), 0.0)

    assert text.found.num_documents == 2


def test_text_must_be_named_and_be_there_and_of_one_document_the_end_is_held_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data"):
        load_text(DataConfig(source="text"), ByteTokenizer())
    with pytest.raises(DataError, match=r"no text at .* correct --data"):
        load_text(DataConfig(source="text"), ByteTokenizer(), Bring((tmp_path / "missing",)))
    (tmp_path / "only.txt").write_text("x" * 99)
    text = load_text(DataConfig(source="text"), ByteTokenizer(), Bring((tmp_path / "only.txt",), cache=tmp_path))
    assert (len(text.training), len(text.held_out)) == (95, 5)

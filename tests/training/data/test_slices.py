from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.manifest import DataConfig
from farandole.training.base.errors import NoSliceError
from farandole.training.base.permutation import permute
from farandole.training.data.batches import SliceQueue
from farandole.training.data.dataset import Bring, Sampler, load_text, text_of
from farandole.training.data.sources import Document
from farandole.training.data.tokenizer import ByteTokenizer

CONTEXT, BATCH = 8, 3
TEXT = text_of([Document("a", bytes(range(250)))], ByteTokenizer(), 0.0)
SHARED = DataConfig(source="text", held_out=0.2, epochs=2)


def queue(num_parts: int = 1) -> SliceQueue:
    return SliceQueue(100, b"a corpus", num_parts)


def drawn(slices: SliceQueue) -> list[int]:
    indices = []
    while slices.has_more:
        epoch, index, part = slices.draw()
        slices.settle(epoch, index, part, is_kept=True)
        indices.append(index)
    return indices


@given(st.integers(1, 300), st.binary(max_size=8))
def test_an_order_has_every_place_once(length: int, key: bytes) -> None:
    order = permute(np.arange(length), length, key)
    assert sorted(order.tolist()) == list(range(length))
    assert np.array_equal(permute(np.arange(length)[::-1], length, key), order[::-1])


def test_orders_are_the_same_on_every_machine_and_other_keys_give_others() -> None:
    assert permute(np.arange(6), 1_000_003, b"run", b"epoch").tolist() == ORDER
    assert permute(np.arange(6), 1_000_003, b"run", b"another").tolist() != ORDER


ORDER = [92594, 442687, 80184, 703767, 205826, 784941]


def sampler(run_id: bytes = b"run", author: bytes = b"alice", order: bytes = b"") -> Sampler:
    return Sampler(TEXT, key=(run_id, author), batch_size=BATCH, context=CONTEXT, order=order)


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_shows_every_window_once(epoch: int) -> None:
    batches = [sampler().slice_batch(epoch, index) for index in range(sampler().slices().num_slices)]
    starts = Counter(int(window[0]) for batch in batches for window in batch)
    num_windows = 250 // CONTEXT
    assert set(starts) == {CONTEXT * window for window in range(num_windows)}
    assert starts.total() == -(-num_windows // BATCH) * BATCH  # the last batch is filled up
    assert all(np.array_equal(np.diff(batch), np.ones((BATCH, CONTEXT))) for batch in batches)


def test_an_order_is_of_its_run_and_epoch_and_does_not_depend_on_the_author() -> None:
    first = sampler().slice_batch(1, 2)
    assert np.array_equal(sampler(author=b"bob").slice_batch(1, 2), first)
    assert not np.array_equal(sampler().slice_batch(0, 2), first)
    assert not np.array_equal(sampler(b"another").slice_batch(1, 2), first)
    assert np.array_equal(sampler(b"another", order=b"run").slice_batch(1, 2), first), "a run can have another's order"


def test_the_same_documents_make_the_same_corpus_wherever_they_lie(tmp_path: Path) -> None:
    for home, folders in (("alice", ("x", "y")), ("bob", ("y", "x"))):
        for folder in folders:
            (tmp_path / home / folder).mkdir(parents=True)
            for name in (f"{folder}.txt", "same.txt"):
                (tmp_path / home / folder / name).write_text(f"text of {folder}, " * 20)
    alice = load_text(SHARED, ByteTokenizer(), Bring((tmp_path / "alice" / "x", tmp_path / "alice" / "y")))
    bob = load_text(SHARED, ByteTokenizer(), Bring((tmp_path / "bob" / "y", tmp_path / "bob" / "x")))
    assert len(alice.found.corpus) == 8
    assert alice.found.corpus == bob.found.corpus
    assert np.array_equal(alice.training[:], bob.training[:])
    (tmp_path / "bob" / "y" / "y.txt").write_text("text of y! " * 20)
    other = load_text(SHARED, ByteTokenizer(), Bring((tmp_path / "bob" / "y", tmp_path / "bob" / "x")))
    assert other.found.corpus != alice.found.corpus


def test_what_is_assigned_is_drawn_once_in_order_and_reported_also_when_an_assignment_is_late() -> None:
    slices = queue()
    slices.assign(1, [(10, 3), (40, 2)])
    assert drawn(slices) == [10, 11, 12, 40, 41]
    assert slices.take_trained() == [(10, 3), (40, 2)]
    assert slices.take_trained() == []
    with pytest.raises(NoSliceError):
        slices.draw()
    slices = queue()
    slices.assign(1, [(10, 8)])
    for _ in range(3):
        slices.settle(*slices.draw(), is_kept=True)
    slices.assign(1, [(11, 5), (60, 2)])  # by somebody who has heard of one, and has trimmed the lease
    assert drawn(slices) == [13, 14, 15, 60, 61]


def test_another_epoch_begins_anew() -> None:
    slices = queue()
    slices.assign(1, [(10, 2)])
    first = slices.draw()
    slices.assign(2, [(10, 2)])
    slices.settle(*first, is_kept=True)
    assert slices.take_trained() == []
    assert drawn(slices) == [10, 11]
    assert slices.epoch == 2


def test_a_slice_is_done_when_all_its_parts_are_and_lost_ones_are_drawn_again() -> None:
    slices = queue(num_parts=2)
    slices.assign(0, [(5, 2)])
    parts = [slices.draw() for _ in range(4)]
    assert parts == [(0, 5, 0), (0, 5, 1), (0, 6, 0), (0, 6, 1)]
    assert not slices.has_more
    for part, is_kept in zip(parts, (True, False, True, True), strict=True):
        slices.settle(*part, is_kept=is_kept)
    assert slices.take_trained() == [(6, 1)]
    assert drawn(slices) == [5]
    assert slices.take_trained() == [(5, 1)]

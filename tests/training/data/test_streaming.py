"""Data sets that are read as they come: from folders here, by the same code as from the Hub."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from farandole.protocol.run.manifest import DataConfig, InnerConfig, Manifest, ModelConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.errors import DataError
from farandole.training.data.batches import is_held_out
from farandole.training.data.dataset import Bring
from farandole.training.data.streaming import DataStream, StreamSampler
from farandole.training.data.tokenizer import ByteTokenizer
from farandole.training.engine.learner import Learner, build_learner

SHARE = 0.2
CONTEXT, BATCH = 16, 4
MODEL = ModelConfig(num_layers=1, width=16, num_heads=2, hidden=32, context=CONTEXT, vocabulary=256)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of a hundred documents."""
    folder = tmp_path / "data"
    folder.mkdir()
    for shard in range(3):
        rows = [json.dumps({"text": f"{shard}-{number:03}: " + "abc " * 10, "n": 1}) for number in range(100)]
        (folder / f"train-{shard}.jsonl").write_text("\n".join(rows))
    return folder


def sampler(folder: Path, author: bytes = b"alice", share: float = SHARE, field: str = "text") -> StreamSampler:
    return StreamSampler(
        [DataStream(str(folder), field)],
        ByteTokenizer(),
        share,
        key=(b"run", author),
        batch_size=BATCH,
        context=CONTEXT,
        vocabulary=256,
        progress=lambda position, size: None,
    )


def text_in(batches: list[np.ndarray[tuple[int, int], np.dtype[np.int64]]]) -> bytes:
    """Of consecutive windows."""
    return b"".join(bytes(window[:-1].astype(np.uint8)) for batch in batches for window in batch)


def documents_in(text: bytes) -> list[bytes]:
    return [document for document in text.split(b"\0")[1:-1] if document]


def test_batches_are_consecutive_windows_of_whole_documents(folder: Path) -> None:
    drawn = sampler(folder)
    batches = [drawn.batch(step) for step in range(100)]

    assert np.array_equal(drawn.batch(99), batches[-1]), "a step that is asked for again"
    assert all(batch.shape == (BATCH, CONTEXT + 1) for batch in batches)
    for batch, following in itertools.pairwise(batches):
        assert np.array_equal(batch[1:, 0], batch[:-1, -1])
        assert batch[-1, -1] == following[0, 0]
    found = documents_in(text_in(batches))
    assert len(found) > 50
    assert all(document.endswith(b"abc ") and document[1:2] == b"-" for document in found)
    assert not any(is_held_out(hashlib.sha256(document).digest(), SHARE) for document in found)


def test_nodes_read_in_orders_of_their_own_and_hold_out_the_same(folder: Path) -> None:
    alice, again, bob = sampler(folder), sampler(folder), sampler(folder, b"bob")
    assert np.array_equal(alice.batch(0), again.batch(0))
    assert not np.array_equal(alice.batch(1), bob.batch(1))
    assert not np.array_equal(sampler(folder).batch(5), alice.batch(2))  # after a restart: in another order
    for index in range(3):
        assert np.array_equal(alice.held_out_batch(index), bob.held_out_batch(index))


def test_a_stream_begins_again_where_it_ends(folder: Path) -> None:
    drawn = sampler(folder)
    num_tokens = 300 * 48
    batches = [drawn.batch(step) for step in range(3 * num_tokens // (BATCH * CONTEXT))]
    found = documents_in(text_in(batches))
    held_out = {document for document in found if is_held_out(hashlib.sha256(document).digest(), SHARE)}
    assert held_out == set()
    assert 200 < len(set(found)) < 280
    assert len(found) > 1.5 * len(set(found))


def learner_of(folder: Path, data: DataConfig) -> Learner:
    inner = InnerConfig(batch_size=BATCH, learning_rate=1e-2, warmup_steps=1)
    return build_learner(
        Manifest("a run", MODEL, data=data, inner=inner),
        run_id=b"run",
        author=b"alice",
        settings=TrainerSettings(device="cpu"),
        bring=Bring(streams=(str(folder),)),
    )


def test_a_learner_learns_from_a_stream_which_has_no_epochs(folder: Path) -> None:
    with pytest.raises(DataError, match=r"this run counts epochs of the data .* name its folder with --data"):
        learner_of(folder, DataConfig(source="text", epochs=2))
    learner = learner_of(folder, DataConfig(source="text", held_out=SHARE))
    before = learner.evaluate(2)
    for _ in range(60):
        learner.learn()
    assert learner.evaluate(2) < before - 1


def test_what_is_wrong_with_a_stream_is_said(folder: Path) -> None:
    with pytest.raises(DataError, match="content"):
        sampler(folder, field="content").batch(0)
    with pytest.raises(DataError, match="n"):
        sampler(folder, field="n").batch(0)
    (folder / "train-1.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"cannot be read on|cannot be opened"):
        drawn = sampler(folder, share=0.0)
        for step in range(1_000):
            drawn.batch(step)


@pytest.mark.parametrize("name", ["", "nowhere", "../up/down", "https://example.org/data", "a/b/c", "a/b:c/d", "csv"])
def test_what_is_no_data_sets_name_is_refused_before_anything_is_asked_for(name: str) -> None:
    with pytest.raises(DataError, match="this is neither a folder nor OWNER/NAME"):
        DataStream(name, "text")


def test_no_data_sets_code_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    trap = tmp_path / "trap"
    (folder / "scripted.py").write_text(
        f"open({str(trap)!r}, 'w')\nimport datasets\nclass A(datasets.GeneratorBasedBuilder): pass"
    )
    with pytest.raises(DataError, match="farandole runs no code of a data set"):
        DataStream(str(folder), "text")
    assert not trap.exists()


def test_a_data_set_without_text_is_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    with pytest.raises(DataError, match=r"there is no text to train on in .* name another data set with --stream"):
        sampler(tmp_path / "data").batch(0)

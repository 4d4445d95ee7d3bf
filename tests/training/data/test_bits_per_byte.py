"""Bits per byte of the held-out text: equal for the same text in every format, and comparable between tokenizers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from farandole.protocol.run.manifest import DataConfig, InnerConfig, Manifest
from farandole.protocol.run.models import preset
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.data.dataset import Bring, build_sampler, load_text
from farandole.training.data.tokenizer import load_tokenizer
from farandole.training.engine.learner import build_learner

from ...tokenizer_files import write_bpe

WORDS = ("the cat sat on the mat", "and the mat", "sat on", "naïve 雨", "x = f(y)")
DOCUMENTS = [" ".join(WORDS[(number + word * word) % len(WORDS)] for word in range(9 + number)) for number in range(40)]
NUM_BATCHES = 4


@pytest.fixture
def bpe(tmp_path: Path) -> tuple[Manifest, Path]:
    path, config = write_bpe(tmp_path)
    manifest = Manifest(
        "bits",
        msgspec.structs.replace(preset("tiny"), context=32, vocabulary=300, num_layers=1),
        tokenizer=config,
        data=DataConfig(source="text", held_out=0.5),
        inner=InnerConfig(batch_size=8),
    )
    return manifest, path


def ratio(manifest: Manifest, bring: Bring) -> float:
    found = build_sampler(manifest, b"run", b"alice", bring).tokens_per_byte(NUM_BATCHES)
    assert found is not None
    return found


def test_every_kind_of_text_has_the_ratio_of_its_documents(bpe: tuple[Manifest, Path], tmp_path: Path) -> None:
    manifest, file = bpe
    tokenizer = load_tokenizer(manifest.tokenizer, file)
    (tmp_path / "data").mkdir()
    records = tmp_path / "data" / "train.jsonl"
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    held_out = load_text(manifest.data, tokenizer, Bring((records,))).held_out
    text = tokenizer.decode([token for token in held_out[:].tolist() if token != tokenizer.separator])
    num_documents = int((held_out[:] == tokenizer.separator).sum())
    expected = len(held_out) / (len(text.encode()) + num_documents)
    assert 0.3 < expected < 0.8

    ready = tmp_path / "train.bin"
    tokens = [token for text in DOCUMENTS for token in (*tokenizer.encode(text.encode()).tolist(), tokenizer.separator)]
    np.array(tokens, np.uint16).tofile(ready)
    for bring in (
        Bring((records,), tokenizer=file),
        Bring((records,), tokenizer=file, cache=tmp_path / "tokens"),
        Bring((ready,), tokenizer=file),
        Bring(streams=(str(tmp_path / "data"),), tokenizer=file),
    ):
        assert ratio(manifest, bring) == pytest.approx(expected, rel=0.1), bring


def test_a_learner_converts_its_loss(bpe: tuple[Manifest, Path], tmp_path: Path) -> None:
    manifest, file = bpe
    (tmp_path / "records.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    bring = Bring((tmp_path / "records.jsonl",), tokenizer=file)
    learner = build_learner(
        manifest, run_id=bytes(32), author=bytes(32), settings=TrainerSettings(device="cpu"), bring=bring
    )
    loss = learner.evaluate(NUM_BATCHES)

    bits = learner.bits_per_byte(loss, NUM_BATCHES)
    assert bits == pytest.approx(loss / math.log(2) * ratio(manifest, bring))

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from farandole.protocol.run.manifest import DataConfig, InnerConfig, Manifest, TokenizerConfig
from farandole.protocol.run.models import preset
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.errors import DataError
from farandole.training.data.dataset import Bring, build_sampler, load_text
from farandole.training.data.tokenizer import ByteTokenizer, TextStream, Tokenizer, load_tokenizer, tokens_per_byte
from farandole.training.engine.learner import build_learner

from ...tokenizer_files import SEPARATOR, write_bpe, write_words


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> tuple[Path, TokenizerConfig]:
    return write_words(tmp_path, "[UNK]", "hello", "world", SEPARATOR)


def test_bytes_are_their_own_tokens_and_a_separator_counts_as_one() -> None:
    tokenizer = ByteTokenizer()

    tokens = tokenizer.encode("né\n".encode())

    assert tokens.tolist() == [110, 195, 169, 10]
    assert tokenizer.decode(tokens.tolist()) == "né\n"
    assert load_tokenizer(TokenizerConfig()).vocabulary == 256
    assert tokens_per_byte(ByteTokenizer(), [[110, 0, 195, 169], [0, 0]]) == 1.0


def test_a_tokenizer_file_is_used(tokenizer_file: tuple[Path, TokenizerConfig]) -> None:
    path, config = tokenizer_file
    tokenizer = load_tokenizer(config, path)

    assert tokenizer.encode(b"hello strange world").tolist() == [1, 0, 2]
    assert (tokenizer.vocabulary, tokenizer.separator) == (4, 3)
    assert tokenizer.decode([1, 2]) == "hello world"


def test_what_is_wrong_with_a_tokenizer_file_is_said(
    tokenizer_file: tuple[Path, TokenizerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = tokenizer_file
    with pytest.raises(DataError, match="--tokenizer"):
        load_tokenizer(config)
    with pytest.raises(DataError, match="cannot read"):
        load_tokenizer(config, path.with_name("missing.json"))
    with monkeypatch.context() as patch, pytest.raises(DataError, match=r"pip install '?tokenizers"):
        patch.setitem(sys.modules, "tokenizers", None)
        load_tokenizer(config, path)
    for content, is_the_runs, words in (
        (path.read_bytes() + b" ", False, r"not the run's tokenizer: .* the person who invited you"),
        (b"\xff{}", True, r"no tokenizer file: .* with --tokenizer"),
    ):
        path.write_bytes(content)
        wanted = replace(config, sha256=hashlib.sha256(content).hexdigest()) if is_the_runs else config
        with pytest.raises(DataError, match=words):
            load_tokenizer(wanted, path)


def test_tokens_per_byte_are_those_of_the_text_whatever_the_windows_cut_or_not_known(tmp_path: Path) -> None:
    path, config = write_bpe(tmp_path)
    tokenizer = load_tokenizer(config, path)
    texts = ["the cat sat on the mat, naïve and déjà vu", "the 雨 on the mat"] * 20
    stream = [token for text in texts for token in (*tokenizer.encode(text.encode()).tolist(), tokenizer.separator)]
    num_bytes = sum(len(text.encode()) + 1 for text in texts)
    first_bytes = len(tokenizer.decode(stream[:1]).encode())

    assert tokens_per_byte(tokenizer, [stream]) == (len(stream) - 1) / (num_bytes - first_bytes)
    assert (len(stream) - 1) / (num_bytes - first_bytes) < 0.8
    windows = [stream[at : at + 101] for at in range(0, len(stream) - 101, 100)]
    assert tokens_per_byte(tokenizer, windows) == pytest.approx(len(stream) / num_bytes, rel=0.02)
    path, config = write_bpe(tmp_path, has_decoder=False)
    tokenizer = load_tokenizer(config, path)
    tokens = tokenizer.encode(b"the cat sat on the mat and the mat sat on the cat").tolist()
    assert tokens_per_byte(tokenizer, [tokens]) is None


def streamed(tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    stream = TextStream(tokenizer, before)
    return [*(stream.add(token) for token in tokens), stream.end()]


@pytest.mark.parametrize(
    "data",
    [
        "na\u00efve \u20ac \U0001f600.".encode(),
        b"\xff\xff\xff\xff\xff\xe2\x82\xac",  # invalid bytes, then a character
        b"\xe2\x82A\xf0\x9f\x98",  # two characters that are never completed
        b"\xef\xbf\xbd" * 5,  # the replacement character itself
        b"",
    ],
)
def test_pieces_together_are_the_text_of_all_tokens(data: bytes) -> None:
    pieces = streamed(ByteTokenizer(), list(data))
    assert "".join(pieces) == data.decode(errors="replace")
    assert "".join(streamed(ByteTokenizer(), list(data), list(b"before"))) == data.decode(errors="replace")


def test_words_of_a_file_keep_their_blanks(tokenizer_file: tuple[Path, TokenizerConfig]) -> None:
    path, config = tokenizer_file
    tokenizer = load_tokenizer(config, path)
    assert streamed(tokenizer, [2, 1], before=[1]) == [" world", " hello", ""]


# Bits per byte of the held-out text: equal for the same text in every format, comparable between tokenizers


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

"""The example: its shapes, files and measure, and a small speedrun with real homes."""

from __future__ import annotations

import json
import math
import os
import pickle  # of which nanochat's tokenizers are files
import re
import signal
import subprocess
import sys
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from farandole.node.base.config.toml_file import read_toml
from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.models import num_parameters
from farandole.training.data.tokenizer import FileTokenizer

pytest.importorskip("pyarrow")
tokenizers = pytest.importorskip("tokenizers")

EXAMPLE = Path(__file__).parent
sys.path.insert(0, str(EXAMPLE))  # as its programs find each other

import speedrun
from measure import pulled_model
from nanochat_model import files
from nanochat_model.bits import bits_per_byte
from nanochat_model.gpt import GPT, LOGIT_CAP, build, width_of
from prepare import prepare
from rich.progress import Progress
from safetensors.torch import save_file

BUILD = "nanochat_model.gpt:build"
TEXTS = [
    "def one(x):\n    return x + 11\n" * 40,
    "Over the lazy dog, don't jump 12345 times. " * 60,
    "你好世界 \t\n" * 90,
] * 4
PATIENCE = 300.0  # a hang, not a duration


def small_model(vocabulary: int = 300, context: int = 16, depth: int = 2) -> GPT:
    return GPT(build({"depth": depth, "context": context, "vocabulary": vocabulary, "head_width": 32}))


# Shapes


@pytest.mark.parametrize(("depth", "width"), [(2, 128), (3, 256), (4, 256), (12, 768)])
def test_the_depth_decides_the_shape(depth: int, width: int) -> None:
    assert width_of(depth) == width
    with torch.device("meta"):
        model = GPT(build({"depth": depth, "context": 8, "vocabulary": 512}))
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 * 512 * width + depth * 12 * width**2
    assert all(parameter.ndim == 2 for parameter in model.parameters()), "no biases, and norms without weights"


def test_it_sees_no_later_token_and_caps_its_logits() -> None:
    torch.manual_seed(0)
    model = small_model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    tokens = torch.randint(300, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (tokens[:, 9] + 1) % 300
    logits, others = model(tokens), model(changed)
    torch.testing.assert_close(logits[:, :9], others[:, :9])
    assert not torch.allclose(logits[:, 9:], others[:, 9:])
    assert LOGIT_CAP * 0.9 < logits.abs().max() <= LOGIT_CAP


def test_positions_count_by_their_distance() -> None:
    (layer, _) = small_model().layers
    x = torch.randn(32).expand(1, 1, 16, 32)
    turned = layer.turned(x)[0, 0]
    products = turned @ turned.T
    torch.testing.assert_close(products[0, 3], products[9, 12])
    assert not torch.allclose(products[0, 3], products[0, 4])


def test_the_run_file_makes_a_run_of_it(tmp_path: Path) -> None:
    prepared = tmp_path / "data"
    prepared.mkdir()
    files.train_tokenizer(TEXTS, 300).save(str(prepared / "tokenizer.json"))
    settings = read_toml(EXAMPLE / "run.toml").values
    settings["model"]["vocabulary"] = 300
    manifest = manifest_of(settings, tmp_path, 0, (BUILD,))
    assert num_parameters(manifest.model) == 2 * 300 * 128 + 2 * 12 * 128**2


# Files


class Encoding:
    """What `tiktoken.Encoding` is to a pickle."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def pickled(ranks: dict[bytes, int], special: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a pickle as nanochat writes it."""
    module = types.ModuleType("tiktoken.core")
    monkeypatch.setitem(sys.modules, "tiktoken", types.ModuleType("tiktoken"))
    monkeypatch.setitem(sys.modules, "tiktoken.core", module)
    monkeypatch.setattr(Encoding, "__module__", "tiktoken.core")
    monkeypatch.setattr(module, "Encoding", Encoding, raising=False)
    state = {"name": "rustbpe", "pat_str": r"\s+|\S+", "mergeable_ranks": ranks, "special_tokens": special}
    return pickle.dumps(Encoding(**state))


def tokens_by_ranks(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Merge the pair of the lowest rank until none is left, as tiktoken does."""
    parts = [bytes([byte]) for byte in piece]
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        _, first = min(pairs)
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return [ranks[part] for part in parts]


def test_a_pickled_tokenizer_gives_tiktokens_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [b"th", b"he", b"the", b"ab", b"bc", b"abc", b"aabc", b"\xe4\xbd", b"\xe4\xbd\xa0", b"  "]
    ranks = {bytes([byte]): byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    special = {files.BOS: 266, "<|user_start|>": 267}
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(pickled(ranks, special, monkeypatch))
    tokenizer = files.read_tokenizer(path)
    for text in ("the other heath aabcabc 你好 \x00\xad end", f"a {files.BOS} in a text", "aabc bcabc   thethe"):
        want = [token for piece in re.findall(r"\s+|\S+", text) for token in tokens_by_ranks(piece.encode(), ranks)]
        tokenizer.encode_special_tokens = True
        assert tokenizer.encode(text).ids == want
        assert tokenizer.decode(want) == text
    counts = files.token_bytes(tokenizer).tolist()
    assert counts == [*map(len, ranks), 0, 0]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert FileTokenizer(files.read_tokenizer(tmp_path / "tokenizer.json"), "").separator == special[files.BOS]


class Harmful:
    """Makes a pickle that runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


def test_a_pickle_that_is_no_tokenizer_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    others: tuple[object, ...] = (Harmful(), [], {"mergeable_ranks": {}})
    for other in others:
        with pytest.raises(pickle.UnpicklingError):
            files.from_pickle(pickle.dumps(other))
        Path("tokenizer.pkl").write_bytes(pickle.dumps(other))
        with pytest.raises(ValueError, match=r"tokenizer\.pkl is no tokenizer of nanochat"):
            files.read_tokenizer(Path("tokenizer.pkl"))
    assert not Path("harmed").exists()


def test_shards_give_back_what_was_written_and_the_last_is_for_measuring(tmp_path: Path) -> None:
    texts = [f"{number} {text}" for number, text in enumerate(TEXTS)]
    files.write_shards(texts, tmp_path, 3)
    shards, last = files.shards_of(tmp_path)
    assert [path.name for path in (*shards, last)] == [f"shard_0000{number}.parquet" for number in range(3)]
    assert sorted(files.texts_in([*shards, last])) == sorted(texts)
    tokenizer = files.train_tokenizer(texts, 300)
    tokens = files.tokens_in([last], tokenizer)
    assert tokens.tolist().count(tokenizer.token_to_id(files.BOS)) == len([*files.texts_in([last])])
    with pytest.raises(FileNotFoundError, match="two are needed"):
        files.shards_of(tmp_path / "empty")


def test_bits_per_byte_counts_neither_nats_nor_bytes_of_special_tokens() -> None:
    class Model(nn.Module):
        """Gives each token the same probability, but never token 0."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 8).index_fill(-1, torch.tensor(0), -1e4)

    num_bytes = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])
    tokens = torch.tensor([1, 2, 0, 3, 7, 0, 2, 5, 1])  # two rows, whose targets are all but the first
    expected = 6 * math.log2(7) / (2 + 3 + 7 + 2 + 5 + 1)
    assert bits_per_byte(Model(), tokens, num_bytes, 4, 9) == pytest.approx(expected)
    with pytest.raises(ValueError, match="make no row"):
        bits_per_byte(Model(), tokens, num_bytes, 9, 9)


def test_a_pulled_model_is_what_was_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = small_model(depth=3)
    for layer in model.layers:
        nn.init.normal_(layer.down.weight)
    weights = {f"slow/{name}": tensor for name, tensor in model.state_dict().items()}
    momentum = {f"momentum/{name}": torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(weights | momentum, tmp_path / "checkpoint.safetensors")
    tokens = torch.randint(300, (2, 16))
    torch.testing.assert_close(pulled_model(tmp_path, 16, 32)(tokens), model(tokens), rtol=0, atol=0)


# The speedrun


def test_the_time_to_a_target_lies_between_two_samples() -> None:
    result = speedrun.Result("a", 1, 1.0, [(10.0, 5.0), (20.0, 4.0), (30.0, 4.5), (40.0, 2.0)])
    assert [result.seconds_to(target) for target in (6.0, 5.0, 4.25, 4.0, 3.0, 1.0)] == [10, 10, 17.5, 20, 36, None]


def small(data: Path, seconds: float = 14.0) -> speedrun.Settings:
    return speedrun.Settings(
        data, context=16, batch=2, seconds=seconds, step_seconds=0.2, sample_seconds=2, round_seconds=2, rows=16
    )


def test_homes_that_train_together_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two homes, the second twice as fast, beside one machine; the test fails if they meet nobody or learn nothing."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setitem(speedrun.WAYS, "four", speedrun.Way("two homes", (1.0, 2.0)))
    prepare(tmp_path / "data", num_shards=3, vocabulary=300, megabytes=0.3)
    speedrun.run(small(tmp_path / "data"), ["one", "four"], tmp_path, None)
    report = json.loads((tmp_path / "speedrun.json").read_text())
    one, two = report["results"]
    assert report["target"] == one["curve"][-1][1]
    for result in one, two:
        assert result["curve"][-1][1] < result["curve"][0][1]
    logs = [(tmp_path / "four" / f"node-{index}" / "rounds.jsonl").read_text().splitlines() for index in range(2)]
    assert two["steps"] > max(sum(json.loads(line)["inner_steps"] for line in lines) for lines in logs), "of both"
    for index in range(2):
        said = (tmp_path / "four" / f"home-{index}.log").read_text()
        assert (met := re.search(r"^exchanges (\d+), rounds \d+$", said, re.M)) is not None
        assert int(met[1]) >= 1


def test_a_home_that_fails_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    files.train_tokenizer(TEXTS, 300).save(str(tmp_path / files.TOKENIZER_NAME))
    words = r"ended early: error: .* has 0 Parquet files"
    with Progress() as progress, pytest.raises(speedrun.SpeedrunError, match=words):
        speedrun.play(speedrun.WAYS["one"], small(tmp_path), tmp_path / "one", progress)


def test_ctrl_c_ends_all_homes(tmp_path: Path) -> None:
    prepare(tmp_path / "data", num_shards=3, vocabulary=300, megabytes=0.3)
    out = tmp_path / "out"
    out.mkdir()
    options = ["--data", str(tmp_path / "data"), "--out", str(out), "--ways", "one", "--context", "16"]
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "speedrun.py"), *options, "--seconds", "3600", "--step-seconds", "0.2"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    log, deadline = out / "one" / "home-0.log", time.monotonic() + PATIENCE
    while not log.exists() or "s: step" not in log.read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, printed.splitlines()[-1].split(";")[0]) == (130, "stopped")
    assert log.read_text().splitlines()[-1] == "stopped", "the home has ended in order"

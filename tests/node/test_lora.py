"""Two friends, each with text of their own, train adapters of a base model that both have."""

from __future__ import annotations

import itertools
import json
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from farandole.node.base.identity import is_locked
from farandole.node.base.settings import NodeSettings
from farandole.node.store.consolidated.hf_folder import byte_level_tokenizer
from farandole.protocol.run.manifest import decode_manifest
from farandole.protocol.run.models import num_parameters
from farandole.training.base.errors import TrainingError
from farandole.training.model.adapters import adapted
from farandole.training.model.base_folder import base_hash
from farandole.training.model.stages import build_module

from .conftest import Cli
from .daemons import Daemon, farandole, joined, loop, node_of_a_loop

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of these packages about each other

TEXTS = {"alice": "def one(x):\n    return x + 1\n", "bob": "The quick brown fox jumps over the lazy dog. "}


def a_base(folder: Path, seed: int = 0, *, is_tied: bool = False) -> Path:
    """Write a small Llama with bytes as tokens."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=64, tie_word_embeddings=is_tied, **sizes)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_tokenizer()))
    return folder


def loss_of(model: Any, text: str) -> float:
    tokens = torch.tensor([list(text.encode())[:64]])
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a base and both friends' text into the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(2_000 * text)
    return a_base(tmp_path / "base")


async def test_friends_train_adapters_of_a_base_that_each_has(tmp_path: Path, base: Path) -> None:
    a_base(tmp_path / "other", seed=1)
    mine, yours = (("--base", str(base), "--data", f"{name}.txt", "--device", "cpu") for name in TEXTS)
    made = await farandole(tmp_path / "alice", "lora", "create", *mine[:4], "--rank", "2")
    assert made.code == 0, made.err
    assert f"farandole join lora.manifest --base {base} --data alice.txt" in made.out
    manifest, signed = decode_manifest(Path("lora.manifest").read_bytes())
    assert num_parameters(manifest.model) < 20_000, "the base is not the run's"
    assert manifest.outer.kind == "adapters"

    async with joined(tmp_path / "alice", "lora.manifest", *mine) as alice:
        await alice.says("listening on")
        invite = alice.invite(signed.run_id)
        # Who has no base, or another one, learns it before anything is trained.
        for options, words in (
            (yours[2:], "name your copy of it with --base"),
            (("--base", str(tmp_path / "other"), *yours[2:]), base_hash(base)),
        ):
            async with joined(tmp_path / "carol", invite, *options) as carol:
                await carol.says("error", words)
        async with joined(tmp_path / "bob", invite, *yours) as bob:
            await bob.says("averaged with", alice.name)
            await alice.says("averaged with", bob.name)
            said = await farandole(tmp_path / "bob", "sample", "--base", str(base), "--tokens", "5")
            assert said.code == 0, said.err
            pulled = await farandole(tmp_path / "bob", "checkpoint", "pull", "--to", "model", "--merge", "2")
            assert pulled.code == 0, pulled.err
            assert await bob.end(signal.SIGTERM) == 0

    from peft import PeftModel  # takes a second, also of testers that do not run this

    exported = await farandole(tmp_path, "checkpoint", "export", "model", "--to", "adapters")
    assert exported.code == 0, exported.err
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    before = [loss_of(model, text) for text in TEXTS.values()]
    adapted = PeftModel.from_pretrained(model, "adapters")
    assert all(new < old for new, old in zip([loss_of(adapted, text) for text in TEXTS.values()], before, strict=True))


async def test_trainers_with_peft_agree_on_adapters_of_a_base_that_the_run_names(tmp_path: Path, base: Path) -> None:
    other, run = a_base(tmp_path / "other", seed=1), tmp_path / "run"

    def member(name: str, folder: Path, where: str) -> AbstractAsyncContextManager[Daemon]:
        program = (str(Path(__file__).with_name("peft_loop.py")),)
        return loop(tmp_path / name, str(folder), where, TEXTS.get(name, "else"), name, program=program)

    async with member("alice", base, "new") as alice:
        await alice.says("round 0")
        async with node_of_a_loop(run) as node:
            invite = await node.own_invite()
            manifest, signed = decode_manifest((run / "start" / "manifest").read_bytes())
            external = manifest.model.external
            assert external is not None
            assert manifest.outer.kind == "adapters"
            assert external.base == base_hash(base)
            assert all(".lora_" in name for name in external.parameters), "the frozen base does not travel"
            async with member("carol", other, invite) as carol:
                await carol.says("another base model", base_hash(other), base_hash(base))
                assert await carol.ends() != 0
            async with member("bob", base, invite) as bob:
                await bob.says("enough exchanges")
                await alice.says("enough exchanges")
                assert await bob.end(signal.SIGTERM) != 0
                home = tmp_path / "bob" / "runs" / signed.run_id.hex()[:16]
                assert home.exists()
                assert not is_locked(NodeSettings(home=home).lock), "its node has left"
    agreed = [
        mine
        for mine, yours in itertools.product(*(torch.load(f"{name}.pt", weights_only=True) for name in TEXTS))
        if all(torch.allclose(mine[name], yours[name], rtol=1e-4, atol=1e-6) for name in mine)
    ]
    assert agreed, "an outer step is to the same mean"
    assert all(adapter.any() for name, adapter in agreed[-1].items() if ".lora_B" in name), "they have trained"


def test_the_model_of_such_a_run_is_the_base_until_it_is_trained(cli: Cli, base: Path) -> None:
    assert cli("lora", "create", "--base", base)[0] == 0
    manifest, _ = decode_manifest(Path("lora.manifest").read_bytes())
    own = manifest.model.own
    assert own is not None
    module = build_module(manifest.model, manifest.seed, allowed_models=[f"{own.function}={base}"])
    assert all(".lora_" in name for name, _ in module.named_parameters())
    tokens = torch.arange(32)[None]
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    assert torch.equal(module(tokens), whole(input_ids=tokens).logits.float())
    module(tokens).logsumexp(-1).sum().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())
    with pytest.raises(TrainingError, match=r"--base FOLDER"):
        build_module(manifest.model, manifest.seed)
    # A stranger's manifest with a great rank and few parameters takes no memory for its adapters.
    hostile = replace(manifest.model, own=replace(own, config={**own.config, "rank": 256}))
    with pytest.raises(TrainingError, match="of rank 256 this base's have"):
        build_module(hostile, manifest.seed, allowed_models=[f"{own.function}={base}"])
    os.truncate(base / "model.safetensors", 1_000)
    with pytest.raises(TrainingError, match="another base model than the run's"):
        build_module(manifest.model, manifest.seed, allowed_models=[f"{own.function}={base}"])


def test_a_head_that_is_the_embedding_is_moved_once(tmp_path: Path) -> None:
    folder = a_base(tmp_path, is_tied=True)
    config = {"base": base_hash(folder), "rank": 1, "alpha": 2.0, "folder": str(folder)}
    module = adapted(config).to(torch.float64)  # as to another device: each tensor is made again
    names = [
        name
        for name, _ in module.named_buffers(remove_duplicate=False)
        if name.endswith(("lm_head.weight", "embed_tokens.weight"))
    ]
    first, second = map(module.get_buffer, names)
    assert first is second


def test_what_is_wrong_with_a_base_is_said_before_a_run_is_made(cli: Cli, base: Path, tmp_path: Path) -> None:
    for options, words in (
        ([], "with --base FOLDER"),
        (["--base", tmp_path / "nowhere"], "does not exist"),
        (["--base", tmp_path], "has no config.json"),
    ):
        code, _, said = cli("lora", "create", *options)
        assert code != 0
        assert words in said.replace("\n", " ")
        assert not Path("lora.manifest").exists()
    assert cli("lora", "create", "--base", base)[0] == 0
    assert "is there already" in cli("lora", "create", "--base", base)[2]

"""``farandole sample`` and ``chat`` as users type them: a node's newest weights, folders, and what cannot be done."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.node.base.errors import Exit
from farandole.node.base.settings import NodeSettings
from farandole.node.base.system.terminal import without_controls
from farandole.node.inspect.loaded_model import Generation, load_newest
from farandole.node.state.store import MANIFEST_FACT, open_store
from farandole.node.store.consolidated.folder import read_folder
from farandole.node.store.folder import CheckpointFolder
from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.manifest import SignedManifest, sign_manifest
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.data.tokenizer import ByteTokenizer
from farandole.training.engine.learner import Learner, build_learner

from ...conftest import Cli
from ...daemons import farandole
from ...store.consolidated.runs import KEY, MODELS, decoded, learner_of, manifest_for, pulled, save_stages, trained

PROMPT = "def f(self, x):"  # 15 bytes, and the context is 16
OWN_MODEL = Path(__file__).parents[4] / "examples" / "own_model"


async def node_of(home: Path, signed: SignedManifest, rounds: int, learner: Learner | None = None) -> Learner:
    """Make a node's data directory with the checkpoints of this many rounds; return what trained them."""
    folder = CheckpointFolder(home / "checkpoints", 0)
    folder.path.mkdir(parents=True, exist_ok=True)
    async with open_store(home / "store.sqlite") as store:
        await store.put_fact(MANIFEST_FACT, signed.encode())
    learner = learner or learner_of(signed)
    for round_index in range(1, rounds + 1):
        learner.learn()
        learner.round_end.apply(None)
        learner.checkpoint.save(folder.file(round_index))
    return learner


@pytest.fixture
def model(tmp_path: Path) -> Path:
    signed = manifest_for({**MODELS["own"], "num_stages": 2})
    return pulled(signed, tmp_path / "model", trained(signed, b"a" * 32, steps=2, rounds=1)).path


def argmax_text(learner: Learner, prompt: str, num_tokens: int, context: int = 16) -> str:
    tokens = list(prompt.encode())
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(learner.replica.module(torch.tensor([tokens[-context:]]))[0, -1].argmax()))
    return bytes(tokens[len(prompt) :]).decode(errors="replace")


def test_a_folder_of_pull_continues_the_prompt(cli: Cli, model: Path) -> None:
    command = ("sample", model, "--prompt", PROMPT, "--tokens", 30)
    code, text, says = cli(*command)
    assert code == Exit.OK
    assert text.startswith(PROMPT)
    assert 'of run "a", round 1, 2 inner steps' in says
    assert "this node's" not in says
    assert cli(*command, "--seed", 1)[1] != text == cli(*command)[1]
    told = json.loads(cli(*command, "--json")[1])
    assert PROMPT + told["text"] + "\n" == text
    assert told["run_id"] == read_folder(model).index.run_id.hex()
    assert without_controls(bytes(told["tokens"]).decode(errors="replace")) == told["text"]


async def test_the_newest_weights_of_a_node_that_has_its_store_open(tmp_path: Path) -> None:
    signed = manifest_for(MODELS["own"])
    home = tmp_path / "home"
    learner = await node_of(home, signed, rounds=2)
    damaged = CheckpointFolder(home / "checkpoints", 0).file(3)
    damaged.write_bytes(b"half")
    before = {path.name: path.stat().st_mtime_ns for path in (home / "checkpoints").iterdir()}
    async with open_store(home / "store.sqlite"):
        ended = await farandole(home, "sample", "--prompt", PROMPT, "--tokens", "20", "--temperature", "0", "--json")
        said = await farandole(home, "sample", "--tokens", "1")
    assert 'this node\'s weights of run "a", round 2, 2 inner steps, from ' in said.err
    told = json.loads(ended.out)
    assert told["text"] == without_controls(argmax_text(learner, PROMPT, 20))
    assert (told["round"], told["inner_steps"]) == (2, 2)
    assert {path.name: path.stat().st_mtime_ns for path in (home / "checkpoints").iterdir()} == before


def test_ctrl_c_ends_the_text(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(text: Generation) -> Iterator[str]:
        yield "a token"
        raise KeyboardInterrupt

    monkeypatch.setattr(Generation, "pieces", pieces)
    code, out, err = cli("sample", model)
    assert (code, out) == (Exit.INTERRUPTED, "a token\n")
    assert "Traceback" not in err


def test_escape_sequences_that_a_model_emits_are_shown_and_not_obeyed(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set the title, move the cursor, C1 control sequence, carriage return, bell."""
    attack = "\x1b]0;mine\x07\x1b[2J\u009b31m\r\x08\u202eok\n\t"
    monkeypatch.setattr("farandole.training.model.generation.generate", lambda *_, **__: iter(attack.encode()))
    arguments = ("sample", model, "--prompt", attack)
    told = json.loads(cli(*arguments, "--json")[1])
    assert bytes(told["tokens"]).decode() == attack
    said = cli(*arguments)[1]
    for printed in (said, told["text"]):
        assert "]0;mine" in printed
        assert "\ufffd[2J" in printed
        assert "ok\n\t" in printed
        assert not set(printed) & set("\x1b\x07\x08\r\x7f\u009b\u202e")


def test_without_a_run_or_a_checkpoint_it_says_what_to_do(cli: Cli, home: Path, tmp_path: Path) -> None:
    code, out, says = cli("sample")
    assert (code, out) == (Exit.BAD_INPUT, "")
    assert "knows no run" in says
    assert "farandole join INVITE" in says
    assert not home.exists()
    code, _, says = cli("sample", tmp_path)
    assert code == Exit.BAD_INPUT
    assert "holds no model" in says


async def test_a_checkpoint_of_another_run_is_not_taken(home: Path, cli: Cli) -> None:
    await node_of(home, manifest_for(MODELS["own"]), rounds=1)
    async with open_store(home / "store.sqlite") as store:
        await store.put_fact(MANIFEST_FACT, manifest_for(MODELS["own"], name="b").encode())
    assert "is a checkpoint of another run" in cli("sample")[2]


async def test_of_a_stage_alone_it_says_how_to_get_the_others(home: Path, tmp_path: Path, cli: Cli) -> None:
    signed = manifest_for({**MODELS["own"], "num_stages": 2})
    await node_of(home, signed, rounds=0)
    _, second = save_stages(trained(signed, b"a" * 32, steps=1, rounds=1), signed, tmp_path / "run", "replica")
    second.rename(home / "checkpoints" / "stage-1-round-1.safetensors")
    code, _, says = cli("sample")
    assert code == Exit.BAD_INPUT
    assert "this run's model is in stages, and no node" in says
    assert "farandole checkpoint pull --to model" in says


def test_an_own_model_is_made_only_if_it_is_allowed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = "own_model.convolutional:build_whole"
    monkeypatch.syspath_prepend(OWN_MODEL)
    model: dict[str, Any] = {"own": function, "context": 16, "config": {"width": 16, "depth": 2}}
    signed = sign_manifest(manifest_of({"name": "own", "model": model}, Path(), 0, [function]), KEY)
    settings = TrainerSettings(device="cpu", allow_model=[function])
    learner = build_learner(decoded(signed), run_id=signed.run_id, author=bytes(32), settings=settings)
    learner.learn()
    learner.round_end.apply(None)
    folder = pulled(signed, tmp_path / "model", learner).path
    code, _, says = cli("sample", folder)
    assert code == Exit.BAD_INPUT
    assert f"--allow-model {function}" in says
    arguments = ("--prompt", PROMPT, "--tokens", 20, "--temperature", 0, "--json")
    code, told, _ = cli("sample", folder, "--allow-model", function, *arguments)
    assert code == Exit.OK
    assert json.loads(told)["text"] == without_controls(argmax_text(learner, PROMPT, 20))


def test_a_tokenizer_that_is_not_here_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    signed = manifest_for(MODELS["own"], tokenizer={"kind": "tokenizers", "sha256": "ab" * 32})
    learner = trained(manifest_for(MODELS["own"]), b"a" * 32, steps=1, rounds=1)
    learner.checkpoint.run_id = signed.run_id
    folder = pulled(signed, tmp_path / "model", learner).path
    code, _, says = cli("sample", folder)
    assert code == Exit.BAD_INPUT
    assert "needs the tokenizer file with SHA-256 abab" in says
    assert "--tokenizer" in says


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.node.inspect.loaded_model.available_bytes", lambda: 100_000_000)
    code, _, says = cli("sample", model)
    assert code == Exit.BAD_INPUT
    assert "100 MB are free: stop other programs" in says


def test_a_chat_goes_on_within_the_context(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that Ctrl-C has ended is a part of the chat; the beginning goes when all no longer fits."""
    typed: Iterator[str | BaseException] = iter(
        ["x" * 100, "Hello", KeyboardInterrupt(), "", "And now?", "Again", EOFError()]
    )
    seen: list[str] = []

    def read(*_: object) -> str:
        if isinstance(line := next(typed), BaseException):
            raise line
        return line

    def generate(module: object, start: Sequence[int], **_: object) -> Iterator[int]:
        seen.append(bytes(start).decode())
        yield from b" Hi"
        if len(seen) == 1:
            raise KeyboardInterrupt
        yield from b" there\x07\nUser: what the model makes up"

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("farandole.training.model.generation.generate", generate)
    folder = pulled(manifest_for({**MODELS["own"], "context": 64}), tmp_path / "model").path
    code, printed, says = cli("chat", folder, "--system", "S")
    assert code == Exit.OK
    assert seen == [
        "S\nUser: Hello\nAssistant:",
        "S\nUser: Hello\nAssistant: Hi\nUser: And now?\nAssistant:",
        "S\nUser: Again\nAssistant:",
    ]
    assert printed == " Hi\n\n Hi there\ufffd\n\n Hi there\ufffd\n\n"
    assert "error: too long: 119 tokens, and the model sees 64" in says


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of these packages about each other
def test_folders_of_transformers_and_peft_are_models_too(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are kept between tokens; the text is that of the whole window at each."""
    from peft import LoraConfig, get_peft_model

    from ...test_lora import a_base, transformers

    base, adapters, arguments = a_base(tmp_path / "base"), tmp_path / "adapters", ("-n", 90, "--prompt", PROMPT)
    whole = cli("sample", base, *arguments)
    assert whole[0] == Exit.OK, whole
    with monkeypatch.context() as patch:
        patch.setattr("farandole.training.model.generation.Adapted", type(None))
        assert cli("sample", base, *arguments)[1] == whole[1]

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(str(adapters))
    code, told, says = cli("sample", adapters, "--base", base, *arguments)
    assert (code, f"weights from {adapters}" in says) == (Exit.OK, True)
    assert told != whole[1]
    assert "name its folder with --base FOLDER" in cli("sample", adapters)[2]
    (adapters / "adapter_model.safetensors").rename(adapters / "adapter_model.bin")
    assert "has no adapter_model.safetensors" in cli("sample", adapters, "--base", base)[2]

    template = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}<assistant>"
    (base / "chat_template.jinja").write_text(template)
    loaded = load_newest(NodeSettings(), base, "cpu")
    start, stops = loaded.tokens_of_chat([{"role": "user", "content": "Hi"}])
    assert (bytes(start), stops) == (b"<user>Hi<assistant>", ())


def test_a_stop_is_found_across_pieces() -> None:
    """And what only begins like one is printed."""
    text = Generation(ByteTokenizer(), [0], ("stop", "\nUser:"), frozenset({0}), iter(b"a st\nUs sto\nUser: b"))
    pieces = ["a", " ", "", "", "st", "", "", "\nUs ", "", "", "", "sto", "", "", "", "", ""]
    assert (list(text.pieces()), text.is_ended) == (pieces, True)

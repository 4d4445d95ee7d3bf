"""Three friends in three homes fine-tune a base together, as docs/fine-tune-together.md says, and it was worth it."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from farandole.node.store.consolidated.hf_folder import byte_level_tokenizer, config_of, parts_of
from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.manifest import decode_manifest
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.testnet.methods.adapters import MODEL, trained_base
from farandole.testnet.methods.compare import texts_by_kind
from farandole.testnet.natlab.lab import Lab
from farandole.training.data.dataset import Bring
from farandole.training.engine.learner import build_learner
from farandole.training.model.adapters import Adapted

from ...documents.markdown import ROOT
from ...documents.player import Machine, MakeMachine, Player, Shell, open_player
from .test_two_homes import EXAMPLE, in_homes

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of these packages about each other

KINDS = {"here": "forwarded", "friend": "symmetric", "other": "port-restricted"}
NUM_TRAINED, NUM_HELD_OUT = 2, 3
"""Files of each member that it trains on, and that nobody does."""
PIECE_BYTES = 512
ROUNDS = 70
KILLED_IN = "round 35"
# What a member changes in lora.toml: a higher rate for a small base, short rounds, more held out of little text.
SETTINGS = """
<!-- play: file=lora.toml -->
```toml
name = "lora"
model = {lora = "base", rank = 4}
data = {source = "text", held_out = 0.1}
inner = {learning_rate = 4e-3, warmup_steps = 70, total_steps = 1_400}
rounds = {inner_steps = 20, round_seconds = 3.0, exchange_seconds = 3.0}
```

```console
$ farandole run create lora.toml --force
```
"""
BACK = """
<!-- play: on=friend file=../home/.farandole/config.toml -->
```toml
base = "../../work/base"
data = ["../../work/theirs"]
```

<!-- play: on=friend stays="averaged with" -->
```console
$ farandole join
```
"""
METRICS = """
<!-- play: on={name} -->
```console
$ farandole run metrics --csv > rounds.csv
```
"""


def write_base(folder: Path) -> None:
    """Write a Llama that has learnt a little from the largest packages of Python's library, in a minute."""
    base = trained_base(texts_by_kind(4), 1_500)
    whole = manifest_of({"name": "base", "model": msgspec.to_builtins(MODEL)}, Path(), 0.0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**msgspec.to_builtins(config_of(MODEL))))
    weights = {name: base[ours][first : first + shape[0]] for name, (ours, first, shape) in parts_of(whole).items()}
    assert llama.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"], "the embedding is the head"
    llama.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_tokenizer()))


def texts_of_friends(seed: int) -> list[tuple[bytes, bytes]]:
    """Return each member's text, and text that nobody trains on: different files of one kind, a package of torch."""
    folder = Path(torch.distributions.__file__).parent
    files = [file for file in sorted(folder.glob("*.py")) if 1_500 < file.stat().st_size < 7_000]
    random.Random(seed).shuffle(files)
    all_texts = (file.read_bytes() for file in files)
    return [
        (b"".join(next(all_texts) for _ in range(NUM_TRAINED)), b"".join(next(all_texts) for _ in range(NUM_HELD_OUT)))
        for _ in KINDS
    ]


def among_friends(place: MakeMachine, base: Path, texts: Sequence[tuple[bytes, bytes]]) -> MakeMachine:
    """Give each machine the base, and its own text in small files."""

    def at_home(name: str, folder: Path) -> Machine:
        machine = place(name, folder)
        shutil.copytree(base, machine.folder / "base")
        text, _ = texts[[*KINDS].index(name)]
        own = machine.folder / ("mine" if name == "here" else "theirs")
        own.mkdir()
        for start in range(0, len(text), PIECE_BYTES):
            (own / f"{start}.txt").write_bytes(text[start : start + PIECE_BYTES])
        return machine

    return at_home


@torch.no_grad()
def loss_on(text: bytes, model: Callable[[Tensor], Tensor]) -> float:
    length = MODEL.context + 1
    tokens = torch.tensor([*text])[: len(text) // length * length].view(-1, length)
    return float(F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


def trained_alone(work: Path, data: Path, steps: int) -> Adapted:
    """Train adapters as the run does, in as many inner steps, on one member's text alone."""
    manifest, signed = decode_manifest((work / "lora.manifest").read_bytes())
    own, base = manifest.model.own, work / "base"
    assert own is not None
    settings = TrainerSettings(device="cpu", allow_model=[f"{own.function}={base}"])
    bring = Bring((data,), tokenizer=base / "tokenizer.json")
    learner = build_learner(manifest, run_id=signed.run_id, author=bytes(32), settings=settings, bring=bring)
    learner.inner_steps(lambda: learner.totals.steps >= steps)
    module = learner.replica.module
    assert isinstance(module, Adapted)
    return module


def joins_of(player: Player) -> list[Shell]:
    """Return the nodes in the order of their starts."""
    return [shell for shell in player.shells if shell.command.text.startswith("farandole join")]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1))
async def test_three_friends_end_with_better_adapters_than_each_alone(lab: Lab, tmp_path: Path, seed: int) -> None:
    """One of them dies in the middle and comes back; in the end peft loads what all have learnt.

    Each has a few kilobytes of its own, of a kind that all three like: so little that alone it is learnt by heart. The
    page's table has the opposite: much text each, with little in common, where each alone learns its own better.
    """
    write_base(tmp_path / "base")
    texts = texts_of_friends(seed)
    page = (ROOT / "docs" / "fine-tune-together.md").read_text()
    begin, signed, invited, use, merge, end = (
        page.index(words)
        for words in ("## The first", "Then:\n", "## Everybody else", "## Use it", "The mean of all", "## Loops of")
    )
    reachable = page[signed:invited].replace(".manifest --", f".manifest --port 4001 --announce {EXAMPLE}/tcp/4001 --")
    joins = page[invited : page.index("Who has another base")]
    usual = {"FARANDOLE_MAX_ROUNDS": str(ROUNDS), "FARANDOLE_STEP_SECONDS": "0.05"}
    place = among_friends(in_homes(lab, KINDS, **usual), tmp_path / "base", texts)
    async with open_player(tmp_path, place) as player:
        await player.play(page[begin:signed] + SETTINGS + reachable, joins, joins.replace("on=friend", "on=other"))
        here, friend, other = joins_of(player)
        await player.play(page[use:merge])
        await here.says(KILLED_IN)
        friend.kill()
        await friend.has_ended.wait()
        await player.play(BACK)
        for node in (here, other, joins_of(player)[-1]):
            await node.says(f"all {ROUNDS} rounds are done")
        await player.play(
            page[merge:end].replace("--merge 2", "--merge 3"), *(METRICS.format(name=name) for name in KINDS)
        )
    works = [player.machines[name].folder for name in KINDS]
    rounds = [[*csv.DictReader((work / "rounds.csv").read_text().splitlines())] for work in works]
    assert all(len({each["partner"] for each in own} - {""}) == 2 for own in rounds), "all homes reach each other"
    steps = max(sum(int(each["inner_steps"]) for each in own) for own in rounds)
    from peft import PeftModel

    base = transformers.AutoModelForCausalLM.from_pretrained(works[0] / "base")
    merged, losses = Adapted(PeftModel.from_pretrained(base, works[0] / "adapters")), []
    for data, (_, text) in zip((works[0] / "mine", works[1] / "theirs", works[2] / "theirs"), texts, strict=True):
        losses.append((loss_on(text, merged), loss_on(text, trained_alone(works[0], data, steps))))
    print(steps, losses)  # for the page
    assert all(together < alone for together, alone in losses), losses

"""Pages are played as a reader would. `make test` plays the pages that take about a minute in all; the README's "Two
machines" is played in homes behind routers: `tests/testnet/natlab/test_two_homes.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .markdown import PAGES, ROOT, apply, blocks, name_of
from .player import open_player, with_the_code

# A reader of a volunteer's page has an invite.
A_RUN = """
<!-- play: on=researcher stays="listening on" -->
```console
$ farandole run create examples/run.toml
$ farandole join examples/run.manifest
```

<!-- play: until -->
```console
$ farandole run invite
farandole1...
```
"""
# A reader of the page on protocols has a node in a run, and another member has one too.
TWO_MEMBERS = (
    A_RUN
    + """
<!-- play: on=second stays="trainer ready" -->
```console
$ farandole join farandole1...
```
"""
)
# A reader of the page on data has some data.
DATA = """
<!-- play: on={name} file=make_data.py -->
```python
from pathlib import Path

import msgspec
import numpy
import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, models

texts = [f"Text number {{number}}, which goes on and on. " * 20 for number in range(60)]
Path("texts").mkdir()
for number, text in enumerate(texts):
    Path("texts", f"{{number}}.txt").write_text(text)
Path("corpus.jsonl").write_bytes(b"\\n".join(msgspec.json.encode({{"content": text, "id": 1}}) for text in texts))
for name, part in (("a", texts[:30]), ("b", texts[30:])):
    pyarrow.parquet.write_table(pyarrow.table({{"text": part}}), f"{{name}}.parquet")
header = numpy.array([20240520, 1, 3] + [0] * 253, "<i4").tobytes()
Path("fineweb_train_000001.bin").write_bytes(header + numpy.array([50256, 464, 2068], "<u2").tobytes())
Tokenizer(models.WordLevel({{"Text": 0}})).save("tokenizer.json")
```

```console
$ python make_data.py
```
"""
# Readers of the page on adapters have a base model, the same one, and text, each another.
FRIENDS = """
<!-- play: on={name} file=make_base.py -->
```python
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from farandole.node.store.consolidated.hf_folder import byte_level_tokenizer

torch.manual_seed(0)
sizes = {{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}}
LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes)).save_pretrained("base")
Path("base", "tokenizer.json").write_text(json.dumps(byte_level_tokenizer()))
for folder, text in ("mine", "def one(x): return x + 1\\n"), ("theirs", "Over the lazy dog. "):
    Path(folder).mkdir()
    for number in range(60):
        Path(folder, f"{{number}}.txt").write_text(f"{{number}} " + 40 * text)
```

```console
$ python make_base.py
```
"""
soak = pytest.mark.soak
# Pages that are generated, install something, need a GPU or homes, or whose commands test_long runs: test_names checks
# them.
ELSEWHERE = {f"docs/{name}.md" for name in ("reference", "errors", "install", "learning", "public-run")} | {
    "BENCHMARKS.md"
}
AS_THEY_ARE = (
    "README.md",
    "docs/researcher.md",
    "docs/testnet.md",
    "docs/your-model.md",
    "docs/your-own-loop.md",
    "examples/nanochat/README.md",
    "examples/own_model/README.md",
)
QUICK, *SLOW = CHANGING_THE_CODE = (
    "docs/adding-a-screening-rule.md",
    "docs/adding-an-outer-rule.md",
    "docs/adding-a-codec.md",
    "docs/adding-a-model.md",
    "CONTRIBUTING.md",
)


# What a reader of a page has done or has, by the page.
BEFORE = {
    "docs/volunteer.md": A_RUN,
    "docs/your-own-protocol.md": TWO_MEMBERS,
    "docs/your-data.md": "\n".join(DATA.format(name=name) for name in ("second", "third", "fourth", "here")),
    "docs/fine-tune-together.md": "\n".join(FRIENDS.format(name=name) for name in ("friend", "here")),
}
SHORT = ("docs/volunteer.md", "docs/your-own-protocol.md")


def test_every_page_with_commands_is_played() -> None:
    with_commands = {name_of(page) for page in PAGES if any(block.commands for block in blocks(page.read_text()))}
    assert with_commands - ELSEWHERE == {*AS_THEY_ARE, *BEFORE, *CHANGING_THE_CODE}


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=soak) for name in (*AS_THEY_ARE, *BEFORE) if name not in SHORT)]
)
async def test_a_page_is_played(name: str, tmp_path: Path) -> None:
    async with open_player(tmp_path) as player:
        await player.play(BEFORE.get(name, ""), (ROOT / name).read_text())


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=soak) for name in SLOW)])
async def test_what_a_page_changes_of_the_code_works(name: str, tmp_path: Path) -> None:
    async with open_player(tmp_path, with_the_code) as player:
        await player.play((ROOT / name).read_text())


@pytest.mark.parametrize("name", CHANGING_THE_CODE)
def test_what_a_page_changes_is_there(name: str, tmp_path: Path) -> None:
    changes = [block.text for block in blocks((ROOT / name).read_text()) if block.language == "diff"]
    for file in {line.split()[1] for change in changes for line in change.splitlines() if line.startswith("--- ")}:
        if file != "/dev/null":
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / file)
    for new in {line.split()[1] for change in changes for line in change.splitlines() if line.startswith("+++ ")}:
        (tmp_path / new).parent.mkdir(parents=True, exist_ok=True)
    for change in changes:
        apply(change, tmp_path)


@soak
async def test_the_demo_says_what_the_readme_shows(tmp_path: Path) -> None:
    recipe = "farandole testnet run demo --out out/demo"
    assert "demo: $(STAMP)" in (makefile := (ROOT / "Makefile").read_text())
    assert f"$(BIN)/{recipe}" in makefile
    page = (ROOT / "README.md").read_text().replace("$ make demo", f"$ {recipe}").replace("3 min 19 s", "...")
    async with open_player(tmp_path) as player:
        await player.play(page[: page.index("$ make test")] + "```\n")

"""Pages are played as a reader would. `make test` plays those that take a minute in all; the README's "Two machines" is
played in homes behind routers: `tests/testnet/natlab/test_two_homes.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import ROOT
from .player import open_player, with_the_code

# Who reads a volunteer's page has an invite.
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

<!-- play: on=here -->
```console
$ farandole --version
```
"""
soak = pytest.mark.soak


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("README.md", marks=soak),
        pytest.param("docs/researcher.md", marks=soak),
        pytest.param("docs/testnet.md", marks=soak),
    ],
)
async def test_a_page_is_played(name: str, tmp_path: Path) -> None:
    async with open_player(tmp_path) as player:
        await player.play((ROOT / name).read_text())


async def test_the_volunteers_guide_is_played_beside_a_run(tmp_path: Path) -> None:
    async with open_player(tmp_path) as player:
        await player.play(A_RUN + (ROOT / "docs" / "volunteer.md").read_text())


@pytest.mark.parametrize(
    "name",
    [
        "docs/adding-a-screening-rule.md",
        pytest.param("docs/adding-a-codec.md", marks=soak),
        pytest.param("docs/adding-a-model.md", marks=soak),
        pytest.param("CONTRIBUTING.md", marks=soak),
    ],
)
async def test_what_a_page_changes_of_the_code_works(name: str, tmp_path: Path) -> None:
    async with open_player(tmp_path, with_the_code) as player:
        await player.play((ROOT / name).read_text())


@soak
async def test_the_demo_says_what_the_readme_shows(tmp_path: Path) -> None:
    recipe = "farandole testnet run demo --out out/demo"
    assert "demo: $(STAMP)" in (makefile := (ROOT / "Makefile").read_text())
    assert f"$(BIN)/{recipe}" in makefile
    page = (ROOT / "README.md").read_text().replace("$ make demo", f"$ {recipe}").replace("1 min 37 s", "...")
    async with open_player(tmp_path) as player:
        await player.play(page[: page.index("$ make test")] + "```\n")

"""Commands of pages that take minutes or hours: each is run by itself, on a machine with a copy of the code.

Testnets are run as the page has them, and must pass. Benchmarks get more options at the end, which make them small
(`SMALL`): the tests check that they measure, and write into the document that they name. Their figures come from the
commands without these options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from farandole.protocol.wire.errors import FarandoleError
from farandole.testnet.natlab.namespace import require
from farandole.testnet.play.scenario import scenario_names
from farandole.testnet.play.wrong_clock import library

from ..testnet.play.test_soak import PLAYED_HERE
from .markdown import PAGES, ROOT, Command, blocks, indented_commands
from .player import Machine, open_player, with_the_code
from .usage import check

PATIENCE: Final = 2 * 3_600.0
"""A hang, not a duration."""
# By the beginning of the command; if several match, the longest is taken.
SMALL: Final = {
    "testnet compare": "--nodes 2 --steps 4 --seeds 1 --interval 2",
    "testnet bench exchange": "--sizes 1 --repeats 1 --no-peers",
    "testnet bench join": "--size 32 --repeats 1 --no-peers --no-link",
    "testnet bench stages": "--stages 2 --steps 1 --preset tiny --repeats 1",
    "testnet bench save": "--turns 2 --round-seconds 1",
    "testnet bench hostile": "--silent 20 --garbage 50 --rate 50",
    "testnet bench faults": "starved",
    "testnet bench nat": "--pairs open/open",
    "testnet bench race": "--scenario tests/testnet/bench/small_race.toml",
    "testnet bench trainer": "--device cpu --model tiny --batch-size 4 --rounds 5 --round-seconds 3",
    "-s -m soak": "--collect-only -q",
}


def long_commands() -> list[Command]:
    """Return each command of the pages, BENCHMARKS.md and the Makefile once."""
    bare = (Command(re.sub(r"^(sudo )?(\.venv/bin/)?", "", each.bare), (), each.line) for each in _printed())
    return [*{command.text: command for command in bare}.values()]


def _printed() -> Iterator[Command]:
    for page in PAGES:
        yield from (each for block in blocks(page.read_text()) if "long" in block.play for each in block.commands)
    yield from indented_commands((ROOT / "BENCHMARKS.md").read_text())
    for line in (ROOT / "Makefile").read_text().splitlines():
        if re.search(r"\$\(BIN\)/farandole testnet (?!run)", line):  # test_pages types the demo's
            yield Command(line.strip().replace("$(BIN)/", ""), (), 0)


def small(command: Command) -> Command:
    """Return the command with the options that make it short, if there are any."""
    arguments = " ".join(command.words[1:])
    begins = max((each for each in SMALL if arguments.startswith(each)), default="", key=len)
    return replace(command, text=f"{command.text} {SMALL[begins]}" if begins else command.text)


# Pattern of a command -> what raises an error if this machine cannot run it.
NEEDS: Final[dict[str, Callable[[], object]]] = {
    r"run (slow-link|large|race|halves|bad-line|homes)|--nat|bench nat|bench race": lambda: require("nft", "miniupnpd"),
    r"run chaos": library,
}


def as_it_comes(name: str, folder: Path) -> Machine:
    """Return a machine whose owner has set nothing."""
    machine = with_the_code(name, folder)
    for variable in [each for each in machine.environment if each.startswith("FARANDOLE_")]:
        del machine.environment[variable]
    return machine


@pytest.mark.soak
@pytest.mark.parametrize("command", long_commands(), ids=lambda command: command.text)
async def test_what_takes_long_ends_well(command: Command, tmp_path: Path) -> None:
    for part, demand in NEEDS.items():
        if re.search(part, command.text):
            try:
                demand()
            except FarandoleError as error:
                pytest.skip(str(error))
    async with open_player(tmp_path, as_it_comes) as player:
        print((await player.type(small(command), patience=PATIENCE)).printed)


@pytest.mark.parametrize("command", long_commands(), ids=lambda command: command.text)
def test_what_takes_long_could_be_typed(command: Command) -> None:
    check(small(command).words)


def test_every_scenario_is_played() -> None:
    texts = "\n".join(command.text for command in long_commands())
    typed = {name for name in scenario_names() if re.search(rf"testnet run (--nat )?{name}\b(?!-)", texts)}
    assert typed.isdisjoint(PLAYED_HERE)
    assert {*typed, *PLAYED_HERE, "stages"} == {*scenario_names()}
    assert "testnet run --nodes 8 --stages 4" in texts  # the scenario stages

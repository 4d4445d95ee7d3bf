"""The README's "Two machines", played in homes behind routers; on one computer if homes cannot be created."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from farandole.testnet.leash import open_leash
from farandole.testnet.namespace import NamespaceError
from farandole.testnet.natlab.lab import Lab, open_lab

from ...documents.pages import ROOT
from ...documents.player import Machine, MakeMachine, a_machine, on_this_computer, open_player


def in_homes(lab: Lab, kinds: dict[str, str]) -> MakeMachine:
    """Place each machine in a home of its kind."""

    def at_home(name: str, folder: Path) -> Machine:
        return a_machine(folder / name, {}, lab.add_home(kinds[name]).host.enter, FARANDOLE_UPNP="true")

    return at_home


@pytest.fixture
def machines() -> Iterator[MakeMachine]:
    with ExitStack() as stack:
        try:
            lab = stack.enter_context(open_lab(stack.enter_context(open_leash())))
        except NamespaceError:
            yield on_this_computer
        else:
            yield in_homes(lab, {"first": "open", "second": "port-restricted", "helper": "open"})


def two_machines() -> str:
    """Return the part of the page about two machines."""
    page = (ROOT / "README.md").read_text()
    return page[page.index("## Two machines") : page.index("## Guides")]


async def test_two_machines_do_as_the_readme_says(machines: MakeMachine, tmp_path: Path) -> None:
    async with open_player(tmp_path, machines) as player:
        await player.play(two_machines())


STATUS = """
<!-- play: on=first until -->
```console
$ farandole status
...
reached ... through 1 relay...
$ farandole run invite
farandole1...
```
"""


async def test_two_homes_behind_routers_that_open_no_port_meet_through_a_relay(lab: Lab, tmp_path: Path) -> None:
    """The first node's first invite leads nowhere: the relay is set up with it, and then the second home is invited."""
    page = two_machines()
    second, options = page.index("On the second machine"), page.index("`--help` after any command")
    relay, others = page.index("Or run a relay"), page.index("All others can be behind routers")
    story = page[:second] + page[relay:others] + STATUS + page[second:options]
    kinds = {"first": "symmetric", "second": "port-restricted", "helper": "open"}
    async with open_player(tmp_path, in_homes(lab, kinds)) as player:
        await player.play(story)


@pytest.mark.soak
async def test_so_do_two_homes_one_of_which_opens_a_port_when_asked(full_lab: Lab, tmp_path: Path) -> None:
    kinds = {"first": "upnp", "second": "symmetric", "helper": "open"}
    async with open_player(tmp_path, in_homes(full_lab, kinds)) as player:
        await player.play(two_machines())

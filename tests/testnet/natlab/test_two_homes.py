"""The README's "Two machines", played in homes behind routers; on one computer where homes cannot be made."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from farandole.testnet.natlab.home import Home
from farandole.testnet.natlab.lab import Lab
from farandole.testnet.natlab.namespace import NamespaceError, held, require
from farandole.testnet.play import wrong_clock

from ...documents.markdown import ROOT
from ...documents.player import Machine, MakeMachine, a_machine, on_this_computer, open_player

NAME_SERVER = Path(__file__).with_name("name_server.py")
EXAMPLE = "/ip4/203.0.113.7"
NOT_PLAYED = 'not-played="needs a router with this port forwarded"'


def in_homes(lab: Lab, kinds: dict[str, str], families: str = "4", **variables: str) -> MakeMachine:
    """Place each machine in a home of its kind; pages' example of a public address becomes that of the home."""

    def at_home(name: str, folder: Path) -> Machine:
        home = lab.add_home(kinds[name], families=families)
        address = f"/ip4/{home.address}" if families == "4" else f"/ip6/{home.host.ip}"
        return a_machine(folder / name, {EXAMPLE: address}, home.host.enter, FARANDOLE_UPNP="true", **variables)

    return at_home


def two_machines() -> str:
    """Return the part of the page about two machines."""
    page = (ROOT / "README.md").read_text()
    return page[page.index("## Two machines") : page.index("If something is wrong")]


async def test_two_machines_do_as_the_readme_says(tmp_path: Path) -> None:
    """The test below plays the same blocks where homes can be made."""
    with suppress(NamespaceError):
        require("nft")
        pytest.skip("played in homes")
    async with open_player(tmp_path, on_this_computer) as player:
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


@pytest.mark.parametrize("families", ["4", pytest.param("6", marks=pytest.mark.soak)])
async def test_two_homes_behind_routers_that_open_no_port_meet_through_a_relay(
    lab: Lab, tmp_path: Path, families: str
) -> None:
    """The first node's first invite leads nowhere: the relay is set up with it, and then the second home is invited.

    All of the page's blocks are played, but the one that opens a port by hand.
    """
    page = two_machines()
    second, options = page.index("On every other machine"), page.index("A run is open by default")
    relay, others = page.index("Or run a relay"), page.index("No node is needed permanently")
    story = page[:second] + page[relay:others] + STATUS + page[second:options]
    kinds = {"first": "symmetric", "second": "port-restricted", "helper": "open"}
    async with open_player(tmp_path, in_homes(lab, kinds, families)) as player:
        await player.play(story)


def opened_by_hand(page: str) -> str:
    """Return the part of the page in which the owner has opened a port and starts the first node again."""
    start, end = page.index("Across the internet"), page.index("Or run a relay")
    part = page[start:end].replace(NOT_PLAYED, 'stays="announcing"')
    assert 'stays="announcing"' in part
    return part


AGAIN = """
<!-- play: on=first -->
```console
$ farandole run invite
farandole1...
```
"""


@pytest.mark.parametrize(
    ("kind", "families"),
    [
        pytest.param("forwarded", "6", marks=pytest.mark.soak),
        pytest.param("forwarded", "4", marks=pytest.mark.soak),
        pytest.param("one-to-one", "4", marks=pytest.mark.soak),
        # With a forwarded port and a machine whose address is mapped one to one.
        pytest.param("docker", "4", marks=pytest.mark.soak),
    ],
)
async def test_a_port_that_its_owner_opens_lets_the_second_home_in(
    lab: Lab, tmp_path: Path, kind: str, families: str
) -> None:
    """The first node knows no peer that could tell it its public address: only its owner knows it.

    The test of the hotel below opens a port too, in `make test`.
    """
    page = two_machines()
    second, options = page.index("On every other machine"), page.index("A run is open by default")
    again = opened_by_hand(page)
    async with open_player(tmp_path, in_homes(lab, {"first": kind, "second": "port-restricted"}, families)) as player:
        await player.play(page[:second] + again + AGAIN + page[second:options])


def has_own_names(home: Home, folder: Path, address: str) -> tuple[list[str], list[str]]:
    """Return the commands of a name server in the home, and of entering the home with that server.

    The file "address" in the folder is where all names lead.
    """
    (folder / "address").write_text(address)
    (folder / "resolv.conf").write_text("nameserver 192.168.1.1\n")
    serve = [*home.routers[-1].namespace.enter, sys.executable, str(NAME_SERVER), str(folder / "address")]
    mount = f'mount --bind {folder / "resolv.conf"} /etc/resolv.conf && exec "$@"'
    return serve, [*home.host.enter, "unshare", "--mount", "sh", "-c", mount, "sh"]


@pytest.mark.soak
async def test_so_do_two_homes_one_of_which_opens_a_port_when_asked(full_lab: Lab, tmp_path: Path) -> None:
    kinds = {"first": "upnp", "second": "symmetric", "helper": "open"}
    async with open_player(tmp_path, in_homes(full_lab, kinds)) as player:
        await player.play(two_machines())


IN_A_HOTEL = """
<!-- play: on=second stays="no known address answers" -->
```console
$ farandole join farandole1...
```

<!-- play: on=second exit=1 -->
```console
$ farandole doctor farandole1...
...is 192.168.1.1 here, which is no public address: ...
  ...open any web page in a browser and log in...
```
"""


async def test_a_hotel_whose_names_lead_to_its_login_page_is_named_and_left_as_soon_as_they_do_not(
    lab: Lab, tmp_path: Path
) -> None:
    """The invite has nothing but a name: the first node's owner announces one, and no peer has told it its address."""
    page = two_machines()
    first, second = lab.add_home("forwarded"), lab.add_home("port-restricted")
    serve, enter = has_own_names(second, tmp_path, "192.168.1.1")
    name = {EXAMPLE: "/dns/home.example.org"}

    def at_home(machine: str, folder: Path) -> Machine:
        place = first.host.enter if machine == "first" else enter
        return a_machine(folder / machine, name, place)

    with held(serve, lab.leash, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        async with open_player(tmp_path, at_home) as player:
            again = opened_by_hand(page)
            await player.play(page[: page.index("On every other machine")] + again + AGAIN + IN_A_HOTEL)
            (tmp_path / "address").write_text(first.address)
            await player.shells[-2].says("averaged with")


ON_THAT_DAY = """
<!-- play: until -->
```console
$ farandole run metrics --last 1 | grep "$(date +%m-%d)"
```
"""


@pytest.mark.soak
@pytest.mark.usefixtures("faketime")
async def test_the_runbook_of_a_public_run_is_played_over_two_weeks(lab: Lab, tmp_path: Path) -> None:
    """All clocks jump by days while the nodes run; what an owner does each day is done on three of them."""
    page = (ROOT / "docs" / "public-run.md").read_text()
    begin, daily, end = re.split(r"^(?=## (?:Each day|When it))", page, flags=re.MULTILINE)
    kinds = {"here": "symmetric", "relay": "open", "volunteer": "port-restricted"}
    usual = {"FARANDOLE_CHECKPOINT_SECONDS": "15", **wrong_clock.environment(tmp_path)}
    async with open_player(tmp_path, in_homes(lab, kinds, **usual)) as player:
        await player.play(begin)
        for day, part in ((1, daily), (5, ""), (7, daily), (13, daily), (14, end)):
            wrong_clock.set_clock(tmp_path, day * 86_400.0)
            await player.play(ON_THAT_DAY, part)
    home, relay = (player.machines[name].folder for name in ("here", "relay"))
    assert [len([*day.iterdir()]) for day in home.glob("record/2*")] == [5, 5, 5]
    curve = msgspec.json.decode((relay / "page" / "run.json").read_bytes())["overview"]["mean_loss"]
    assert curve[-1][0] - curve[0][0] > 13 * 86_400

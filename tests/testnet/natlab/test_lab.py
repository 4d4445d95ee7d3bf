"""The lab is checked with plain sockets: between two kinds of homes exactly what theory predicts gets through."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from farandole.testnet.natlab.kinds import KINDS, kind_named
from farandole.testnet.natlab.lab import Lab

from .probe import expected, open_probes, try_pair

# One direction opens; both at once open; none does; two NATs in a row, one with a port that cannot be predicted.
CHARACTERISTIC = (
    ("full-cone", "symmetric"),
    ("port-restricted", "port-restricted"),
    ("port-restricted", "symmetric"),
    ("carrier", "renumbering"),
)


async def check_pairs(lab: Lab, pairs: list[tuple[str, str]]) -> None:
    third = lab.add_home("open")
    sides = [{name: lab.add_home(name) for name in sorted({pair[side] for pair in pairs})} for side in (0, 1)]
    places = {(side, name): home.host for side in (0, 1) for name, home in sides[side].items()}
    async with open_probes({"third": third.host, **places}) as probes:
        probes["third"].serve()
        for near, far in pairs:
            theory = expected(kind_named(near), kind_named(far))
            assert await try_pair(probes[0, near], probes[1, far], third.address, theory) == theory, f"{near}, {far}"


async def test_characteristic_pairs_reach_each_other_as_theory_says(lab: Lab) -> None:
    await check_pairs(lab, list(CHARACTERISTIC))


@pytest.mark.soak
async def test_all_pairs_reach_each_other_as_theory_says(full_lab: Lab) -> None:
    await check_pairs(full_lab, list(combinations_with_replacement((*KINDS, "renumbering"), 2)))

"""Which homes reach each other: in theory, and with plain sockets in the lab, exactly as theory predicts."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from farandole.testnet.natlab.kinds import KINDS, can_connect, can_punch_tcp, kind_named
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


# Kind -> kinds with which hole punching works; the four cones and symmetric as in RFC 5128 and every textbook.
_CONES = ["open", "firewall", "full-cone", "address-restricted", "port-restricted", "carrier", "udp-blocked", "upnp"]
PUNCHABLE = {
    "open": [*_CONES, "symmetric"],
    "firewall": _CONES,
    "full-cone": [*_CONES, "symmetric"],
    "address-restricted": [*_CONES, "symmetric"],
    "port-restricted": _CONES,
    "symmetric": ["open", "full-cone", "address-restricted"],
    "carrier": _CONES,
    "udp-blocked": _CONES,
    "https-only": [],
    "upnp": _CONES,
}


@pytest.mark.parametrize("name", KINDS)
def test_who_punches_through_to_whom(name: str) -> None:
    near = kind_named(name)
    assert {far for far in KINDS if can_punch_tcp(near, kind_named(far))} == set(PUNCHABLE[name])


def test_who_can_simply_be_called() -> None:
    caller = kind_named("symmetric")
    assert [far for far in KINDS if can_connect(caller, kind_named(far))] == ["open", "full-cone"]
    caller = kind_named("https-only")
    assert [far for far in KINDS if can_connect(caller, kind_named(far))] == []
    assert [far for far in KINDS if can_connect(caller, kind_named(far), port=443)] == ["open", "full-cone"]

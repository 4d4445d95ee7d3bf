from __future__ import annotations

import pytest

from farandole.testnet.natlab.kinds import KINDS, can_connect, can_punch_tcp, kind_named

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

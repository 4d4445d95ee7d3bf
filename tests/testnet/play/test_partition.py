from __future__ import annotations

import subprocess
import sys

import pytest

from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.home import Home
from farandole.testnet.natlab.lab import open_lab
from farandole.testnet.play.partition import heal, part

LISTEN = "import socket; s = socket.create_server(('0.0.0.0', 7000)); print(flush=True)\nwhile True: s.accept()"
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))"


def reaches(one: Home, other: Home, seconds: float = 60.0) -> bool:
    command = [*one.host.enter, sys.executable, "-c", CALL, other.address, str(seconds)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.usefixtures("networks")
def test_two_parts_hear_nothing_of_each_other_until_they_are_healed() -> None:
    with open_leash() as leash, open_lab(leash) as lab:
        alice, bob, carol = homes = [lab.add_home("open") for _ in range(3)]
        listeners = [
            subprocess.Popen([*home.host.enter, sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) for home in homes
        ]
        try:
            for listener in listeners:
                assert listener.stdout is not None
                listener.stdout.readline()
            assert reaches(alice, bob)
            part([alice, carol])
            assert reaches(alice, carol)
            assert not reaches(alice, bob, 0.5)
            assert not reaches(bob, carol, 0.5)
            heal([alice, carol])
            assert reaches(bob, carol)
        finally:
            for listener in listeners:
                with listener:
                    listener.kill()

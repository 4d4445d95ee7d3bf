"""A visitor says whom it dials, and does not wait long for who is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from farandole.node.errors import JoinError
from farandole.node.joining import visiting
from farandole.node.joining.visiting import open_visit
from farandole.node.nurseries import own_error
from farandole.node.settings import NodeSettings
from farandole.node.shaping import Shaping
from farandole.protocol.identity import peer_id_of
from farandole.protocol.invite import Invite

from ..hosts import LOOPBACK
from ..relayed import open_public

RUN = b"r" * 32
# Nothing listens on these ports, and nobody has these keys.
GONE = tuple(f"/ip4/127.0.0.1/tcp/{number}/p2p/{peer_id_of(bytes([number]) * 32)}" for number in (1, 2))


async def words_of_failure(home: Path, addresses: tuple[str, ...], said: list[str]) -> str:
    """Of a visit to who cannot be visited."""
    settings = NodeSettings(home=home, listen=LOOPBACK, mdns=False)
    words = ""
    with trio.fail_after(60):
        try:
            async with open_visit(Invite(RUN, addresses), settings, Shaping(), said.append):
                pass
        except* JoinError as group:
            words = str(own_error(group))
    return words


async def test_it_ends_when_all_whom_the_invite_names_have_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visiting, "DIAL_PAUSE", 0.05)
    said: list[str] = []
    words = await words_of_failure(tmp_path, GONE, said)
    assert said == ["dialling whom the invite names: /ip4/127.0.0.1/tcp/1, /ip4/127.0.0.1/tcp/2"]
    assert all(peer_id_of(bytes([number]) * 32) in words for number in (1, 2))
    assert "farandole run invite" in words


async def test_it_ends_when_those_who_answer_are_in_no_such_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visiting, "MANIFEST_TIMEOUT", 0.5)
    async with open_public() as stranger:
        words = await words_of_failure(tmp_path, (GONE[0], *stranger.addresses), [])
    assert f"none is in run {RUN.hex()[:16]}" in words

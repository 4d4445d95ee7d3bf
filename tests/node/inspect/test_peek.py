"""A visitor reports the peers that it dials, and does not wait long for absent ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from farandole.node.base.errors import JoinError
from farandole.node.base.nurseries import own_error
from farandole.node.base.settings import NodeSettings
from farandole.node.inspect import peek as visiting
from farandole.node.inspect.peek import Visit, open_visit
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.state.entries import Beat, Kind, Member
from farandole.protocol.wire.identity import peer_id_of

from ...patience import PATIENCE
from ...protocol.authors import author_of, signed, state_of, tick_at
from ..hosts import LOOPBACK, host_at_loopback

RUN = b"r" * 32
# Nothing listens on these ports, and no peer has these keys.
GONE = tuple(f"/ip4/127.0.0.1/tcp/{number}/p2p/{peer_id_of(bytes([number]) * 32)}" for number in (1, 2))


async def words_of_failure(home: Path, addresses: tuple[str, ...], said: list[str]) -> str:
    """Return the error of a visit to a run whose peers cannot be reached."""
    invite = encode_invite(Invite(RUN, addresses))
    settings = NodeSettings(home=home, invite=invite, listen=LOOPBACK, mdns=False)
    words = ""
    with trio.fail_after(PATIENCE):
        try:
            async with open_visit(settings, said.append):
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
    async with host_at_loopback() as stranger:
        words = await words_of_failure(tmp_path, (GONE[0], *stranger.addresses), [])
    assert f"none is in run {RUN.hex()[:16]}" in words


async def test_the_rounds_of_a_stage_are_those_of_its_live_members_that_train() -> None:
    members = {1: Member(), 2: Member(), 3: Member(is_paused=True), 4: Member(stage=1), 5: Member()}
    entries = [signed(number, Kind.MEMBER, 0, tick_at(Kind.MEMBER), member) for number, member in members.items()]
    beats = [signed(n, Kind.BEAT, 0, tick_at(Kind.BEAT), Beat(1, 10 * n, None, 0)) for n in (1, 3, 4, 5)]
    live = [author_of(number) for number in (1, 2, 3, 4)]
    gossip: Any = SimpleNamespace(liveness=SimpleNamespace(live=lambda now: live), state=state_of(*entries, *beats))
    nothing: Any = None
    visit = Visit(nothing, nothing, b"", gossip)
    assert visit.rounds_of(0) == [10]
    assert visit.rounds_of(1) == [40]

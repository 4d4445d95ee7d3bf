"""Visitors: whom they dial, how long they wait, and which of the members' checkpoints a pull takes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import JoinError, PeerUnreachableError
from farandole.node.base.nurseries import own_error
from farandole.node.base.settings import NodeSettings
from farandole.node.inspect import peek as visiting
from farandole.node.inspect import pull as pulling
from farandole.node.inspect.peek import Visit, open_visit
from farandole.node.inspect.pull import Pull
from farandole.node.transfers.block_file import partial_path
from farandole.node.transfers.receiver import Conditions, Fetched
from farandole.protocol.checkpoints.blocks import Index, SignedIndex, sign_index
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import DataConfig, EpochsConfig, Manifest
from farandole.protocol.state.entries import Beat, CheckpointNotice, Kind, Member
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from ...patience import PATIENCE
from ...protocol.authors import author_of, signed, state_of, tick_at
from ..hosts import LOOPBACK, host_at_loopback
from ..store.consolidated.runs import KEY, MODELS, decoded, manifest_for
from ..transfers.files import KEY as AUTHOR
from ..transfers.files import NOBODY, checkpoint_bytes, index_of

ANN, BOB = b"a" * 32, b"b" * 32
SIGNED = manifest_for(MODELS["own"])


def offered(round_index: int) -> tuple[SignedIndex, Index]:
    index = index_of(checkpoint_bytes(8, seed=round_index), round_index)
    return sign_index(AUTHOR, index), index


def answer(monkeypatch: pytest.MonkeyPatch, give: Callable[[bytes, bytes | None], tuple[SignedIndex, Index]]) -> None:
    """Have donors give the index that they are asked for: the newest, or that of a checkpoint."""

    async def ask(
        conditions: object, donor: bytes, stage: int, max_size: int, checkpoint_id: bytes | None
    ) -> tuple[SignedIndex, Index]:
        await trio.lowlevel.checkpoint()
        return give(donor, checkpoint_id)

    monkeypatch.setattr(pulling, "ask_for_index", ask)


def pull_to(
    folder: Path,
    manifest: Manifest,
    notices: Collection[tuple[bytes, CheckpointNotice]] = (),
    members: Collection[bytes] = (ANN,),
    rounds: Collection[int] = (),
) -> Pull:
    """Return a pull from a run with these members, which train in these rounds, and others that hold copies."""
    visit: Any = SimpleNamespace(
        manifest=manifest,
        conditions=Conditions(NOBODY, SIGNED.run_id),
        gossip=SimpleNamespace(state=None),
        live=lambda: members,
        rounds_of=lambda stage: rounds,
        members_of=lambda stage: members,
        notices=lambda: notices,
    )
    return Pull(visit, folder, KEY, lambda text: None, lambda name, progress: None)


async def test_what_was_begun_is_ended_while_somebody_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Ann trains on, and saves again for any peer that asks; Bob has a copy of an earlier checkpoint of hers."""
    rounds = iter(range(20, 100, 20))
    fetched: list[int] = []

    async def fetch(*call: Any) -> Fetched:
        _, signed, index, _, _, path, _ = call
        await trio.lowlevel.checkpoint()
        fetched.append(index.round)
        if len(fetched) < 3:
            partial_path(path, signed.id).touch()
            raise PeerUnreachableError("the line broke")
        return Fetched({BOB: 1}, 1)

    answer(monkeypatch, lambda donor, checkpoint_id: offered(next(rounds) if checkpoint_id is None else 20))
    monkeypatch.setattr(pulling, "fetch_checkpoint", fetch)
    signed, index = offered(20)
    pull = pull_to(tmp_path / "model", decoded(SIGNED), [(BOB, CheckpointNotice(20, 0, signed.id, index.size, 1, 1))])
    pull.parts.mkdir()
    await pull.fetch_stage(0)
    assert fetched == [20, 20, 20]


@pytest.mark.parametrize(
    ("rounds", "trained", "taken"),
    [
        ([100], [100], 100),
        ([100, 10**6], [100, 10**6], 100),
        ([100, 102, 10**6], [100, 102, 10**6], 102),
        ([100, 102, 110], [100, 102, 110], 110),  # a member slightly ahead counts
        ([10, 10, 102], [102], 102),  # resting members do not count for the run's round
        ([10, 20], [], 20),  # unless all rest
        ([500, 100], [500, 500], 500),  # one can no longer save
    ],
)
async def test_who_says_the_highest_number_is_not_taken_for_the_run(
    rounds: list[int], trained: list[int], taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(1, 1 + len(rounds))]
    members = [public_bytes(key) for key in keys]
    indices = [index_of(checkpoint_bytes(8), number, key) for number, key in zip(rounds, keys, strict=True)]
    signed = [sign_index(key, index) for key, index in zip(keys, indices, strict=True)]
    given = dict(zip(members, zip(signed, indices, strict=True), strict=True))
    answer(monkeypatch, lambda donor, checkpoint_id: given[donor])
    pull = pull_to(tmp_path / "model", decoded(SIGNED), members=members, rounds=trained)
    found, _ = await pull.find(0)
    assert [each.index.round for each in found] == [taken]


def test_what_members_say_of_epochs_can_be_read_again_whatever_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "epoch_progress", lambda state, live: (b"one text", 2**31 - 1, 0))
    manifest = msgspec.structs.replace(decoded(SIGNED), data=DataConfig(epochs=3))
    epochs = pull_to(tmp_path / "model", manifest)._epochs()
    assert epochs is not None
    assert epochs.epoch == 3
    assert msgspec.json.decode(msgspec.json.encode(epochs), type=EpochsConfig) == epochs


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

"""Commands that look into a run for its members: they are let in from a member's data directory, not a stranger's."""

from __future__ import annotations

from pathlib import Path

from farandole.node.base.exits import Exit
from farandole.node.base.identity import load_or_create_key
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from .daemons import Daemon, farandole, joined
from .small_runs import small_manifest, write_run


async def does_pull(home: Path, *invite: str) -> bool:
    to = home.parent / f"model-{len(list(home.parent.iterdir()))}"
    answer = await farandole(home, "checkpoint", "pull", *invite, "--to", str(to))
    assert answer.code == Exit.OK, answer.err
    return (to / "checkpoint.safetensors").exists()


async def refusal(home: Path, *words: str) -> str:
    answer = await farandole(home, *words)
    assert answer.code == Exit.BAD_INPUT, answer.out
    return answer.err


async def members_of(daemon: Daemon) -> set[str]:
    return {row["peer_id"] for row in await daemon.ask("roster")}


async def test_an_invited_member_pulls_and_audits_by_its_data_directory_and_a_stranger_reads_what_to_do(
    tmp_path: Path, texts: Path
) -> None:
    data = ("--data", str(texts))
    run = write_run(tmp_path, small_manifest(admission="invited"), creator=tmp_path / "alice")
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = await alice.own_invite()
        async with joined(tmp_path / "carol", invite, *data) as carol:
            await carol.says("averaged with", alice.name)
            assert await does_pull(carol.home), "by its node, which may not invite others"
            assert await does_pull(carol.home, invite), "by the invite that it has used, beside its node"
            members = await members_of(alice)
        home = tmp_path / "carol"
        assert await does_pull(home, invite), "without its node"
        assert (await farandole(home, "checkpoint", "list", invite)).code == Exit.OK
        assert "this run has no audits" in await refusal(home, "run", "audit", invite, *data)

        stranger, anybodys = tmp_path / "eve", encode_invite(Invite(run.run_id, alice.addresses))
        for words in (("checkpoint", "list"), ("checkpoint", "pull"), ("run", "audit")):
            said = await refusal(stranger, *words, anybodys)
            assert "run the command with --home of a member's node, or ask for an invite of your own" in said
        assert "has been used" in await refusal(stranger, "checkpoint", "list", invite)
        assert await members_of(alice) == members, "visitors are no members"
        assert len(members) == 2


async def test_a_listed_member_pulls_by_its_data_directory_and_a_stranger_reads_what_to_do(
    tmp_path: Path, texts: Path
) -> None:
    data = ("--data", str(texts))
    (tmp_path / "bob").mkdir(mode=0o700)
    bobs = peer_id_of(public_bytes(load_or_create_key(tmp_path / "bob" / "key")))
    run = write_run(tmp_path, small_manifest(admission=[bobs]), creator=tmp_path / "alice")
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = encode_invite(Invite(run.run_id, alice.addresses))
        assert await does_pull(tmp_path / "bob", invite)
        said = await refusal(tmp_path / "eve", "checkpoint", "pull", invite)
        assert "for the members that its manifest lists" in said
        assert "run the command with --home of a member's node" in said

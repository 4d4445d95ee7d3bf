"""The doctor meets the real cause of each problem, and names it. Routers are tested in tests/testnet/natlab."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from farandole.node.app.commands.status import diagnosis_screen
from farandole.node.app.doctor.examination import Examination, conclude
from farandole.node.app.doctor.peers import Knock, find_skew, judge_doors, judge_nat, make_doors
from farandole.node.base.causes import CAUSES, CHECKS, Diagnosis, Finding, Level, found
from farandole.node.base.control import serve_control
from farandole.node.base.errors import Exit, StrangerError
from farandole.node.base.identity import load_or_create_key, locked
from farandole.node.base.settings import NodeSettings
from farandole.node.inspect.machine import (
    check_data,
    check_disk,
    check_home,
    check_key,
    check_memory,
    check_needs,
    check_ports,
    judge_torch,
)
from farandole.node.join.address_book import AddressBook, keep_ports
from farandole.node.join.bootstrap import serve_manifest
from farandole.node.mesh.host import Host, open_host
from farandole.node.state.store import MANIFEST_FACT, open_store
from farandole.node.status.journal import Journal
from farandole.protocol.mesh.reachability import ReachabilityKind, Verdict
from farandole.protocol.planning.needs import needs_of
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import DataConfig, Manifest, SignedManifest, TokenizerConfig, sign_manifest
from farandole.protocol.run.models import preset
from farandole.protocol.run.own_model import OwnModel
from farandole.protocol.wire.identity import peer_id_of
from farandole.testnet.play.launch import free_ports

from ....patience import PATIENCE
from ...conftest import Cli
from ...hosts import open_home, open_node, open_relay, reserve
from ...small_runs import MODEL, SIGNED, NewerManifest
from ...statuses import STATUS

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
HOUR = 3_600.0
GB = 1_000_000_000


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the search for a router: there is none, or the tests must not query it for long."""
    monkeypatch.setattr("farandole.node.mesh.reach.upnp.SEARCH_INTERVAL", 0.02)


@pytest.fixture
def torch_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the process that imports PyTorch: it takes seconds."""

    async def check(device: str) -> Finding:
        return found("torch-fine", version="2", device=device)

    monkeypatch.setattr("farandole.node.inspect.machine.check_torch", check)


@contextlib.asynccontextmanager
async def open_peer(signed: SignedManifest = SIGNED) -> AsyncIterator[Host]:
    """Open a member of a run, as a newcomer sees it before it joins."""
    async with open_node(run_id=signed.run_id) as (host, _):
        serve_manifest(host, signed.run_id, signed.encode())
        yield host


def invite_to(*addresses: str, run_id: bytes = SIGNED.run_id) -> str:
    return encode_invite(Invite(run_id, addresses))


async def look(home: Path, invite: str | None, clock: Callable[[], float] = time.time, **settings: Any) -> Diagnosis:
    """Return the doctor's diagnosis."""
    examination = Examination(NodeSettings(home=home, invite=invite, listen=[LOOPBACK], **settings), clock)
    with trio.fail_after(PATIENCE):
        return await examination.run()


def of(diagnosis: Diagnosis, check: str) -> Finding:
    (finding,) = [finding for finding in diagnosis.findings if finding.check == check]
    return finding


def causes(diagnosis: Diagnosis, level: Level = Level.FAILED) -> list[str]:
    return [finding.cause for finding in diagnosis.findings if finding.level is level]


# The network

pytestmark = pytest.mark.usefixtures("torch_is_fine")


async def test_with_peers_that_answer_nothing_is_wrong(tmp_path: Path) -> None:
    async with open_peer() as peer, open_peer() as other:
        diagnosis = await look(tmp_path, invite_to(*peer.addresses, *other.addresses))
    assert diagnosis.is_well
    assert {"bootstrap-fine", "run-fine", "clock-fine", "nat-public"} <= set(causes(diagnosis, Level.OK))
    assert {finding.check for finding in diagnosis.findings} == set(CHECKS)


async def test_a_bootstrap_peer_that_is_down_and_one_that_is_not(tmp_path: Path) -> None:
    async with open_peer() as gone:
        addresses = gone.addresses
    diagnosis = await look(tmp_path, invite_to(*addresses))
    assert causes(diagnosis) == ["bootstrap-refused"]
    assert "newer invite" in of(diagnosis, "bootstrap").remedy
    assert "public address changed: `farandole dial ADDRESS`" in of(diagnosis, "bootstrap").remedy
    assert of(diagnosis, "clock").level is Level.SKIPPED
    async with open_peer() as peer:
        diagnosis = await look(tmp_path, invite_to(*addresses, *peer.addresses))
    assert diagnosis.is_well
    assert "bootstrap-refused" in causes(diagnosis, Level.WARNING)


@pytest.mark.parametrize(("knock", "error"), [("refused", None), ("open", StrangerError("another")), ("silent", None)])
def test_a_machine_of_this_home_is_not_taken_for_the_inviters(knock: Knock, error: Exception | None) -> None:
    """Two homes have a machine at 192.168.1.10, and this one's says nothing about the other's."""
    (door,) = doors = make_doors([(bytes(32), f"/ip4/192.168.1.10/tcp/4001/p2p/{peer_id_of(bytes(32))}")])
    door.ips, door.knock, door.error = [door.host], knock, error
    told = " ".join(finding.words for finding in judge_doors(doors))
    for wrong in ("the machine is on", "start the node again", "another node than the invite says", "firewall"):
        assert wrong not in told
    assert "is of its peer's private network" in told
    assert "`farandole run invite`) of a node with a public address or a relay" in told


async def test_something_else_at_the_address_of_the_invite(tmp_path: Path) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        async with open_peer() as peer:
            diagnosis = await look(tmp_path, invite_to(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer.peer_id}"))
        nursery.cancel_scope.cancel()
    assert causes(diagnosis) == ["bootstrap-no-handshake"]


async def test_a_peer_behind_a_relay_and_one_that_has_left_it(tmp_path: Path) -> None:
    async with open_relay() as relay:
        async with open_home() as home:
            address = await reserve(home, relay.host)
            diagnosis = await look(tmp_path, invite_to(address))
            assert "bootstrap-fine" in causes(diagnosis, Level.OK)
        diagnosis = await look(tmp_path, invite_to(address))
    assert "bootstrap-behind-relay" in causes(diagnosis)


async def test_a_name_that_does_not_resolve_or_leads_into_this_network(tmp_path: Path) -> None:
    async with open_peer() as peer:
        port = peer.addresses[0].split("/")[4]
        names = [f"/dns4/{name}/tcp/{port}/p2p/{peer.peer_id}" for name in ("farandole.invalid", "localhost")]
        assert causes(await look(tmp_path, invite_to(names[0]))) == ["bootstrap-unresolved"]
        assert "bootstrap-fine" in causes(await look(tmp_path, invite_to(names[1])), Level.OK)
    assert causes(await look(tmp_path, invite_to(names[1]))) == ["bootstrap-login-page"]


async def test_a_run_of_invited_members_tells_a_visit_nothing(tmp_path: Path) -> None:
    invited = sign_manifest(
        Manifest("tiny", MODEL, data=DataConfig(source="text"), admission="invited"), Ed25519PrivateKey.generate()
    )
    async with open_host(Ed25519PrivateKey.generate(), [LOOPBACK]) as member:
        invite = encode_invite(Invite(invited.run_id, tuple(member.addresses), admission=b"a seat"))
        diagnosis = await look(tmp_path, invite)
        assert causes(diagnosis) == []
        assert of(diagnosis, "run").cause == "run-untold"
        async with open_store(tmp_path / "store.sqlite") as store:
            await store.put_fact(MANIFEST_FACT, invited.encode())
        assert causes(await look(tmp_path, invite)) == ["run-needs-text"]


async def test_an_invite_that_leads_to_another_node_or_to_a_run_that_is_not_this_ones(tmp_path: Path) -> None:
    newer = sign_manifest(NewerManifest("tiny", MODEL), Ed25519PrivateKey.generate())
    async with open_peer() as peer, open_peer(newer) as other:
        stranger = peer.addresses[0].replace(peer.peer_id, other.peer_id)
        assert "bootstrap-stranger" in causes(await look(tmp_path, invite_to(stranger)))
        unknown = invite_to(*peer.addresses, run_id=bytes(32))
        assert causes(await look(tmp_path, unknown)) == ["run-unknown"]
        diagnosis = await look(tmp_path, invite_to(*other.addresses, run_id=newer.run_id))
        assert causes(diagnosis) == ["run-newer"]
        assert "colour" in of(diagnosis, "run").found
        async with open_store(tmp_path / "store.sqlite") as store:
            await store.put_fact(MANIFEST_FACT, SIGNED.encode())
        assert "invite-other-run" in causes(await look(tmp_path, unknown))


async def test_an_invite_that_cannot_be_read(tmp_path: Path) -> None:
    invite = invite_to()
    for text, cause in (
        (invite[:-5] + ("a" if invite[-5] != "a" else "b") + invite[-4:], "invite-damaged"),
        (invite.replace("farandole1", "farandole2"), "invite-other-version"),
        (invite[1:] + "a" * 300, "invite-damaged"),  # longer than a file's name may be
    ):
        diagnosis = await look(tmp_path, text)
        assert causes(diagnosis) == [cause]
        assert of(diagnosis, "invite").remedy


async def test_a_manifest_in_place_of_an_invite(tmp_path: Path) -> None:
    """As ``farandole join`` takes it, for a run's first node."""
    path = tmp_path / "run.manifest"
    path.write_bytes(SIGNED.encode())
    assert of(await look(tmp_path, str(path)), "invite").cause == "invite-manifest"
    path.write_bytes(b"name = 'demo'")
    damaged = of(await look(tmp_path, str(path)), "invite")
    assert (damaged.cause, str(path) in damaged.found) == ("invite-manifest-damaged", True)


async def test_without_an_invite_the_folder_knows_its_run_and_peers_until_these_move(tmp_path: Path) -> None:
    async with open_peer() as peer:
        async with open_store(tmp_path / "store.sqlite") as store:
            await store.put_fact(MANIFEST_FACT, SIGNED.encode())
            book = AddressBook(store)
            book.note_reached(peer.author, peer.addresses)
            await book.save()
        diagnosis = await look(tmp_path, None)
    assert diagnosis.is_well
    assert {"invite-stored", "bootstrap-fine", "run-fine"} <= set(causes(diagnosis, Level.OK))
    moved = of(await look(tmp_path, None), "bootstrap")
    assert (moved.cause, moved.level) == ("bootstrap-moved", Level.WARNING)
    assert "public address changed: `farandole dial ADDRESS`" in moved.remedy


async def test_a_clock_that_is_an_hour_off(tmp_path: Path) -> None:
    async with open_peer() as peer, open_peer() as other, open_peer() as third:
        invite = invite_to(*peer.addresses, *other.addresses, *third.addresses)
        diagnosis = await look(tmp_path, invite, lambda: time.time() - HOUR)
    assert causes(diagnosis) == ["clock-off"]
    clock = of(diagnosis, "clock")
    assert clock.found.startswith("this machine's clock is 1 h 00 min behind, as the clocks of 3 peers show")
    assert "timedatectl set-ntp true" in clock.remedy


def test_peers_that_contradict_each_other_about_the_time() -> None:
    for votes in ([1.0], [20.0, 21.0], [HOUR, 1.0], [HOUR, HOUR, 1.0]):
        assert find_skew(votes).cause == "clock-fine", votes
    for votes in ([HOUR], [HOUR, -HOUR, 2 * HOUR]):
        assert find_skew(votes).cause == "clock-disputed", votes
    assert find_skew([HOUR, HOUR, HOUR, 1.0]).cause == "clock-off"


def test_memory_that_the_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, run = NodeSettings(home=tmp_path, device="cpu"), Manifest("a", preset("125M"))
    machine = "farandole.node.inspect.machine"

    def check(total: int | None, available: int | None, run: Manifest | None = run, **how: bool) -> Finding:
        monkeypatch.setattr(f"{machine}.total_bytes", lambda: total)
        monkeypatch.setattr(f"{machine}.available_bytes", lambda: available)
        return check_memory(run, settings, is_running=how.get("is_running", False))

    assert check(32 * GB, 24 * GB).cause == check(None, None).cause == "memory-fine"
    short, too_little = check(32 * GB, 2 * GB), check(4 * GB, 2 * GB)
    assert (short.cause, too_little.cause) == ("memory-short", "memory-too-little")
    assert "2.00 GB is free" in short.found
    assert "needs 8.80 GB of memory here" in too_little.found
    assert "has 4.00 GB; take a machine with more or a GPU" in too_little.words
    assert check(4 * GB, 2 * GB, is_running=True).cause == "memory-in-use"
    assert check(4 * GB, 2 * GB, None).cause == "memory-untold"


# This machine


def test_keys_that_are_missing_broken_no_file_or_for_others_to_read(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert check_key(key).cause == "key-missing"
    assert not key.exists()
    key.write_bytes(b"short")
    assert check_key(key).cause == "key-broken"
    key.unlink()
    load_or_create_key(key)
    assert check_key(key).cause == "key-fine"
    key.chmod(0o644)
    finding = check_key(key)
    assert (finding.cause, finding.level) == ("key-readable-by-others", Level.FAILED)
    assert finding.remedy == f"chmod 600 {key}"
    key.unlink()
    key.mkdir()
    assert check_key(key).cause == "key-unreadable"


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system's figures, or where these omit a quota."""
    assert check_disk(tmp_path).cause == "disk-fine"
    assert list(tmp_path.iterdir()) == []

    def refuse(folder: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    for free, cause in ((2_000_000, "disk-nearly-full"), (1_000, "disk-full")):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert (check_disk(tmp_path).cause, check_disk(tmp_path).level) == (cause, Level.FAILED)
    monkeypatch.undo()
    monkeypatch.setattr("farandole.node.inspect.machine._write_to", refuse)
    assert check_disk(tmp_path).cause == "disk-full"


async def test_a_run_that_peers_name_says_which_disk_it_needs(tmp_path: Path) -> None:
    assert check_disk(tmp_path, needs_of(Manifest("a", MODEL))).cause == "disk-fine"
    large = msgspec.structs.replace(MODEL, width=65_536, hidden=262_144, num_heads=8, num_layers=500)  # terabytes
    signed = sign_manifest(Manifest("large", large), Ed25519PrivateKey.generate())
    async with open_peer(signed) as peer:
        diagnosis = await look(tmp_path, invite_to(*peer.addresses, run_id=signed.run_id))
    assert "disk-nearly-full" in causes(diagnosis)
    assert "more are needed at least" in of(diagnosis, "disk").found


def test_folders_that_can_and_cannot_be_used(tmp_path: Path) -> None:
    assert check_home(tmp_path).cause == "home-fine"
    assert check_home(tmp_path / "new").cause == "home-missing"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    assert check_home(tmp_path / "file").cause == "home-unwritable"


async def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        assert [finding.cause for finding in await check_ports([address], {}, is_running=False)] == ["port-taken"]
        assert [finding.cause for finding in await check_ports([address], {}, is_running=True)] == ["port-ours"]
    others = [LOOPBACK, "/ip4/203.0.113.1/tcp/4001", "/ip4/127.0.0.1/udp/1"]
    judged = await check_ports(others, {}, is_running=False)
    assert [finding.cause for finding in judged] == ["port-fine", "port-unusable", "port-no-address"]


async def keep(home: Path, port: int) -> None:
    """Store that the folder's node has listened on a port."""
    async with open_store(NodeSettings(home=home).store) as store:
        await keep_ports(store, {}, {LOOPBACK: port}, Journal(lambda text: None))


async def test_the_port_on_which_the_node_listened_before_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        await keep(tmp_path, port)
        finding = of(await look(tmp_path, None), "port")
    assert (finding.cause, finding.level) == ("port-kept-taken", Level.WARNING)
    assert f"port {port}, on which this node listened before" in finding.found


async def test_peers_try_the_announced_addresses_while_the_doctor_listens_on_the_kept_port(tmp_path: Path) -> None:
    kept, closed = free_ports(2)
    await keep(tmp_path, kept)
    async with open_peer() as peer:
        invite = invite_to(*peer.addresses)
        for announced, cause in ((kept, "nat-public"), (closed, "nat-announced-closed")):
            finding = of(await look(tmp_path, invite, announce=[f"/ip4/127.0.0.1/tcp/{announced}"]), "nat")
            assert finding.cause == cause
            assert str(announced) in finding.found


def test_an_announced_address_is_judged_only_where_peers_have_tried_it() -> None:
    def cause(announced: str, kind: ReachabilityKind = ReachabilityKind.PUNCHABLE) -> str:
        return judge_nat(Verdict(kind, (("8.8.8.8", 4001),)), [announced]).cause

    assert cause("/ip4/8.8.8.8/tcp/4001") == "nat-announced-closed"
    assert cause("/ip4/8.8.8.8/tcp/4001", ReachabilityKind.PUBLIC) == "nat-public"
    assert cause("/ip4/8.8.4.4/tcp/4001") == "nat-announced-moved"
    assert cause("/dns/node.example.org/tcp/4001") == "nat-punchable"
    assert cause("/ip4/8.8.8.8/tcp/80") == "nat-punchable"


def test_text_that_is_there_or_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "text").write_text("hello")
    paths = [tmp_path / name for name in ("empty", "full", "missing")]
    assert [finding.cause for finding in check_data(paths)] == ["data-empty", "data-fine", "data-unreadable"]


def test_streams_are_judged_by_their_names_and_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ["owner/name", "owner/name:config", str(tmp_path), "https://example.org/x"]
    judged = check_data([], streams)
    assert [finding.cause for finding in judged] == ["data-stream"] * 3 + ["data-no-stream"]
    assert [finding.cause for finding in check_data([tmp_path], streams)] == ["data-two-kinds"]
    monkeypatch.setattr("farandole.node.inspect.machine._STREAMS_NEED", "a_package_that_nobody_has")
    (finding,) = check_data([], ["owner/name"])
    assert (finding.cause, "pip install 'datasets" in finding.remedy) == ("data-no-package", True)


def test_what_a_run_asks_for_and_nobody_has_named_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnModel(function="package.models:build", ends={"weight": (1,)})
    right, wrong = (hashlib.sha256(content).hexdigest() for content in (b"file", b"other"))
    manifest = Manifest(
        "tiny",
        msgspec.structs.replace(MODEL, own=own, width=0, num_heads=0, hidden=0),
        data=DataConfig(source="text"),
        tokenizer=TokenizerConfig("tokenizers", right),
    )
    needs = [finding.cause for finding in check_needs(manifest, NodeSettings(home=tmp_path))]
    assert needs == ["run-needs-text", "run-needs-model", "run-needs-tokenizer"]
    settings = NodeSettings(
        home=tmp_path, stream=["owner/name"], tokenizer=tmp_path / "t.json", allow_model=["package.models:build"]
    )
    for content, words in ((None, "cannot be read (No such file"), (b"other", f"has SHA-256 {wrong}")):
        if content is not None:
            (tmp_path / "t.json").write_bytes(content)
        (finding,) = check_needs(manifest, settings)
        assert finding.cause == "run-tokenizer-other"
        assert words in finding.found
    (tmp_path / "t.json").write_bytes(b"file")
    assert check_needs(manifest, settings) == []
    monkeypatch.setattr("farandole.node.inspect.machine.find_spec", lambda name: None)
    (finding,) = check_needs(manifest, settings)
    assert (finding.cause, "install" in finding.remedy) == ("run-needs-package", True)


def test_what_pytorch_says_of_itself() -> None:
    fine = b'{"version":"2","device":"CPU (x86_64)"}'
    for stdout, has_nvidia, cause in (
        (fine, False, "torch-fine"),
        (fine, True, "gpu-unused"),
        (b'{"version":"2","error":"PyTorch finds no cuda"}', False, "device-missing"),
        (b"", True, "torch-broken"),
    ):
        done = subprocess.CompletedProcess([], 0, stdout, b"Traceback:\nImportError: libcudart")
        assert judge_torch(done, has_nvidia=has_nvidia).cause == cause


async def test_a_process_that_holds_the_key_and_says_nothing(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        assert "node-silent" in causes(await look(tmp_path, None), Level.WARNING)


async def test_peers_have_the_names_that_the_node_here_knows(tmp_path: Path) -> None:
    async def status(params: dict[str, Any]) -> object:
        return msgspec.structs.replace(STATUS, names={peer.peer_id: "Anna's PC"})

    async with open_peer() as peer, trio.open_nursery() as nursery:
        with locked(tmp_path / "lock"):
            await nursery.start(serve_control, tmp_path / "control.sock", {"status": status})
            diagnosis = await look(tmp_path, invite_to(*peer.addresses))
            nursery.cancel_scope.cancel()
    assert f'{peer.peer_id[-8:]} "Anna\'s PC"' in of(diagnosis, "invite").found


# Whole examinations


def test_the_command_says_it_as_json_and_by_its_exit_code(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with the process that imports PyTorch
    home = tmp_path / "another"
    command = ("doctor", "--home", home, "--listen", LOOPBACK, "--device", "cpu")
    (tmp_path / "torch.py").write_text("raise SystemExit('another program')")  # it is not taken for PyTorch
    monkeypatch.chdir(tmp_path)
    code, said, _ = cli(*command, "--json")
    assert code == Exit.OK
    diagnosis = msgspec.json.decode(said, type=Diagnosis)
    assert diagnosis.is_well
    assert diagnosis.schema == 1
    assert of(diagnosis, "torch").cause == "torch-fine"
    assert {finding.check for finding in diagnosis.findings} == set(CHECKS)
    assert not home.exists()
    load_or_create_key(home / "key")
    (home / "key").chmod(0o640)
    code, said, _ = cli(*command)
    assert (code, "chmod 600" in said) == (Exit.NOT_WELL, True)


def test_the_report_shows_failures_then_warnings_and_folds_what_passed() -> None:
    findings = (
        found("home-fine", home="/home/bob"),
        found("key-readable-by-others", key="/home/bob/key", mode="640"),
        found("memory-untold"),
        found("invite-none"),
        found("bootstrap-none"),
    )
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(diagnosis_screen(conclude(findings)))
    *told, passed, failed = captured.get().splitlines()
    assert [line.split()[1] for line in told] == ["failed", "chmod", "warning", "give"]
    assert passed.rstrip() == "1 check passed: home"
    assert failed.startswith("1 check failed: key; not examined: memory (no run is known); bootstrap (no address")


def test_without_any_route_the_network_is_named_and_no_peer() -> None:
    doors = make_doors([(bytes(32), f"/ip4/8.8.8.8/tcp/{port}/p2p/{peer_id_of(bytes(32))}") for port in (1, 2)])
    for door in doors:
        door.ips, door.knock = ["8.8.8.8"], "no route"
    assert [finding.cause for finding in judge_doors(doors)] == ["bootstrap-offline"]
    doors[0].knock = "refused"
    assert [finding.cause for finding in judge_doors(doors)] == ["bootstrap-refused", "bootstrap-no-route"]


def test_what_must_be_fixed_has_a_remedy() -> None:
    bad = [(text, remedy) for level, text, remedy in CAUSES.values() if level in (Level.FAILED, Level.WARNING)]
    assert [text for text, remedy in bad if not remedy] == []
    assert [text for _, text, remedy in CAUSES.values() if "\n" in text + remedy] == []

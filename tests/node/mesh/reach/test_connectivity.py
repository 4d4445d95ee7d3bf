"""Nodes on loopback that find out how they can be reached, use relays, and relay."""

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh.addresses import OwnAddresses
from farandole.node.mesh.dialler import Reservation
from farandole.node.mesh.reach import reachability as reachability_module
from farandole.node.mesh.reach.connectivity import MAX_STRANGERS, NUM_RELAYS, RelayKeeper
from farandole.node.mesh.reach.reachability import Dialback, Examiner, Reachability, ask_time, tell_time
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.kademlia import relay_key
from farandole.protocol.mesh.reachability import DIALBACK_PROTOCOL, ReachabilityKind, Verdict
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.identity import public_bytes

from ....patience import PATIENCE
from ...hosts import connected_pair, hang, host_at_loopback, open_home, open_node, open_relay, until

RUN = bytes(32)
HIDDEN = Verdict(ReachabilityKind.RELAY_ONLY)
PUBLIC = Verdict(ReachabilityKind.PUBLIC)
PAUSE = 0.2


def test_who_can_be_dialled_over_ipv6_alone_has_relays_for_those_without_it() -> None:
    public = ReachabilityKind.PUBLIC
    assert Reachability(Verdict(public, (("2a05::1", 4001),))).needs_relays
    assert not Reachability(Verdict(public, (("2a05::1", 4001), ("8.8.8.8", 4001)))).needs_relays
    assert not Reachability(PUBLIC).needs_relays


async def test_who_has_no_listener_keeps_two_relays_and_is_reached_through_them() -> None:
    async with (
        open_node(verdict=PUBLIC) as (one, _),
        open_node(verdict=PUBLIC) as (two, _),
        open_node(verdict=PUBLIC) as (three, _),
        open_node([]) as (home, connectivity),
        host_at_loopback() as caller,
    ):
        for relay in (one, two, three):
            await home.connect(relay.author, relay.addresses)
        await until(lambda: len(home.addresses) == NUM_RELAYS)
        assert connectivity.reachability.verdict.kind is ReachabilityKind.RELAY_ONLY
        assert len(home.relays.reservations) == NUM_RELAYS
        await caller.connect(home.author, home.addresses)
        assert caller.connections.path(home.author) == "relayed"


async def test_relays_are_kept_while_witnesses_still_try() -> None:
    async with open_node(verdict=PUBLIC) as (relay, _), open_node() as (home, connectivity):
        relay.set_handler(DIALBACK_PROTOCOL, hang)
        await home.connect(relay.author, relay.addresses)
        await until(lambda: len(home.relays.reservations) == 1)
        assert connectivity.reachability.verdict.kind is ReachabilityKind.UNKNOWN


async def test_nothing_makes_holes_while_a_witness_dials() -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob, trio.open_nursery() as nursery:
        begun, done = trio.Event(), trio.Event()

        async def hesitate(stream: Libp2pStream) -> None:
            begun.set()
            await done.wait()

        bob.set_handler(DIALBACK_PROTOCOL, hesitate)
        await alice.connect(bob.author, bob.addresses)
        dialback = Dialback(alice)

        async def ask() -> None:
            with pytest.raises(PeerUnreachableError):
                await dialback.ask(bob.author)
            assert dialback.holed_at < trio.current_time() - PAUSE

        nursery.start_soon(ask)
        await begun.wait()
        Dialback(bob)

        async def observe() -> None:
            async with dialback.observed_by(bob.author) as witness:
                assert witness.answer.port == alice.own.listening[0][1]

        nursery.start_soon(observe)
        await trio.sleep(PAUSE)
        done.set()


async def test_who_seems_public_by_a_hole_alone_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnAddresses, "ips", property(lambda host: ["192.168.1.10"]))  # behind NAT
    async with connected_pair() as (alice, bob):
        Dialback(bob)
        reachability = Reachability(HIDDEN)
        examiner = Examiner(alice, reachability)
        async with examiner.dialback.observed_by(bob.author):
            pass
        assert await examiner.examine()
        assert reachability.verdict == HIDDEN
        monkeypatch.setattr(reachability_module, "HOLE_SECONDS", 0.0)
        monkeypatch.setattr(reachability_module, "DIAL_INTERVAL", 0.0)
        assert await examiner.examine()
        assert reachability.verdict.kind is ReachabilityKind.PUBLIC


async def test_relays_that_nobody_is_connected_with_are_found_in_the_dht() -> None:
    async with (
        host_at_loopback() as bootstrap,
        open_node(verdict=PUBLIC) as (relay, _),
        open_node([], HIDDEN) as (home, _),
    ):
        await relay.connect(bootstrap.author, bootstrap.addresses)
        while not await bootstrap.dht.find_providers(relay_key(RUN), PATIENCE):
            pass
        await home.connect(bootstrap.author, bootstrap.addresses)
        await until(lambda: any(relay.peer_id in address for address in home.addresses))


async def test_who_becomes_public_gives_its_relays_up_and_relays_itself() -> None:
    async with open_node(verdict=PUBLIC) as (relay, _), open_node(verdict=HIDDEN) as (home, connectivity):
        await home.connect(relay.author, relay.addresses)
        await until(lambda: len(home.relays.reservations) == 1)
        connectivity.reachability.set(PUBLIC)
        await until(lambda: not home.relays.reservations and not any("p2p-circuit" in a for a in home.addresses))
        await relay.relays.reserve(home.author)


async def test_several_may_have_the_port_that_listens_seen_at_once_and_again_by_whom_they_dialled() -> None:
    async with connected_pair() as (alice, bob):
        asker, witness = Dialback(alice), Dialback(bob)
        for _ in range(2):
            async with asker.observed_by(bob.author) as one, asker.observed_by(bob.author) as two:
                assert one == two
                assert (one.answer.ip, one.answer.port) == alice.own.listening[0]
        with pytest.raises(PeerUnreachableError):
            async with witness.observed_by(alice.author):
                pass  # alice was the one that dialled


async def test_a_dial_for_a_view_that_hangs_is_given_up_and_left_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected_pair() as (alice, bob):
        asker, _ = Dialback(alice), Dialback(bob)
        with monkeypatch.context() as patch:
            patch.setattr(asker, "_dial", hang)
            with pytest.raises(PeerUnreachableError):
                async with asker.observed_by(bob.author, timeout=0.05):
                    pass
        async with asker.observed_by(bob.author) as witness:
            assert (witness.answer.ip, witness.answer.port) == alice.own.listening[0]


async def test_who_asks_too_often_is_not_dialled() -> None:
    async with connected_pair() as (alice, bob):
        Dialback(bob)
        asker = Dialback(alice)
        assert (await asker.ask(bob.author)).answer.reached == (alice.own.listening[0][1],)
        answer = (await asker.ask(bob.author)).answer
        assert (answer.has_dialled, answer.reached) == (False, ())


async def test_one_address_does_not_keep_others_from_being_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability_module, "MAX_DIALLING_PER_ADDRESS", 1)
    async with (
        host_at_loopback() as alice,
        host_at_loopback() as bob,
        host_at_loopback() as witness,
        trio.open_nursery() as tasks,
    ):
        Dialback(witness)
        is_dialling, go_on = trio.Event(), trio.Event()

        async def hesitate(peer: bytes, target: tuple[str, int]) -> None:
            is_dialling.set()
            await go_on.wait()

        monkeypatch.setattr(witness.upgrader, "prove", hesitate)
        for host in (alice, bob):
            await host.connect(witness.author, witness.addresses)
        tasks.start_soon(Dialback(alice).ask, witness.author)
        await is_dialling.wait()
        refused = (await Dialback(bob).ask(witness.author)).answer
        assert (refused.has_dialled, refused.reached) == (False, ())
        go_on.set()


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", frame(b"nonsense", 256), b""])
async def test_hostile_witnesses_and_askers_are_refused(raw: bytes) -> None:
    async with host_at_loopback() as alice, host_at_loopback() as mallory:
        asker = Dialback(alice)
        await alice.connect(mallory.author, mallory.addresses)
        stream = await mallory.open_stream(alice.author, DIALBACK_PROTOCOL)
        await stream.send_all(raw)
        await stream.send_eof()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()

        async def lie(stream: Libp2pStream) -> None:
            await stream.receive_some()
            await stream.send_all(raw)

        mallory.set_handler(DIALBACK_PROTOCOL, lie)
        with pytest.raises(PeerUnreachableError):
            await asker.ask(mallory.author)
        assert mallory.author in alice.connected


async def test_a_clock_is_compared_to_within_half_the_round_trip() -> None:
    noon = 1_800_000_000.0
    async with connected_pair() as (alice, bob):
        tell_time(bob, lambda: noon)
        began_at = trio.current_time()
        ahead = await ask_time(alice, bob.author, lambda: noon + 3_600)
        assert abs(ahead - 3_600) <= trio.current_time() - began_at


async def test_in_a_large_run_a_few_strangers_are_asked_at_a_time_and_the_likeliest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = [public_bytes(Ed25519PrivateKey.generate()) for _ in range(4 * MAX_STRANGERS)]
    asked: list[bytes] = []
    asked_before: list[int] = []
    held: list[bytes] = []
    async with open_relay() as relay, open_home() as home, trio.open_nursery() as nursery:
        home.dialler.add_addresses(relay.host.author, relay.host.addresses)
        for member in members:
            home.dialler.add_addresses(member, ["/ip4/127.0.0.1/tcp/9"])
        ask = home.relays.reserve

        async def reserve(peer: bytes) -> Reservation:
            if peer in members:
                asked.append(peer)
            return await ask(peer)

        async def find() -> list[bytes]:
            asked_before.append(len(asked))
            if len(asked_before) == 3:
                held.extend(each.relay for each in home.relays.reservations)
                nursery.cancel_scope.cancel()
            return [relay.host.author, *members]

        monkeypatch.setattr(home.relays, "reserve", reserve)
        keeper = RelayKeeper(home, Reachability(HIDDEN), bytes(32))
        monkeypatch.setattr(keeper, "_find", find)
        nursery.start_soon(keeper.run)
    assert held == [relay.host.author]
    assert len(set(asked)) == len(asked)
    assert asked_before == [0, MAX_STRANGERS - 1, 2 * MAX_STRANGERS - 1]

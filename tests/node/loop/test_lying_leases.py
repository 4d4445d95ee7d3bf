"""Two real nodes train on an epoch, and a member without a trainer claims that all of it is done."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import trio

from farandole.node.state.gossip import GossipService
from farandole.protocol.epochs.lease_claims import MAX_SHARE
from farandole.protocol.run.slices import Sections, parts
from farandole.protocol.state.entries import Beat, Kind, Lease, LeasedSlices
from farandole.protocol.wire.identity import public_key_of

from ..daemons import joined
from ..outsiders import light_member
from .test_epoch import data_of, drawn, num_done, signed_run, write_texts

MAX_MEAN = 1.2


async def lie(gossip: GossipService, victim: bytes, num_slices: int) -> None:
    """Claim every two seconds that eight leases never held and all bits are done; in between, that the run is over."""
    while (lease := gossip.state.payload(victim, Lease)) is None:
        await gossip.changed()
    size = num_slices // MAX_SHARE
    leases = [LeasedSlices(first, size, size) for first in range(0, num_slices - size + 1, size)]
    rest = LeasedSlices(num_slices - size, size, size)
    stories = (leases[:8], [*leases[8:15], rest], [LeasedSlices(0, 1), *leases[:7]])
    number = 0
    while True:
        epoch = 1 if number % 4 == 3 else 0
        told = () if epoch else tuple(stories[number % 4])
        await gossip.publish(Kind.BEAT, 0, Beat(number, number, None, 2**40))
        await gossip.publish(Kind.LEASE, 0, Lease(epoch, lease.corpus, told))
        for index, raw in enumerate(parts(Sections(num_slices).all)):
            await gossip.publish(Kind.LEASE, index + 1, Lease(0, lease.corpus, (), raw))
        number += 1
        await trio.sleep(2.0)


async def test_a_member_that_never_exchanged_ends_no_epoch(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    write_texts(texts, 5)
    signed = signed_run(tmp_path, {})
    data = ("--data", str(texts), "--log-level", "debug", "--slow", "40")
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("listening on")
        async with joined(tmp_path / "bob", alice.invite(signed.run_id), *data) as bob:
            await alice.says("trainer ready")
            await bob.says("trainer ready")
            status = await alice.status()
            num_slices = (await data_of(alice))["slices"]
            async with light_member(tmp_path / "mallory", signed, alice) as mallory, trio.open_nursery() as nursery:
                nursery.start_soon(lie, mallory, public_key_of(status.peer_id), num_slices)
                status = await alice.until(lambda now: now.data is not None and now.data.doubted > 0.5 * num_slices)
                assert status.data is not None
                assert (status.data.epoch, status.data.done < 0.5 * num_slices) == (1, True), "the rest is doubted"
                await num_done(alice, round(0.7 * num_slices))
                for node in (alice, bob):
                    await node.says("all 1 epochs are done")
                nursery.cancel_scope.cancel()
    counts = sum((drawn(tmp_path / name) for name in ("alice", "bob")), Counter[int]())
    print(f"\n{num_slices:,} slices, each trained on {counts.total() / num_slices:.4f} times")
    assert set(counts) == set(range(num_slices)), "no slice is left out"
    assert counts.total() <= MAX_MEAN * num_slices

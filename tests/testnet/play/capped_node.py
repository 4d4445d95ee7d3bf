"""A node in its own process: ``give IP MBIT FOLDER`` or ``take ADDRESS IP MBIT FOLDER``, a checkpoint by a cap."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.errors import PeerUnreachableError
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.mesh.host import open_host
from farandole.node.transfers.fetch import Conditions, ask_for_index, fetch_checkpoint
from farandole.node.transfers.holdings import Holding
from farandole.node.transfers.serve import BlockService
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.wire.identity import public_key_of

from ...node.transfers.files import RUN, checkpoint_bytes, hold

NUM_ELEMENTS = 3_000_000  # 48 MB: half a minute at 12 Mbit/s


async def give(ip: str, mbit: float, folder: Path) -> None:
    shaping = Shaping.of_mbit(mbit, 0)
    holding = hold(folder / "theirs", checkpoint_bytes(NUM_ELEMENTS))

    async def find(question: BlockQuestion) -> Holding:
        await trio.lowlevel.checkpoint()
        return holding.hold()

    key = Ed25519PrivateKey.generate()
    async with (
        open_host(key, [f"/ip4/{ip}/tcp/0"], shaping=shaping) as host,
        open_bulk(host, b"r" * 32, shaping) as channels,
    ):
        BlockService(Conditions(host, RUN, shaping, channels), find).register()
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()


async def take(address: str, ip: str, mbit: float, folder: Path) -> None:
    shaping, donor = Shaping.of_mbit(0, mbit), public_key_of(address.rpartition("/")[2])
    async with (
        open_host(Ed25519PrivateKey.generate(), [f"/ip4/{ip}/tcp/0"], shaping=shaping) as host,
        open_bulk(host, b"r" * 32, shaping) as channels,
    ):
        host.dialler.add_addresses(donor, [address])
        conditions = Conditions(host, RUN, shaping, channels)
        while True:  # a busy machine may be too slow to answer the first time
            with contextlib.suppress(PeerUnreachableError):
                signed, index = await ask_for_index(conditions, donor, 0, 1 << 30)
                print("taking", flush=True)
                await fetch_checkpoint(conditions, signed, index, lambda: [donor], lambda name: True, folder / "ours")
                return


if __name__ == "__main__":
    if sys.argv[1] == "give":
        trio.run(give, sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
    else:
        trio.run(take, sys.argv[2], sys.argv[3], float(sys.argv[4]), Path(sys.argv[5]))

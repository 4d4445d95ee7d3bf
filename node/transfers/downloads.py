"""Downloads of one node: a checkpoint from members that hold it, and if they are few, from providers in the DHT."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import trio

from farandole.protocol.checkpoints.blocks import Index, SignedIndex
from farandole.protocol.mesh.kademlia import checkpoint_key
from farandole.protocol.run.outer_rules import is_required
from farandole.protocol.wire.identity import short_name

from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..join.bootstrap import reachable_providers
from ..mesh.host import Host
from ..state.membership import Membership
from ..status.journal import Journal
from ..store.disk_space import WeightFiles
from .donor import Conditions
from .fetch import Fetched, Show, ask_for_index, fetch_checkpoint

# The assumed rate of a line until a download has been measured, bytes a second: 10 Mbit/s.
USUAL_RATE: Final = 1.25e6
# With fewer donors than this in the run state, the DHT is asked for more.
ENOUGH_DONORS: Final = 2


@dataclass
class Downloads:
    """Fetches from checkpoints what a newcomer needs; remembers the rate."""

    host: Host
    conditions: Conditions
    files: WeightFiles
    membership: Membership
    journal: Journal
    rate: float = field(init=False)
    """The last download's rate in bytes a second; before the first one, the cap, or a guess."""
    is_measured: bool = field(init=False, default=False)
    """Whether a download has measured the rate."""

    def __post_init__(self) -> None:
        self.rate = self.conditions.shaping.down.rate or USUAL_RATE

    def _accuse(self, donor: bytes, reason: str) -> None:
        """Take credit from a donor that gives bytes which its index contradicts: it is not believed for a while."""
        self.journal.warn(f"{short_name(donor)} {reason}")
        self.membership.credit.lose([donor], trio.current_time())

    async def ask(self, donor: bytes, stage: int, known: bytes | None = None) -> tuple[SignedIndex, Index]:
        """Ask a donor for the index of its newest checkpoint of a stage, or of the one with the id ``known``.

        Raises `PeerUnreachableError`.
        """
        return await ask_for_index(self.conditions, donor, stage, self.files.max_bytes(stage), known)

    async def fetch(
        self, signed: SignedIndex, index: Index, donors: tuple[bytes, ...], path: Path, show: Show, *, is_copy: bool
    ) -> Fetched | None:
        """Fetch from these donors and all others that hold the checkpoint; on failure, warn and return None.

        ``is_copy``: as blocks for other nodes, with low priority; else as a file for this node's trainer.
        """
        began_at, membership = trio.current_time(), self.membership
        in_dht: list[bytes] = []

        def known() -> dict[bytes, None]:
            return dict.fromkeys((*donors, *membership.holders(index.stage, signed.id), *in_dht))

        async def ask_dht() -> None:
            if len(known()) < ENOUGH_DONORS and not is_copy:
                in_dht.extend(await reachable_providers(self.host, checkpoint_key(index.run_id, signed.id)))

        try:
            async with open_service_nursery() as nursery:
                nursery.start_soon(ask_dht)
                fetched = await fetch_checkpoint(
                    self.conditions,
                    signed,
                    index,
                    known,
                    partial(is_required, self.files.manifest.outer),
                    path,
                    show,
                    self._accuse,
                    is_prefix=is_copy,
                )
        except PeerUnreachableError as error:
            self.journal.warn(f"no weights of round {index.round}: {error}")
            return None
        self.journal.exchanges.bytes_received += fetched.num_bytes
        if fetched.num_bytes:
            self.rate = fetched.num_bytes / max(trio.current_time() - began_at, 1e-3)
            self.is_measured = True
        return fetched

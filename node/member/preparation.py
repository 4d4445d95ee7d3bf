"""What happens before each trainer starts: weights are put in place, and what earlier ones found out is restored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.state.entries import Progress
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.supervisor import Supervisor

from ..loop.stage_service import wait_quiet
from ..state.membership import Membership
from ..state.store import StoreError
from ..transfers.start import Start
from ..transfers.weights import Weights
from .parts import Daemon

TOKENS_FACT: Final = "tokens"
MICROBATCH_FACT: Final = "microbatch"


@dataclass(frozen=True, slots=True)
class Preparation:
    """The preparation of each trainer: it puts weights in place and makes the trainer's first command."""

    daemon: Daemon
    author: bytes
    run_id: bytes
    manifest: Manifest
    membership: Membership
    weights: Weights
    start: Start | None
    supervisor: Supervisor

    async def restore_counters(self, told: Progress | None) -> None:
        """Restore the counters of earlier starts: own tokens, as stored or as last reported to the run, and the round.

        The round goes into the first heartbeat: a peer that hears it must not think that the run is just beginning.
        """
        store, journal, supervisor = self.daemon.store, self.daemon.journal, self.supervisor
        stored = await store.get_fact(TOKENS_FACT)
        journal.update(tokens=max(int(stored or 0), told.tokens if told else 0))
        if not supervisor.microbatch:  # what fitted into memory on the same device; 0 if all did
            device, _, size = ((await store.get_fact(MICROBATCH_FACT)) or b"").rpartition(b" ")
            supervisor.microbatch = int(size) if device == self.daemon.settings.device.encode() else 0
        own_round, _ = await self.weights.rounds()
        journal.update(round=max(0, own_round or 0))

    async def prepare(self) -> messages.Prepare:
        """Put weights in place; return the next trainer's first command."""
        if self.membership.num_stages > 1:
            await wait_quiet(self.membership, self.daemon.journal)
        elif self.supervisor.microbatch:
            try:
                fact = f"{self.daemon.settings.device} {self.supervisor.microbatch}"
                await self.daemon.store.put_fact(MICROBATCH_FACT, fact.encode())
            except StoreError as error:
                self.daemon.journal.warn(f"{error}; after a restart the trainer may run out of memory again")
        await self.weights.obtain()
        while self.start is not None and await self.weights.rounds() == (None, None):
            if await self.start.obtain(self.membership.stage):
                break
            await self.weights.obtain()  # the run may have begun by now, at nodes that found its start
        names = set(messages.TrainerSettings.__struct_fields__) - {"microbatch"}
        taken = {name: getattr(self.daemon.settings, name) for name in names}
        microbatch = {"microbatch": self.supervisor.microbatch}
        as_text = msgspec.to_builtins(taken, enc_hook=str) | microbatch  # paths as text
        files, stage = self.weights.files, self.membership.stage
        self.weights.provider.trainer_stage = stage
        return messages.Prepare(
            run_id=self.run_id,
            author=self.author,
            manifest=msgspec.msgpack.encode(self.manifest),
            settings=msgspec.convert(as_text, messages.TrainerSettings),
            fetched=str(files.fetched(stage)),
            start=str((self.start and self.start.path_of(stage)) or ""),
            stage=stage,
            disk=files.disk,
            checkpoint_bytes=files.max_bytes(stage),
        )

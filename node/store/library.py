"""What checkpoints this node can give: its own newest ones, and the copy that it keeps of another's.

An own one is opened, and its index signed, when the trainer has written it. It stays open while the run knows this node
to hold it, however often the trainer saves meanwhile. A copy lies in the same folder as the author's first blocks, up
to the last that a newcomer needs, with the author's index beside it; so a next life has it too.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.blocks import Index, decode_signed_index, encode_signed_index, max_index_bytes, sign_index
from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.identity import public_bytes
from farandole.protocol.safetensors import header_size, parse_header
from farandole.protocol.trainer_messages import Saved
from farandole.training.durable import replacing

from .folder import index_of
from .holdings import Holding
from .partial_file import PARTIAL_SUFFIX

logger = logging.getLogger(__name__)

# Own checkpoints that are kept open beside those that the run knows of: the newest, and what is being announced.
NUM_OPEN: Final = 2
COPY_SUFFIX: Final = ".blocks"


class Library:
    """The open checkpoints of one node, in ``folder``.

    ``told``: the ids of those that the run knows this node to hold. ``on_held`` is told of each new one, and whether it
    is a copy. Methods raise no `OSError`: what cannot be opened is not given.
    """

    def __init__(
        self,
        folder: Path,
        key: Ed25519PrivateKey,
        run_id: bytes,
        num_stages: int,
        max_bytes: Callable[[int], int],
        told: Callable[[], frozenset[bytes]],
        on_held: Callable[[Holding, bool], None],
    ) -> None:
        self.copy: Holding | None = None
        """The one that it keeps of another's."""
        self._folder = folder
        self._key = key
        self._run_id = run_id
        self._num_stages = num_stages
        self._max_bytes = max_bytes
        self._told = told
        self._on_held = on_held
        self._own: list[Holding] = []

    @property
    def newest(self) -> Holding | None:
        """Of this node's own."""
        return self._own[-1] if self._own else None

    def find(self, checkpoint_id: bytes) -> Holding | None:
        """The one with this id."""
        return next((h for h in (*self._own, self.copy) if h is not None and h.id == checkpoint_id), None)

    async def note_saved(self, saved: Saved, stage: int) -> None:
        """The trainer has written this checkpoint of a stage."""
        try:
            holding = await trio.to_thread.run_sync(self._open_saved, saved, stage)
        except (OSError, RemoteProtocolError, ValueError) as error:
            logger.warning("the checkpoint of round %d cannot be given to others: %s", saved.round, error)
            return
        told = self._told()
        for older in self._own[: max(0, len(self._own) + 1 - NUM_OPEN)]:
            if older.id not in told:
                self._own.remove(older)
                older.let_go()
        self._own.append(holding)
        self._on_held(holding, False)

    def forget_own(self) -> None:
        """This node has another stage now."""
        while self._own:
            self._own.pop().let_go()

    def _open_saved(self, saved: Saved, stage: int) -> Holding:
        path = Path(saved.path)
        with path.open("rb") as file:
            first = file.read(8)
            header = parse_header(first + file.read(header_size(first, saved.size) - len(first)), saved.size)
        index = Index(
            run_id=self._run_id,
            author=public_bytes(self._key),
            stage=stage,
            num_stages=self._num_stages,
            round=saved.round,
            inner_steps=saved.inner_steps,
            tokens=saved.tokens,
            size=saved.size,
            layout=bytes.fromhex(header.metadata.get("layout", "")),
            hashes=saved.hashes,
        )
        signed = sign_index(self._key, index)
        holding = Holding.open(path, signed, index)
        with contextlib.ExitStack() as unless_it_is_right:
            unless_it_is_right.callback(holding.let_go)
            if not index.is_block(0, holding.read(0)):  # which has the counters
                raise OSError(f"{path.name} has been replaced since")
            unless_it_is_right.pop_all()
        try:
            with replacing(index_of(path)) as file:
                file.write(encode_signed_index(signed))
        except OSError as error:  # a full disk: the checkpoint is there all the same
            logger.warning("the index of %s is not written: %s", path.name, error)
        return holding

    # The copy

    def copy_path(self, stage: int, checkpoint_id: bytes) -> Path:
        """Where a copy is to lie."""
        return self._folder / f"copy-{stage}-{checkpoint_id.hex()[:16]}{COPY_SUFFIX}"

    async def forget_begun(self, path: Path) -> None:
        """Remove what is left of copies that were begun and will not be ended: of all but that at ``path``."""
        for begun in await trio.to_thread.run_sync(
            lambda: list(self._folder.glob(f"copy-*{COPY_SUFFIX}.*{PARTIAL_SUFFIX}"))
        ):
            if not begun.name.startswith(path.name):
                with contextlib.suppress(OSError):
                    await trio.to_thread.run_sync(begun.unlink)

    async def keep_copy(self, path: Path, index: Index, raw_index: bytes) -> None:
        """This file is the copy from now on; older ones are removed."""
        try:
            holding = await trio.to_thread.run_sync(self._open_copy, path, raw_index)
        except (OSError, RemoteProtocolError) as error:
            logger.warning("the copy of round %d cannot be kept: %s", index.round, error)
            return
        self._take_copy(holding)

    async def recall_copy(self) -> None:
        """What an earlier life kept, if there is one and it is of this run."""
        for path in await trio.to_thread.run_sync(self._copies):
            with contextlib.suppress(OSError, RemoteProtocolError):
                self._take_copy(await trio.to_thread.run_sync(self._open_copy, path, None))
                return

    async def give_up_copies(self) -> None:
        """There is no room for any."""
        self.drop_copy()
        for path in await trio.to_thread.run_sync(lambda: list(self._folder.glob(f"copy-*{COPY_SUFFIX}*"))):
            with contextlib.suppress(OSError):
                await trio.to_thread.run_sync(path.unlink)

    def drop_copy(self) -> None:
        """It is of no more use here."""
        if self.copy is not None:
            self.copy.let_go()
            self.copy = None

    def _take_copy(self, holding: Holding) -> None:
        self.drop_copy()
        self.copy = holding
        self._on_held(holding, True)

    def _copies(self) -> list[Path]:
        """Those that an earlier life left; one, unless it was killed between making a new one and removing the old."""
        return sorted(self._folder.glob(f"copy-*{COPY_SUFFIX}"))

    def _open_copy(self, path: Path, raw_index: bytes | None) -> Holding:
        if raw_index is None:
            with index_of(path).open("rb") as file:
                raw_index = file.read(max_index_bytes(max(map(self._max_bytes, range(self._num_stages)))) + 1)
        else:
            with replacing(index_of(path)) as file:
                file.write(raw_index)
        max_size = max(map(self._max_bytes, range(self._num_stages)))
        holding = Holding.open(path, *decode_signed_index(raw_index, self._run_id, max_size))
        for other in self._folder.glob(f"copy-*{COPY_SUFFIX}*"):
            if other not in (path, index_of(path)):
                with contextlib.suppress(OSError):
                    os.unlink(other)
        return holding

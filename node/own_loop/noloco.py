"""`NoLoCo`: a run, joined from a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from farandole.protocol.errors import ManifestError
from farandole.protocol.invite import decode_invite, is_invite
from farandole.protocol.manifest import decode_manifest

from ..base.control import call
from ..base.settings import NodeSettings, default_home
from ..store.consolidated.folder import MANIFEST_NAME
from .attachment import Attachment, Loop
from .child_node import ChildNode, run_of_node
from .create import start_of


class NoLoCo:
    """Trains ``model`` with the members of a run, from the loop in a ``with`` block.

    The block begins with the run's weights. Each step of ``optimizer`` is an inner step; outer steps are taken between
    two of them, on the parameters, in place. The loop, the data, the optimizer and its state are the caller's.

    ``run``: an invite, the directory that `create_run` has made, or None for the run of the node in ``home``.
    ``home``: the node's data directory; by default the one in which a node of this run is on, or one for this run.
    A node that is not on is started, and leaves when the block ends. ``evaluate``: returns the held-out loss of the
    model as it is; without it other members' contributions are judged by distance alone. ``tokens_per_step``: what a
    step counts for, since a pair's mean is weighted by it. ``recipe``: compared with the one of `create_run`.
    ``options``: flags for ``farandole join``, such as ``["--listen", "/ip4/0.0.0.0/tcp/4001"]``.

    Raises `NodeError` if there is no node, `ManifestError` for a ``run`` that is none, and `ValueError` if the run is
    of another model. In the loop, ``optimizer.step`` raises `NodeError` when the node is gone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        run: str | Path | None = None,
        *,
        home: str | Path | None = None,
        evaluate: Callable[[], float] | None = None,
        tokens_per_step: int = 1,
        recipe: str = "",
        options: Sequence[str] = (),
    ) -> None:
        ranks = torch.distributed
        if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
            raise ValueError("ranks of torch.distributed cannot be one member yet: train with one process")
        run_id, source, folder = _find_run(run)
        self.home = Path(home) if home is not None else folder or _home_of(run_id)
        self._optimizer = _unwrapped(optimizer)
        self._node = ChildNode(self.home, [*source, "--trainer", "external", *options])
        loop = Loop(model, recipe, evaluate, tokens_per_step)
        door = NodeSettings(home=self.home).door
        self._attachment = Attachment(door, run_id, loop, self._node.why_gone)
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def __enter__(self) -> Self:
        try:
            self._node.begin()
            self._attachment.begin()
        except BaseException:  # Ctrl-C too: `__exit__` is not called when `__enter__` fails
            self._end()
            raise
        self._hook = self._optimizer.register_step_post_hook(self._on_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _on_step(self, optimizer: torch.optim.Optimizer, arguments: object, keywords: object) -> None:
        self._attachment.turns.step_taken()

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        try:
            self._attachment.end()
        finally:
            self._node.end()

    def report(self, loss: float) -> None:
        """Show the loss of a step in this node's status, and to the other members; every step's or some steps'."""
        if self._attachment.engine is not None:
            self._attachment.engine.note_loss(float(loss))

    @property
    def round(self) -> int:
        """Outer steps taken."""
        engine = self._attachment.engine
        return 0 if engine is None else engine.round

    @property
    def tokens(self) -> int:
        """What the steps count for so far: ``tokens_per_step`` each."""
        engine = self._attachment.engine
        return 0 if engine is None else engine.tokens

    @property
    def partner(self) -> str:
        """Peer id of the last round's partner; empty: its outer step was taken alone, or the node trains no more."""
        return "" if self.is_over else str(self.status()["partner"])

    @property
    def members(self) -> list[str]:
        """Peer ids of the members that are there, this node's among them; none once the node trains no more."""
        if self.is_over:
            return []
        return [member["peer_id"] for member in self.status()["members"] if not member["has_left"]]

    @property
    def is_over(self) -> bool:
        """Whether this node trains no more: the loop goes on by itself."""
        return bool(self._attachment.over)

    def status(self) -> dict[str, Any]:
        """What ``farandole status --json`` prints. Raises `NodeError`'s base, `FarandoleError`, if the node is gone."""
        answer: dict[str, Any] = call(self.home, "status")
        return answer

    def invite(self) -> str:
        """An invite for another member."""
        from ..join.own_invite import own_invite  # with libp2p's addresses, which a loop needs for nothing else

        return own_invite(self.home)


def _find_run(run: str | Path | None) -> tuple[bytes, list[str], Path | None]:
    """The run's id (empty: any), what ``farandole join`` is given, and the data directory if the run has named one."""
    if run is None:
        return b"", [], None
    if isinstance(run, str) and is_invite(run) and not Path(run).exists():
        return decode_invite(run).run_id, [run], None
    folder = Path(run)
    if (start := start_of(folder)) is None:
        raise ManifestError(f"{run} is no invite, and no directory that farandole.create_run has made")
    manifest = start / MANIFEST_NAME
    return decode_manifest(manifest.read_bytes())[1].run_id, [str(manifest), "--start", str(start)], folder


def _home_of(run_id: bytes) -> Path:
    """The usual data directory if a node of this run is on there, else one of the run's own below it."""
    home = default_home()
    return home if not run_id or run_of_node(home) == run_id.hex() else home / "runs" / run_id.hex()[:16]


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers of other libraries, such as accelerate's: its hooks are called."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer

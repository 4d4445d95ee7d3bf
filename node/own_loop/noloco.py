"""`NoLoCo`: a run, joined from a user's own loop."""

from __future__ import annotations

import argparse
import atexit
import inspect
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from farandole.protocol.run.invite import decode_invite, is_invite
from farandole.protocol.run.manifest import decode_manifest
from farandole.protocol.wire.errors import ManifestError
from farandole.training.base.errors import TrainingError
from farandole.training.cluster.external import Loop, Measure
from farandole.training.cluster.ranks import Follower, open_ranks

from ..base.control import call
from ..base.settings import NodeSettings, default_home
from ..state.store import MANIFEST_FACT, read_fact
from ..store.consolidated.folder import MANIFEST_NAME
from .attachment import Attachment, NodeError, logger
from .child_node import ChildNode, await_node, run_of_node
from .create import START_NAME

# Of one that trains the model between two steps of the given one: a loop has gone on with a new optimizer.
MAX_STEPS_OF_OTHERS: Final = 100


class NoLoCo:
    """Trains ``model`` with the members of a run, from the loop in a ``with`` block.

    The block begins with the run's weights. Each step of ``optimizer`` is an inner step; outer steps are taken between
    two of them, on the parameters, in place. The loop, the data, the optimizer and its state are the caller's.

    ``run``: an invite, the directory that `create_run` has made, or None for the run of the node in ``home``.
    A node that does not run is started, and leaves when the block ends. ``evaluate``: returns the held-out loss of the
    present model, in nats a token; without it other members' contributions are judged by distance alone. It may return
    a pair, the loss and the tokens of its text over the bytes in UTF-8: then the node shows bits per byte too, which
    compare models with other tokenizers. ``tokens_per_step``: tokens that a step counts for; they weight a pair's mean,
    and by default a step is one. A run whose model built-in trainers train too needs them. ``recipe``: compared with
    the one of `create_run`.
    ``options``: flags for ``farandole join``, such as ``["--port", "4001"]``. ``--home``, the node's data directory, is
    by default the one in which a node of this run runs, or one for this run.

    Several processes of `torch.distributed`, each of which enters the block, are one member, whose node is rank 0's.
    Parameters may be cut over them in any way that makes DTensors, such as `fully_shard`.

    Raises `NodeError` if there is no node, another `FarandoleError` for a ``run`` that is none, is of another model or
    takes no loops. In the loop, ``optimizer.step`` raises `NodeError` when the node is gone; so does the block, if the
    node gets neither into the run nor on with the download of its weights for ``timeout`` seconds, without rests. The
    logger ``farandole`` repeats its warnings.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        run: str | Path | None = None,
        *,
        evaluate: Measure | None = None,
        tokens_per_step: int | None = None,
        recipe: str = "",
        options: Sequence[str] = (),
        timeout: float = 600.0,
    ) -> None:
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner  # wrappers of other libraries, such as accelerate's, call its hooks
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TrainingError(f"a {type(optimizer).__name__} is no torch.optim.Optimizer")
        self._model, self._optimizer = model, optimizer
        self._optimizers = WeakSet[torch.optim.Optimizer]()  # that have taken steps in this block
        self._ranks = ranks = open_ranks()
        # Another rank may be on a machine without the run's folder.
        run_id, source, folder = _find_run(run) if ranks.is_leader else (b"", [], None)
        flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        flags.add_argument("--home", type=Path)
        given, others = flags.parse_known_args(options)
        own_home = given.home or folder or default_home()
        if given.home is None and folder is None and run_id and await_node(own_home) != run_id.hex():
            own_home = own_home / "runs" / run_id.hex()[:16]  # no node of this run is in the usual directory
        self.home = Path(ranks.of_leader(str(own_home)))
        self._node = ChildNode(self.home, [*source, "--trainer", "external", *others])
        self._member: Attachment | Follower
        if ranks.is_leader:
            store = NodeSettings(home=self.home).store
            if run is None and read_fact(store, MANIFEST_FACT) is None and not await_node(self.home):
                raise ManifestError(
                    f"which run? {self.home} knows none: give run= an invite, or a directory of farandole.create_run; "
                    "or start a node with `farandole join INVITE --trainer external`"
                )
            loop = Loop(model, recipe, evaluate, tokens_per_step, ranks, optimizers=self._optimizers)
            self._member = Attachment(self._node, run_id, loop, timeout)
            if evaluate is None:
                logger.warning("without evaluate= others are judged by distance: what is far away counts in part")
        else:
            self._member = Follower(ranks, model, evaluate, self._optimizers)
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._pid = 0  # of the process that has entered the block
        self._steps_of_others = WeakKeyDictionary[torch.optim.Optimizer, int]()  # since the last one of ours

    def __enter__(self) -> Self:
        if self._pid:
            raise NodeError("this NoLoCo has been entered before: make another one for another block")
        self._pid = os.getpid()
        try:
            if self._ranks.is_leader:
                self._node.begin()
            self._member.begin()
        except BaseException:  # Ctrl-C too: `__exit__` is not called when `__enter__` fails
            self._end(has_failed=True)
            raise
        self._hook = register_optimizer_step_post_hook(self._step_taken)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end(has_failed=kind is not None)

    def _end(self, *, has_failed: bool) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        try:
            # Ranks end a round together: where one has failed, the others may be waiting for it elsewhere.
            self._member.end(has_failed=has_failed and self._ranks.are_many)
        finally:
            if self._ranks.is_leader:
                self._node.end()

    def _step_taken(self, optimizer: torch.optim.Optimizer, *step: object) -> None:
        """Note a step of any optimizer in this process. Raises `FarandoleError` if the run cannot follow it."""
        self._optimizers.add(optimizer)
        if optimizer is not self._optimizer:
            self._steps_of_others[optimizer] = count = self._steps_of_others.get(optimizer, 0) + 1
            if count == MAX_STEPS_OF_OTHERS:
                theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                if not theirs.isdisjoint(map(id, self._model.parameters())):
                    raise TrainingError("another optimizer trains the model by now: enter a new NoLoCo with that one")
            return
        self._steps_of_others.clear()
        if os.getpid() != self._pid:
            raise NodeError("a process forked from the loop's has no node: let the loop's process take the steps")
        if torch._C._current_graph_task_id() != -1:
            raise TrainingError(
                "this optimizer steps during the backward pass, which still needs the parameters. Give NoLoCo one that "
                "steps after it: torch.optim.SGD([torch.zeros(1, requires_grad=True)]) does"
            )
        before = self.round
        self._member.step_taken()
        if isinstance(optimizer, torch.optim.LBFGS) and self.round != before:
            optimizer.state.clear()  # it computes curvature from steps, and the outer step was none of its own

    def report(self, loss: float) -> None:
        """Show the loss of a step in this node's status, and to the other members; every step's or some steps'."""
        self._member.report(float(loss))

    @property
    def round(self) -> int:
        """Outer steps taken."""
        return self._member.round

    @property
    def tokens(self) -> int:
        """Tokens trained on: ``tokens_per_step`` for each step."""
        return self._member.tokens

    @property
    def partner(self) -> str:
        """Peer id of the last round's partner; empty: its outer step was taken alone, or the node trains no more.

        Of several ranks, those on rank 0's machine can ask for it. So for `members`, `status` and `invite`.
        """
        return "" if self.is_over or not self._has_node() else str(self.status()["partner"])

    @property
    def members(self) -> list[str]:
        """Peer ids of the present members, including this node's; none while the node trains not, or no more."""
        if self.is_over or not self._has_node():
            return []
        return [member["peer_id"] for member in self.status()["members"] if not member["has_left"]]

    @property
    def is_over(self) -> bool:
        """True if this node trains no more; the loop then goes on alone."""
        return self._member.is_over

    def status(self) -> dict[str, Any]:
        """Return the JSON of ``farandole status``. Raises `FarandoleError`, `NodeError`'s base, if the node is gone."""
        self._has_node()
        answer: dict[str, Any] = call(self.home, "status")
        return answer

    def _has_node(self) -> bool:
        """Return whether there is a node to ask; before and after the block a person's own may run."""
        has_node = (self._ranks.is_leader and self._hook is not None) or bool(run_of_node(self.home))
        if not has_node and not self._ranks.is_leader:
            raise NodeError("ask rank 0 for partner, members, status() and invite(): the node is on its machine")
        return has_node

    def invite(self) -> str:
        """Return an invite for another member."""
        self._has_node()
        from ..join.invites import own_invite  # with libp2p's addresses, which a loop needs for nothing else

        return own_invite(self.home)


class OfTrainer:
    """What the callbacks for other libraries' trainers have in common; takes what `NoLoCo` takes."""

    def __init__(self, run: Any = None, **settings: Any) -> None:
        inspect.signature(NoLoCo).bind(None, None, run, **settings)  # raises `TypeError` for a name that is none
        self._run, self._settings = run, settings
        self.noloco: NoLoCo | None = None
        """The node's handle during training; otherwise None."""

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._end()
        self.noloco = NoLoCo(model, optimizer, self._run, **self._settings).__enter__()
        atexit.register(self._end)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit)  # by default a process ends without what is registered

    def _end(self) -> None:
        noloco, self.noloco = self.noloco, None
        if noloco is not None:
            atexit.unregister(self._end)
            noloco.__exit__(None, None, None)
            if signal.getsignal(signal.SIGTERM) is _exit:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: object) -> NoReturn:
    """End the process as after Ctrl-C."""
    raise SystemExit(128 + number)


def _find_run(run: str | Path | None) -> tuple[bytes, list[str], Path | None]:
    """Return the run's id (empty: any), ``farandole join``'s arguments, and the data directory if ``run`` names one."""
    if run is None:
        return b"", [], None
    if isinstance(run, str) and is_invite(run) and not os.path.exists(run):  # Path's raises for a long invite
        return decode_invite(run).run_id, [run], None
    folder = Path(run)
    manifest = folder / START_NAME / MANIFEST_NAME
    if not os.path.exists(manifest):
        raise ManifestError(
            f"{run} is no invite, and no directory that farandole.create_run has made. For a manifest, start the node: "
            f"farandole join {run} --trainer external, and leave out run="
        )
    return decode_manifest(manifest.read_bytes())[1].run_id, [str(manifest), "--start", str(manifest.parent)], folder

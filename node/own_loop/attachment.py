"""The thread in which the engine follows a user's loop: it attaches to the node, and obeys it like a trainer process.

The node ends a trainer now and then, to restart it with newer weights, or because its owner pauses it. Then this thread
attaches again, and the loop waits in its optimizer's step. When the node is gone the loop fails there. When the node
trains no more, the loop goes on alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
import weakref
from typing import Final

from farandole.protocol.run.manifest import Manifest, decode_body
from farandole.protocol.run.own_model import recipe_hash
from farandole.protocol.trainer.trainer_messages import Dismiss, Failed, Prepare
from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.errors import TrainingError, UnfitWeightsError
from farandole.training.cluster.external import ExternalEngine, Loop, LoopEnded, Turns, loaded_from
from farandole.training.cluster.ranks import Order
from farandole.training.model.base_folder import require_base

from ..base.system.sockets import connect
from ..trainer.channel import TrainerSocket
from ..trainer_process.process import StopAsked, TrainerProcess
from .child_node import ChildNode, status_of

logger = logging.getLogger("farandole")

# A node that starts, or starts again, listens within this time; one that this process has started, as long as it lives.
ATTACH_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 0.2
CONNECT_SECONDS: Final = 10.0
# At the end of a loop: the last exchange has its deadline, and the checkpoint must reach the disk.
END_SECONDS: Final = 90.0
# Interval of looks at the node's status.
LOOK_SECONDS: Final = 5.0
# Bytes a second of a download that goes on; heartbeats are fewer.
DOWNLOAD_RATE: Final = 20_000.0

_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked data loader: otherwise the node would not see this process die."""
    for connection in _connections:
        with contextlib.suppress(OSError):
            connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class NodeError(FarandoleError):
    """The node is gone, or refuses this loop; the message says what to do."""


class Attachment:
    """Follows one loop until it is over. ``run_id`` is empty for whatever run the node is in.

    ``timeout``: seconds without progress after which a node that does not get into the run is given up.
    """

    def __init__(self, node: ChildNode, run_id: bytes, loop: Loop, timeout: float = math.inf) -> None:
        self.turns = Turns()
        self.engine: ExternalEngine | None = None
        self.is_over = False  # whether the node trains no more
        self._node = node
        self._run_id = run_id
        self._loop = loop
        self._timeout = timeout
        self._given_up = ""  # why the node is given up
        self._ended = threading.Event()
        self._is_following = False
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="farandole", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="farandole's warnings", daemon=True)

    def begin(self) -> None:
        """Attach, and wait for the loop's first turn. Raises the engine's error if that fails."""
        self._watcher.start()
        self._thread.start()
        self.turns.wait()

    def end(self, *, has_failed: bool = False) -> None:
        """End the loop: wait until its last outer step is taken and saved, unless it has failed, and its round too."""
        self._ended.set()
        if has_failed or not self._is_following:
            self._hang_up()
        self.turns.leave()
        if self._thread.ident is None:  # an earlier step has failed
            self._dismiss_ranks(Order.FAILED)
            return
        try:
            self._thread.join(END_SECONDS)
            self._watcher.join(CONNECT_SECONDS)
        finally:  # interrupted, too
            self._hang_up()

    def step_taken(self) -> None:
        """Wait for the next turn after a step of the loop's optimizer."""
        self.turns.step_taken()

    @property
    def round(self) -> int:
        """Outer steps taken."""
        return 0 if self.engine is None else self.engine.totals.round

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return 0 if self.engine is None else self.engine.totals.tokens

    def report(self, loss: float) -> None:
        """Show the loss of a step."""
        if self.engine is not None:
            self.engine.note_loss(loss)

    def _hang_up(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    # The watcher's thread

    def _watch(self) -> None:
        """Log what the node warns of and why it rests, until the loop is over; give it up if it makes no progress."""
        told_at, told_rest, waited = time.time(), "", 0.0
        while not (self._ended.wait(LOOK_SECONDS) or self.is_over):
            status = status_of(self._node.home)
            for event in status.get("events", []):
                if event["is_warning"] and event["at"] > told_at:
                    logger.warning("the node warns: %s", event["text"])
                    told_at = event["at"]
            rest = status["phase_detail"] if status.get("phase") == "paused" else ""
            if rest not in ("", told_rest):
                logger.warning("the loop waits, since its node rests: %s", rest)
            told_rest = rest
            rate = status["bytes_received_per_second"] if status.get("phase") == "fetching weights" else 0.0
            waited = 0.0 if rest or rate > DOWNLOAD_RATE or self.engine is not None else waited + LOOK_SECONDS
            if waited >= self._timeout:
                why = "; ".join([status.get("phase_detail", "it does not answer"), *status.get("warnings", [])[-1:]])
                self._given_up = f"no run, or no weights of it, within {self._timeout:g} s (NoLoCo's timeout): {why}"
                self._hang_up()

    # The engine's thread

    def _run(self) -> None:
        try:
            while not (self._ended.is_set() or self.is_over):
                # Follow the loop until the node, or the loop, ends it; `_connect` finds out why the node is gone.
                with contextlib.suppress(EOFError, ConnectionError), self._connect() as connection:
                    _connections.add(connection)
                    self._connection = connection
                    if self._ended.is_set():  # since the connection was made: there was none yet to hang up
                        break
                    channel = TrainerSocket(connection)
                    match channel.receive():
                        case Prepare() as prepare:
                            self._follow(channel, prepare, decode_body(prepare.manifest))
                        case Dismiss() as dismissal:
                            self._take_dismissal(dismissal)
                        case command:
                            raise EOFError(f"the first command must be Prepare, not {type(command).__name__}")
        except BaseException as error:  # raised again in the loop's thread, which waits for its turn
            self._dismiss_ranks(Order.FAILED)
            self.turns.end(error)
        else:
            self._dismiss_ranks(Order.OVER)
            self.turns.end()

    def _dismiss_ranks(self, order: Order) -> None:
        with contextlib.suppress(RuntimeError):  # one of them is gone: the error that ends this rank's thread says more
            self._loop.ranks.tell(order)

    def _take_dismissal(self, dismissal: Dismiss) -> None:
        if not dismissal.is_over:
            raise NodeError(dismissal.reason)
        self.is_over = True
        logger.warning("this node trains no more (%s): the loop goes on by itself", dismissal.reason)

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + ATTACH_SECONDS
        while True:
            if self._given_up:
                raise NodeError(self._given_up)
            try:
                connection = connect(self._node.door, CONNECT_SECONDS)
            except (FileNotFoundError, ConnectionError) as error:
                reason, is_starting = self._node.why_gone()
                if reason or (time.monotonic() > deadline and not is_starting):
                    raise NodeError(
                        reason or f"no node waits for a loop at {self._node.door}: farandole join --trainer external"
                    ) from error
                if self._ended.wait(RETRY_SECONDS):
                    raise EOFError("the loop is over") from error
            else:
                connection.settimeout(None)
                return connection

    def _follow(self, channel: TrainerSocket, prepare: Prepare, manifest: Manifest) -> None:
        """Compare the run with the loop, and continue from the node's weights until the node, or the loop, ends it."""
        loop, external = self._loop, manifest.model.external
        self._node.was_attached = True
        try:
            if self._run_id and prepare.run_id != self._run_id:
                raise TrainingError(
                    f"the node is in run {prepare.run_id.hex()[:16]}, and this loop is for {self._run_id.hex()[:16]}"
                )
            if external is None and loop.recipe:
                raise TrainingError("this run was made without a recipe: leave out recipe=")
            if external is not None and loop.recipe and external.recipe != recipe_hash(loop.recipe):
                raise TrainingError("the recipe differs from the one that the run was made with: ask its creator")
            if external is not None and external.base:
                require_base(loaded_from(loop.model), external.base)
            allowed_models = prepare.settings.allow_model
            self.engine = ExternalEngine(
                loop, manifest, self.turns, run_id=prepare.run_id, allowed_models=allowed_models
            )
            trainer = TrainerProcess(channel, prepare, manifest, self.engine)
        except UnfitWeightsError as error:
            channel.send(Failed(str(error), "weights"))
            return
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            channel.send(Failed(f"the loop cannot train here: {error}", "detached"))
            raise
        self._is_following = True
        try:
            while True:
                trainer.handle(trainer.next_command())
        except LoopEnded:
            trainer.end()
        except StopAsked as stopped:
            if isinstance(stopped.command, Dismiss):
                self._take_dismissal(stopped.command)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:  # whatever it is, the node gets a report before the loop gets the error
            channel.send(Failed(f"the loop failed: {type(error).__name__}: {error}", "detached"))
            raise
        finally:
            self._is_following = False
            trainer.close()

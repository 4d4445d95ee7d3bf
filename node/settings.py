"""What a volunteer decides about a node: where it lives, whom it dials, what it trains with, how it speaks.

What all nodes of a run must agree on is in the manifest (`farandole.protocol.manifest`), never here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .mapping.router import LEASE_SECONDS

HOME_VARIABLE = "FARANDOLE_HOME"
# Any free port on every IPv4 interface.
DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/0"
# A tighter cap cannot promise a newcomer the slowest download that it waits for: 50 kbit/s, half of what is left for
# bulk whatever else goes on (`farandole.node.transfers`), the other half being for an exchange.
MIN_CAP_MBIT: Final = 0.5


def default_home() -> Path:
    """``$FARANDOLE_HOME``, or ``~/.farandole``."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".farandole")


@dataclass(frozen=True)
class NodeSettings:
    """One daemon's settings. Durations are seconds."""

    home: Path = field(default_factory=default_home)
    """The node's folder: everything that it keeps lies below it."""
    invite: str | None = None
    """The text of an invite (`farandole.protocol.invite`)."""
    manifest: Path | None = None
    """A manifest file, for the first node of a run. Both given: they must be of one run."""
    listen: list[str] = field(default_factory=lambda: [DEFAULT_LISTEN])
    """Multiaddrs to listen on."""
    bootstrap: list[str] = field(default_factory=list)
    """Multiaddrs (with ``/p2p/``) to dial beside the invite's."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``."""
    data: list[Path] = field(default_factory=list)
    """Files or folders of text, for manifests whose data source is ``text``."""
    tokenizer: Path | None = None
    """The Hugging Face tokenizer file, for manifests that name one by its hash."""
    max_rounds: int | None = None
    """Train no further than this round, then stay online as ``finished``; None: as long as the daemon runs."""
    slow: float = 1.0
    """Each inner step is followed by a pause of (slow - 1) times its length: politeness, and tests."""
    microbatch: int = 0
    """Sequences of a batch that the trainer takes at a time; 0: as many as fit, which is all of them until its memory
    was used up once. Of models that are not cut."""
    stage: int | None = None
    """Which stage of a model that is cut into several this node holds, for good; None: the one that the run needs."""
    checkpoint_seconds: float = 60.0
    backup_seconds: float | None = None
    """Between two downloads of the next stage's weights, kept for whoever must begin that stage anew; None: twice
    ``checkpoint_seconds``. A run whose model is not cut has none."""
    heartbeat_seconds: float = 10.0
    """Base period of the run state's heartbeats (run-state T); the testnet, with few nodes, takes 2."""
    threads: int = 1
    """Torch threads of the trainer: one is the fastest where several nodes share a machine."""
    validate_every: int = 10
    """Rounds between two measurements on the held-out split; 0: never."""
    upload_mbit: float = 0.0
    """The most that is sent, in Mbit/s, and likewise received; 0: no cap, else `MIN_CAP_MBIT` or more."""
    download_mbit: float = 0.0
    relay: bool = True
    """Pass peers on to each other while this node is publicly reachable, within `farandole.protocol.relay.Limits`."""
    mdns: bool = True
    """Find others of the run in this machine's own networks, and be found there."""
    port_mapping: bool = True
    """Ask the home's router to send on this node's port, by NAT-PMP or UPnP."""
    log_level: str = "info"
    json_log: bool = False
    """Log lines as JSON objects, for machines."""

    @property
    def port_lease(self) -> int | None:
        """For how many seconds at a time the router is asked; None: it is not."""
        return LEASE_SECONDS if self.port_mapping else None

    @property
    def key(self) -> Path:
        """The Ed25519 key, mode 0600."""
        return self.home / "key"

    @property
    def lock(self) -> Path:
        """Held while a daemon uses the key."""
        return self.home / "lock"

    @property
    def store(self) -> Path:
        """SQLite: run state, manifest, known peers."""
        return self.home / "store.sqlite"

    @property
    def control(self) -> Path:
        """The control API's socket."""
        return self.home / "control.sock"

    @property
    def checkpoints(self) -> Path:
        """Replicas: slow weights, momentum, optimizer, position in the data (`farandole.node.checkpoints.folder`)."""
        return self.home / "checkpoints"

    def fetched(self, stage: int | None) -> Path:
        """A peer's checkpoint, until the trainer has judged it: then it is the node's own newest, or goes."""
        return self._weights("fetched", stage)

    def backup(self, stage: int) -> Path:
        """A checkpoint of a stage that this node does not hold, for others."""
        return self._weights("backup", stage)

    def _weights(self, name: str, stage: int | None) -> Path:
        return self.home / (f"{name}.safetensors" if stage is None else f"{name}-{stage}.safetensors")

    @property
    def log(self) -> Path:
        """The daemon's log."""
        return self.home / "log"

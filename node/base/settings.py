"""What a volunteer decides about a node: where it lives, whom it dials, what it trains with, how it speaks.

What all nodes of a run must agree on is in the manifest (`farandole.protocol.manifest`), never here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from .config.setting import setting
from .quiet_hours import split_quiet_hours

HOME_VARIABLE = "FARANDOLE_HOME"
# Any free port on every IPv4 interface.
DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/0"
# A tighter cap cannot promise a newcomer the slowest download that it waits for: 50 kbit/s, half of what is left for
# bulk whatever else goes on (`farandole.node.store.serve`), the other half being for an exchange.
MIN_CAP_MBIT: Final = 0.5

# How long a router keeps a port mapping: a router that is switched off forgets it anyway, and one whose node is gone
# should not keep it for long.
PORT_LEASE_SECONDS: Final = 3_600

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "human", "json"]


def default_home() -> Path:
    """``$FARANDOLE_HOME``, or ``~/.farandole``."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".farandole")


class InHome:
    """A path in the folder of the settings that it belongs to."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, settings: NodeSettings, owner: type[NodeSettings]) -> Path:
        return settings.home / self._name


@dataclass(frozen=True)
class NodeSettings:
    """One daemon's settings (`farandole.node.base.config.setting`)."""

    home: Path = field(default_factory=default_home)
    """The node's folder: everything that it keeps lies below it."""
    invite: str | None = setting(
        None,
        "An invite; or a manifest file, for a run's first node.",
        placeholder="INVITE|MANIFEST",
        unset="the run that this folder knows",
        example="farandole1...",
        is_argument=True,
    )
    manifest: Path | None = None
    """A manifest file, for the first node of a run. With an invite too: they must be of one run."""
    listen: list[str] = setting([DEFAULT_LISTEN], "Multiaddr to listen on; repeatable.", placeholder="MULTIADDR")
    bootstrap: list[str] = setting(
        [],
        "Multiaddr to dial beside the invite's; repeatable.",
        placeholder="MULTIADDR",
        example=["/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."],
    )
    trainer: Literal["own", "external"] = setting(
        "own",
        "own: this node trains by itself; external: a loop of yours trains, which attaches with farandole.NoLoCo, in "
        "runs that such loops train.",
    )
    device: str = setting("auto", "What trains: auto, cpu, cuda, cuda:1, mps.", placeholder="DEVICE")
    data: list[Path] = setting(
        [],
        "File or folder of text, JSON lines, Parquet, or a saved data set, for runs that ask for text; repeatable.",
        placeholder="PATH",
        example=["texts"],
    )
    tokenizer: Path | None = setting(
        None,
        "The run's Hugging Face tokenizer file.",
        placeholder="FILE",
        unset="none, for runs that need none",
        example="tokenizer.json",
    )
    data_field: str = setting(
        "text",
        "Of JSON lines the field, of Parquet files and data sets the column, that has the text.",
        placeholder="NAME",
    )
    stream: list[str] = setting(
        [],
        "A Hugging Face data set to train on while it is downloaded, instead of --data: OWNER/NAME, or "
        "OWNER/NAME:CONFIG, or a folder that has one; repeatable. Needs the extra data.",
        placeholder="DATASET",
        example=["HuggingFaceFW/fineweb-edu:sample-10BT"],
    )
    allow_model: list[str] = setting(
        [],
        "A function of an installed package that may make the run's model, for runs that bring one of their own; "
        "repeatable. It runs with your rights.",
        placeholder="PACKAGE.MODULE:FUNCTION",
        example=["mypackage.models:build"],
    )
    max_rounds: int | None = setting(
        None,
        "Stop training after this round, stay online as finished.",
        unit="rounds",
        least=1,
        unset="trains as long as it runs",
        example=1000,
    )
    disk: float = setting(
        0.0,
        "What this node's folder takes at most; 0: what it needs. Given up first: the copy of another's checkpoint, "
        "then the second newest of its own.",
        unit="GB",
        least=0.2,
        or_zero=True,
    )
    slow: float = setting(
        1.0, "Rest between inner steps: 2 trains half the time, 1 always.", placeholder="FACTOR", least=1
    )
    step_seconds: float = setting(
        0.0,
        "An inner step takes at least so long, and the rest of it is rest: a pace that does not depend on what else "
        "the machine does. Of models that are not cut; 0: no bound.",
        unit="seconds",
        least=0,
    )
    quiet_hours: list[str] = setting(
        [],
        "Hours in which this node does not train, in local time: 22:00-07:30, or Sat-Sun 09:00-18:00; repeatable.",
        placeholder="HOURS",
        form="a list of hours in quotes, each as 22:00-07:30 or Sat-Sun 09:00-18:00",
        read=split_quiet_hours,
        example=["Mon-Fri 18:00-23:00"],
    )
    only_when_idle: bool = setting(
        False, "Train only while nobody else uses this machine's NVIDIA GPU, and while it is not on its battery."
    )
    on_battery: bool = setting(False, "With --only-when-idle: train on the battery too.")
    idle_cpu_percent: float = setting(
        0.0,
        "With --only-when-idle: rest while other programs take more than this of all cores; 0: they may. On Linux.",
        unit="percent",
        least=1.0,
        most=100.0,
        or_zero=True,
    )
    ignore_notices: bool = setting(
        False, "Train on when the run's creator pauses or stops the run; its messages are shown all the same."
    )
    microbatch: int = setting(
        0,
        "Sequences of a batch that the trainer takes at a time; 0: as many as fit, which is all of them until its "
        "memory was used up once. Of models that are not cut.",
        unit="sequences",
        least=0,
    )
    compile: bool = setting(
        False,
        "Compile inner steps with torch.compile before the first, which takes a minute and pays on a GPU. It needs a "
        "C++ compiler. Of models that are not cut.",
    )
    stage: int | None = setting(
        None,
        "Hold this stage of a model that is cut into several, for good: stage 0 draws the data.",
        placeholder="STAGE",
        least=0,
        unset="the one that the run needs most",
        example=0,
    )
    start: Path | None = setting(
        None,
        "A consolidated checkpoint, for the first node of a run that starts from it; the others fetch it.",
        placeholder="FOLDER",
        unset="fetched from others, for runs that have one",
        example="model",
    )
    checkpoint_seconds: float = setting(60.0, "Between checkpoints.", unit="seconds", least=0.1)
    backup_seconds: float | None = setting(
        None,
        "Between two looks for a newer checkpoint of another node to keep a copy of, for those who come.",
        unit="seconds",
        least=0.1,
        unset="5",
        example=120.0,
    )
    # Far beyond what a slow disk or a busy machine makes a trainer wait.
    hung_seconds: float = setting(
        300.0,
        "Start the trainer anew when it gives no sign of life for so long, and for 20 of its own inner steps.",
        unit="seconds",
        least=1.0,
    )
    # The base period T of the run state's heartbeats; the testnet, with few nodes, takes 2.
    heartbeat_seconds: float = setting(10.0, "Between heartbeats.", unit="seconds", least=0.1)
    # One is the fastest where several nodes share a machine.
    threads: int = setting(1, "Threads of the trainer: the cores that training takes at most.", unit="threads", least=1)
    gpu_memory: float = setting(
        0.0,
        "Of the GPU's memory, what the trainer takes at most; 0: what it needs. With little it takes few sequences at "
        "a time.",
        unit="GB",
        least=1.0,
        or_zero=True,
    )
    validate_every: int = setting(10, "Rounds between measurements on held-out text; 0: never.", unit="rounds", least=0)
    upload_mbit: float = setting(
        0.0, "Send no faster than this in all; 0: no cap.", unit="Mbit/s", least=MIN_CAP_MBIT, or_zero=True
    )
    download_mbit: float = setting(
        0.0, "Receive no faster than this in all; 0: no cap.", unit="Mbit/s", least=MIN_CAP_MBIT, or_zero=True
    )
    monthly_traffic: float = setting(
        0.0,
        "Move no more than this in a calendar month, both ways together; 0: no budget. It is spent evenly: rounds for "
        "which there is none yet are not exchanged.",
        unit="GB",
        least=1.0,
        or_zero=True,
    )
    # Within `farandole.protocol.relay.Limits`.
    relay: bool = setting(True, "Pass on to each other peers behind NAT, while this node is publicly reachable.")
    mdns: bool = setting(True, "Find others of the run in the local network, by multicast, and be found there.")
    upnp: bool = setting(True, "Ask the home's router to send on this node's port, by NAT-PMP or UPnP.")
    dashboard: bool = setting(True, "Serve a page about this node to this machine's browser: `farandole dashboard`.")
    dashboard_port: int = setting(
        8710, "Of that page, on 127.0.0.1; another one if it is taken.", placeholder="PORT", least=0, most=65_535
    )
    log_level: LogLevel = setting("info", "What goes into the log file, beside what is worse.")
    log_format: LogFormat = setting(
        "auto",
        "What this node tells of itself: human, lines for people, or json, an object a line for machines; auto: for "
        "people at a terminal and in systemd's journal, for machines in the log file and wherever else.",
    )
    memory_gb: float = setting(
        0.0,
        "Of a service: the memory above which systemd slows it down (MemoryHigh); 0: no bound.",
        unit="GiB",
        least=0.5,
        or_zero=True,
        is_of_service=True,
    )
    cpu_cores: float = setting(
        0.0,
        "Of a service: the cores that systemd lets it have at most (CPUQuota); 0: no bound.",
        unit="cores",
        least=0.1,
        or_zero=True,
        is_of_service=True,
    )

    @property
    def port_lease(self) -> int | None:
        """For how many seconds at a time the router is asked; None: it is not."""
        return PORT_LEASE_SECONDS if self.upnp else None

    key = InHome("key")  # Ed25519, mode 0600
    lock = InHome("lock")  # held while a daemon uses the key
    store = InHome("store.sqlite")  # run state, manifest, known peers
    control = InHome("control.sock")  # the control API's socket
    door = InHome("trainer.sock")  # where a loop of the owner's attaches
    # Replicas: slow weights, momentum, optimizer, position in the data (`farandole.node.store.folder`).
    checkpoints = InHome("checkpoints")
    tokens = InHome("tokens")  # the text that this node brings, tokenised (`farandole.training.token_cache`)
    dashboard_place = InHome("dashboard.json")  # where the page is, while the daemon runs
    rounds = InHome("rounds.jsonl")  # the rounds that are over (`farandole.node.status.round_log`)
    log = InHome("log")  # the daemon's

    def fetched(self, stage: int | None) -> Path:
        """A peer's checkpoint, until the trainer has judged it: then it is the node's own newest, or goes."""
        return self.home / ("fetched.safetensors" if stage is None else f"fetched-{stage}.safetensors")
